"""Two optimizers side by side, one of which forgets the last step before each step."""

import torch

import amp_kernels.optim as akopt

from .optimizers import f32, fill, make


def cached(optimizer):
    """The last step, if the next one may use it."""
    return optimizer._plan.cached


def launches_of(optimizer):
    """Those of its next step."""
    plan, groups = optimizer._plan, optimizer.param_groups
    return plan.launches(groups, optimizer.state, plan.hyper.packed(groups))


def make_params(dtypes=(f32,)):
    generator = torch.Generator().manual_seed(5)
    shapes = [(3, 5), (0,), (), (700,), (2, 3, 4, 5), (6, 7), (9,), (9,)]
    params = [torch.randn(shape, generator=generator).to(dtype) for dtype in dtypes for shape in shapes]
    params[4] = params[4].to(memory_format=torch.channels_last)
    params[5] = params[5].t()
    return [torch.nn.Parameter(p) for p in params]


def set_grads(params, number, dtype=None):
    generator = torch.Generator().manual_seed(number)
    for p in params:
        grad = torch.randn(p.shape, generator=generator).to(dtype or p.dtype)
        p.grad = torch.empty_like(p, dtype=grad.dtype, requires_grad=False).copy_(grad)


class Pair:
    """Two optimizers of the same parameters: `fast` as it is, `slow` without a memory. Both have taken three steps."""

    def __init__(self, name="AdamW", options=None, dtypes=(f32,), groups=1, warm=True, **more):
        def build():
            params = make_params(dtypes)
            parts = [{"params": params[i::groups]} for i in range(groups)]
            return params, make(name, parts, **{"lr": 0.1, **(options or {}), **more})

        (self.params, self.fast), (self.slow_params, self.slow) = build(), build()
        for number in range(3 if warm else 0):
            self.check_step(number, hit=number == 2)

    def both(self, change):
        change(self.fast, self.params)
        change(self.slow, self.slow_params)

    def check_step(self, number, hit=None, grads=set_grads):
        """`hit`: whether this step must read addresses only."""
        self.slow._plan.forget()
        grads(self.slow_params, number)
        self.slow.step()
        grads(self.params, number)
        before = cached(self.fast)
        self.fast.step()
        if hit is not None:
            assert (before is not None and cached(self.fast) is before) == hit
        self.check()

    def check_recovery(self, number=3, **kw):
        """A miss, then, once more from the start, a hit."""
        self.check_step(number, hit=False, **kw)
        self.check_step(number + 1, **kw)
        self.check_step(number + 2, hit=True, **kw)

    def check(self):
        for p, q in zip(self.params, self.slow_params, strict=True):
            assert p.dtype == q.dtype
            assert torch.equal(p, q)
            a, b = self.fast.state.get(p, {}), self.slow.state.get(q, {})
            assert list(a) == list(b)
            for key in a:
                assert torch.equal(a[key], b[key]), key


def warmed(params, value=1.0, **options):
    """AdamW whose next step may hit."""
    optimizer = akopt.AdamW(params, lr=0.1, **options)
    for _ in range(3):
        fill(params, value)
        optimizer.step()
    assert cached(optimizer) is not None
    return optimizer

"""Two optimizers side by side, one of which forgets the last step before each step."""

import torch

import amp_kernels.optim as akopt

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


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
    """Two optimizers of the same parameters: `fast` as it is, `slow` without a memory."""

    def __init__(self, name="AdamW", options=None, dtypes=(f32,), groups=1, **more):
        def build():
            params = make_params(dtypes)
            parts = [{"params": params[i::groups]} for i in range(groups)]
            return params, getattr(akopt, name)(parts, **{**(options or {}), **more})

        (self.params, self.fast), (self.slow_params, self.slow) = build(), build()

    def both(self, change):
        change(self.fast, self.params)
        change(self.slow, self.slow_params)

    def step(self, number, resolved=None, grads=set_grads):
        """`resolved`: whether this step must read addresses only."""
        self.slow._cached_step = self.slow._hyper_parameters = None
        self.slow._batches = ((), [])
        for optimizer, params in ((self.fast, self.params), (self.slow, self.slow_params)):
            grads(params, number)
            before = optimizer._cached_step
            optimizer.step()
            if optimizer is self.fast and resolved is not None:
                assert (before is not None and optimizer._cached_step is before) == resolved
        self.check()

    def warm(self):
        for number in range(3):
            self.step(number, resolved=number == 2)

    def check(self):
        for p, q in zip(self.params, self.slow_params, strict=True):
            assert p.dtype == q.dtype
            assert torch.equal(p, q)
            a, b = self.fast.state.get(p, {}), self.slow.state.get(q, {})
            assert list(a) == list(b)
            for key in a:
                assert torch.equal(a[key], b[key]), key

"""The optimizers under test, each with the one that it must agree with, and the lists of parameters they are run over."""

import copy
import io
from itertools import groupby

import pytest
import torch

import amp_kernels as ak
import amp_kernels.optim as akopt

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
U = 2.0**-24  # half a unit in the last place of 1.0, float32
SHAPES = [(33,), (7, 11), (), (0, 3), (2, 3, 4)]


class PublishedLion(torch.optim.Optimizer):
    """The authors' code, https://github.com/google/automl/tree/master/lion, with its state and group keys."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, *, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.sign = -1.0 if maximize else 1.0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad * self.sign
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                update = state["exp_avg"] * beta1 + grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(grad, alpha=1 - beta2)


class PublishedLAMB(torch.optim.Optimizer):
    """You et al., ICLR 2020, algorithm 2 with the identity as scaling function and with bias correction; the state, group
    keys and rules of Apex' FusedLAMB, which keeps the count of steps and the norm to clip to in its groups, where a norm of 0
    is none."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.01,
        *,
        use_nvlamb=False,
        max_grad_norm=None,
        maximize=False,
    ):
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "grad_averaging": True, "max_grad_norm": max_grad_norm or 0.0}
        super().__init__(params, defaults)
        self.use_nvlamb, self.sign = use_nvlamb, -1.0 if maximize else 1.0

    @torch.no_grad()
    def step(self):
        limit = self.param_groups[0]["max_grad_norm"]
        if limit:
            torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], limit)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad * self.sign, self.state[p]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                if group["bias_correction"]:
                    m, v = m / (1 - beta1 ** group["step"]), v / (1 - beta2 ** group["step"])
                u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                ratio = 1.0
                if (group["weight_decay"] or self.use_nvlamb) and p.norm() > 0 and u.norm() > 0:
                    ratio = p.norm() / u.norm()
                p.sub_(group["lr"] * ratio * u)


class PublishedMuon(torch.optim.Optimizer):
    """torch.optim.Muon's step, with this package's orthogonalization, for stacks of matrices too, and torch's AdamW for the groups
    that ask for it. Iterates have float32's precision before they are rounded, whatever the parameters'."""

    def __init__(
        self,
        params,
        lr=1e-3,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        ns_coefficients=(3.4445, -4.775, 2.0315),
        eps=1e-7,
        ns_steps=5,
        adjust_lr_fn=None,
        *,
        maximize=False,
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, {**defaults, "algorithm": "muon"})
        adamw = [
            {**group, "betas": (0.9, 0.999), "eps": 1e-8}
            for group in self.param_groups
            if group["algorithm"] == "adamw"
        ]
        self.adamw = torch.optim.AdamW(adamw, maximize=maximize) if adamw else None
        self.sign = -1.0 if maximize else 1.0

    @torch.no_grad()
    def step(self):
        if self.adamw:
            self.adamw.step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.numel() or group["algorithm"] == "adamw":
                    continue
                grad, state = p.grad * self.sign, self.state[p]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(grad, 1 - group["momentum"])
                u = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                stack = u.float().bfloat16().reshape(-1, *p.shape[-2:])
                steps, coefficients, eps = (group[key] for key in ("ns_steps", "ns_coefficients", "eps"))
                o = ak.newton_schulz(stack, steps, coefficients, eps).view(p.shape)
                rows, columns = p.shape[-2:]
                of_shape = max(1, rows / columns) ** 0.5
                ratio = 0.2 * max(rows, columns) ** 0.5 if group["adjust_lr_fn"] == "match_rms_adamw" else of_shape
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * ratio * o)


#: By name: torch's own optimizer, or where torch has none the published one.
REFERENCES = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Lion": PublishedLion,
    "LAMB": PublishedLAMB,
    "Muon": PublishedMuon,
}
NAMES = list(REFERENCES)
EACH = pytest.mark.parametrize("name", NAMES)
#: Those that take vectors.
ELEMENTWISE = pytest.mark.parametrize("name", [name for name in NAMES if name != "Muon"])
TORCHS = pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
#: Options that both take.
OPTIONS = {
    "AdamW": [{}, {"maximize": True}, {"betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.3}, {"weight_decay": 0.0}, {"amsgrad": True}],
    "Adam": [{}, {"weight_decay": 0.3}, {"weight_decay": 0.1, "amsgrad": True, "betas": (0.9, 0.95)},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.4},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}, {"weight_decay": 0.2, "maximize": True}],
    "Lion": [{}, {"weight_decay": 0.3, "maximize": True}, {"betas": (0.5, 0.75), "weight_decay": 0.1}, {"betas": (0.0, 0.0)}],
    "LAMB": [{"maximize": True}, {"weight_decay": 0.0}, {"weight_decay": 0.0, "use_nvlamb": True},
        {"weight_decay": 0.3, "betas": (0.5, 0.75), "eps": 1e-3}, {"bias_correction": False, "weight_decay": 0.1}],
    "Muon": [{}, {"maximize": True, "nesterov": False}, {"weight_decay": 0.3, "momentum": 0.5, "adjust_lr_fn": "match_rms_adamw"}],
}  # fmt: skip
CASES = pytest.mark.parametrize(("name", "options"), [(name, kw) for name in NAMES for kw in OPTIONS[name]])
#: One case of each, with momentum where that is an option.
STATEFUL = pytest.mark.parametrize(
    ("name", "options"), [(name, {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}) for name in NAMES]
)

ELEMENTWISE_STATEFUL = pytest.mark.parametrize(
    ("name", "options"), [case for case in STATEFUL.args[1] if case[0] != "Muon"]
)


def _is_matrix(param):
    return (param[1] if isinstance(param, tuple) else param).dim() in (2, 3)


def _groups(name, params):
    """``params``, of which Muon's matrices and others, as they come, are groups of their own."""
    if name != "Muon":
        return params
    params = list(params)
    entries = params if params and isinstance(params[0], dict) else [{"params": params}]
    runs = [(e, muon, [*run]) for e in entries for muon, run in groupby(e["params"], key=_is_matrix)]
    return [{**entry, "params": run, "algorithm": "muon" if muon else "adamw"} for entry, muon, run in runs]


def make(name, params, lr=1e-2, **options):
    return getattr(akopt, name)(_groups(name, params), lr=lr, **options)


def reference(name, params, lr=1e-2, **options):
    return REFERENCES[name](_groups(name, params), lr=lr, **options)


def weights(dtype=f32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def copies(params, dtype=None):
    """New parameters with these values."""
    return [torch.nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def gradients(params, steps, seed=1):
    """A sequence that does not depend on the values of parameters: differences are then rounding, not chaos. Sizes span
    2^-6 to 2^6."""
    generator = torch.Generator().manual_seed(seed)
    scales = [torch.randint(-6, 7, p.shape, generator=generator).float().exp2() for p in params]
    for _ in range(steps):
        yield [(torch.randn(p.shape, generator=generator) + 0.3) * s for p, s in zip(params, scales, strict=True)]


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def run(optimizer, steps, seed=1):
    """Steps over :func:`gradients`; the optimizer's parameters."""
    params = params_of(optimizer)
    for grads in gradients(params, steps, seed):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    return params


def fill(params, value):
    """The same number in every gradient."""
    for p in params:
        p.grad = torch.full_like(p, value)


def distance(a, b):
    return max(
        (x.detach().double() - y.detach().double()).abs().max().item() for x, y in zip(a, b, strict=True) if x.numel()
    )


def same(a, b):
    """True if two nests of containers and tensors are equal, dtypes included."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def snapshot(optimizer):
    """Everything that a step may write."""
    return copy.deepcopy([optimizer.state_dict()["state"], [p.detach() for p in params_of(optimizer)]])


def checkpoint(optimizer):
    """Through torch.save, as a user would."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resumed(optimizer, kind, **options):
    """An optimizer of ``kind`` over copies of the parameters, with the same checkpoint."""
    other = kind(copies(params_of(optimizer)), lr=1e-2, **options)
    other.load_state_dict(checkpoint(optimizer))
    return other

"""Where AdamW's numbers live: the layouts that `ops/adamw.py` and `step.py` time, and torch's way to the same result.

With 16-bit weights torch keeps FP32 parameters and casts them after each step (or in each forward): that cast is part
of its time. Its gradients are FP32 then, so nothing is counted against it for casting them.
"""

import functools
from dataclasses import dataclass, field

import torch

from . import lists

LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.999), 1e-8, 0.1
STEPS = 2  # of the check: the second reads the moments that the first wrote


@dataclass(frozen=True)
class Layout:
    """`update_bytes` is what an update must move a parameter: everything it reads and writes, once."""

    name: str
    param: torch.dtype
    update_bytes: int
    options: dict = field(default_factory=dict)  # of ak.optim.AdamW
    shadow: bool = False

    @property
    def step_bytes(self) -> int:
        """Of a whole step: the check and the norm read the gradients once more."""
        return self.update_bytes + self.param.itemsize

    @property
    def half(self) -> bool:
        return self.param != torch.float32

    def bounds(self) -> dict[str, float]:
        """Accepted relative errors: the rounding of what is stored; bf16 moments act on the weights too.

        Moments carry the error of the clip factor: torch's norm on a CPU is one long FP32 sum (6e-5 on 25 M elements by
        one thread).
        """
        moments = 2.0**-8 if self.options.get("state_dtype") else 2.0**-12
        return {"params": (2.0**-8 if self.half else 2e-6) + (moments if moments > 1e-3 else 0.0), "exp_avg": moments}


LAYOUTS = (
    Layout("fp32", torch.float32, 28),  # a whole step: 32, the others 34, 30, 28 and 20
    Layout("fp32 + bf16 shadow", torch.float32, 30, {"shadow_dtype": torch.bfloat16}, shadow=True),
    Layout("bf16 + fp32 master", torch.bfloat16, 28, {"master_weights": "fp32"}),
    Layout("bf16 + split master", torch.bfloat16, 26, {"master_weights": "split"}),
    Layout(
        "bf16 + split, bf16 moments",
        torch.bfloat16,
        18,
        {"master_weights": "split", "state_dtype": torch.bfloat16},
    ),
)


@dataclass
class Inputs:
    """Weights that are the same number in FP32 and 16 bits, and gradients."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]


def draw(layout: Layout, shapes: list[lists.Shape], generator: torch.Generator) -> Inputs:
    def normal(shape: lists.Shape, scale: float) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
        return drawn.mul_(scale).to(layout.param)

    return Inputs([normal(shape, 0.02) for shape in shapes], [normal(shape, 1.0) for shape in shapes])


class TorchAdamW:
    """torch's fused AdamW on FP32 parameters and gradients, and the 16-bit copy of the weights if there is one."""

    def __init__(self, layout: Layout, inputs: Inputs):
        self.params = [param.float() for param in inputs.params]
        for param, grad in zip(self.params, inputs.grads, strict=True):
            param.grad = grad.float()
        cuda = self.params[0].device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True, capturable=cuda
        )
        self.copies = [param.bfloat16() for param in self.params] if layout.half or layout.shadow else []
        self.shown = self.copies if layout.half else self.params
        # A step's passes: unscale_ 8, norm 4, clip 8, update 28, and casts 6 where there are copies.
        self.step_bytes = 54 if self.copies else 48

    def cast(self) -> None:
        if self.copies:
            torch._foreach_copy_(self.copies, self.params)

    @functools.cached_property
    def results(self) -> dict:
        return {"params": self.shown, "exp_avg": _moments(self)}


class TorchHalfAdamW:
    """torch's fused AdamW with everything in the parameters' own 16 bits: no master."""

    step_bytes = 20  # a step's passes: norm 2, clip 4, update 14
    copies: tuple = ()

    def __init__(self, layout: Layout, inputs: Inputs):
        self.params = inputs.params
        for param, grad in zip(self.params, inputs.grads, strict=True):
            param.grad = grad
        cuda = self.params[0].device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True, capturable=cuda
        )

    @property
    def results(self) -> dict:
        return {"params": self.params}


class OurAdamW:
    """ak.optim.AdamW in the layout."""

    def __init__(self, layout: Layout, inputs: Inputs):
        import amp_kernels as ak

        self.params, self.step_bytes, self.copies = inputs.params, layout.step_bytes, ()
        for param, grad in zip(self.params, inputs.grads, strict=True):
            param.grad = grad
        self.optimizer = ak.optim.AdamW(
            self.params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **layout.options
        )

    @functools.cached_property
    def results(self) -> dict:
        return {"params": self.params, "exp_avg": _moments(self)}


def _moments(adamw: TorchAdamW | OurAdamW) -> list[torch.Tensor]:
    """They stay the same tensors from the first step on: looked up once, or thousands of lookups are timed with each step."""
    state = adamw.optimizer.state
    return [state[param]["exp_avg"] for param in adamw.params]


def reference(layout: Layout, inputs: Inputs, max_norm: float | None) -> dict:
    """STEPS steps of AdamW in float64 on the same gradients, clipped to `max_norm`."""
    clip = 1.0
    if max_norm is not None:
        norm = sum(grad.double().square().sum() for grad in inputs.grads).sqrt()
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    params, exp_avgs = [], []
    for param, grad in zip(inputs.params, inputs.grads, strict=True):
        p, g = param.double(), grad.double() * clip
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for step in range(1, STEPS + 1):
            p = p * (1 - LR * WEIGHT_DECAY)
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            v = BETAS[1] * v + (1 - BETAS[1]) * g * g
            p = p - LR * (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
        params.append(p)
        exp_avgs.append(m)
    bounds = layout.bounds()
    return {"params": (params, bounds["params"]), "exp_avg": (exp_avgs, bounds["exp_avg"])}


def held_bytes(*owners) -> int:
    """Bytes of all tensors that `owners` keep (optimizers, lists, objects of this project), shared storage counted once.

    Gradients do not count: they belong to tensors, not to owners.
    """
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    pending = list(owners)
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            pending += item
        elif isinstance(item, torch.optim.Optimizer) or type(item).__module__.startswith("amp_kernels"):
            pending += vars(item).values() if hasattr(item, "__dict__") else ()
    sizes.pop(0, None)  # empty tensors
    return sum(sizes.values())

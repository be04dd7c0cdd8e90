"""The layouts of weights, masters and moments that `adamw.py` times, and torch's way to the same result.

With 16-bit weights torch keeps FP32 parameters and casts them after each step (or in each forward): that cast is part
of its time. Its gradients are FP32 then, so nothing is counted against it for casting them.
"""

import functools
from dataclasses import dataclass, field

import torch

import amp_kernels as ak

from . import lists

LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.999), 1e-8, 0.1
CODED = 33 / 32  # bytes of a moment in 8 bits
ADAMW = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
MAX_NORM = 1.0  # of a whole step
NEVER = 10**9  # growth interval
STEPS = 2  # of the check: the second reads the moments that the first wrote


@dataclass(frozen=True)
class Layout:
    """`update_bytes` is what an update must move a parameter: everything it reads and writes, once."""

    name: str
    param: torch.dtype
    update_bytes: float
    options: dict = field(default_factory=dict)  # of ak.optim.AdamW
    shadow: bool = False

    @property
    def step_bytes(self) -> float:
        """Bytes a parameter of a whole step: the check and the norm read the gradients once more."""
        return self.update_bytes + self.param.itemsize

    @property
    def half(self) -> bool:
        return self.param != torch.float32

    @property
    def in_8_bits(self) -> bool:
        return self.options.get("state_dtype") == "8bit"

    def bounds(self) -> dict[str, float]:
        """Accepted relative errors: the rounding of what is stored; bf16 moments act on the weights too.

        Moments carry the error of the clip factor: torch's norm on a CPU is one long FP32 sum (6e-5 on 25 M elements by
        one thread). Some compute 1 - 0.999 in FP32, with an error of 6e-5.
        """
        if self.in_8_bits:
            # Moments with errors of up to 10 % give the second step, which moves a weight of 0.02 by 1e-2, an error of 5 % of the
            # weight; the bound is twice that, and a step that is missing four times that.
            return {"params": 0.1, "exp_avg": 2.0**-4}
        moments = 2.0**-8 if self.options.get("state_dtype") else 2.0**-12
        return {"params": (2.0**-8 if self.half else 4e-5) + (moments if moments > 1e-3 else 0.0), "exp_avg": moments}


EIGHT_BIT = Layout("fp32, 8-bit moments", torch.float32, 12 + 4 * CODED, {"state_dtype": "8bit"})
LAYOUTS = (
    Layout("fp32", torch.float32, 28),  # a whole step: 32, the others 34, 30, 28, 20, 20.125 and 14.125
    Layout("fp32 + bf16 shadow", torch.float32, 30, {"shadow_dtype": torch.bfloat16}, shadow=True),
    Layout("bf16 + fp32 master", torch.bfloat16, 28, {"master_weights": "fp32"}),
    Layout("bf16 + split master", torch.bfloat16, 26, {"master_weights": "split"}),
    Layout("bf16 + split, bf16 moments", torch.bfloat16, 18, {"master_weights": "split", "state_dtype": torch.bfloat16}),
    EIGHT_BIT,
    Layout("bf16 + split24, 8-bit moments", torch.bfloat16, 8 + 4 * CODED, {"master_weights": "split24", "state_dtype": "8bit"}),
)  # fmt: skip


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


class AdamW:
    """An optimizer on parameters that carry gradients, and what it shows of them.

    `copies` are 16-bit copies of FP32 weights, made by `cast`; `step_bytes` is what the provider's passes of a whole
    step move a parameter.
    """

    copies: tuple[torch.Tensor, ...] | list[torch.Tensor] = ()
    step_bytes: int

    def __init__(self, params: list[torch.Tensor], grads: list[torch.Tensor], optimizer: type, **options):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        self.params = self.shown = params
        self.optimizer = optimizer(params, **ADAMW, **options)

    def cast(self) -> None:
        if self.copies:
            torch._foreach_copy_(self.copies, self.params)

    @functools.cached_property
    def results(self) -> dict:
        """Weights and moments. They stay the same tensors: looked up once, or thousands of lookups are timed with each step."""
        state = self.optimizer.state
        if getattr(self.optimizer, "state_dtype", None) == "8bit":  # shown as copies
            return {"params": self.shown}
        return {"params": self.shown, "exp_avg": [state[param]["exp_avg"] for param in self.params]}


class TorchAdamW(AdamW):
    """torch's AdamW, fused without other options, on FP32 parameters and gradients, and the 16-bit copy of the weights if there is one."""

    def __init__(self, layout: Layout, inputs: Inputs, **options):
        params, grads = ([tensor.float() for tensor in tensors] for tensors in (inputs.params, inputs.grads))
        super().__init__(params, grads, torch.optim.AdamW, **(options or _fused(params)))
        self.copies = [param.bfloat16() for param in params] if layout.half or layout.shadow else []
        self.shown = self.copies if layout.half else params
        # A step's passes: unscale_ 8, norm 4, clip 8, update 28, and casts 6 where there are copies.
        self.step_bytes = 54 if self.copies else 48


class TorchHalfAdamW(AdamW):
    """torch's fused AdamW with everything in the parameters' own 16 bits: no master."""

    step_bytes = 20  # a step's passes: norm 2, clip 4, update 14

    def __init__(self, layout: Layout, inputs: Inputs):
        super().__init__(inputs.params, inputs.grads, torch.optim.AdamW, **_fused(inputs.params))

    @property
    def results(self) -> dict:
        return {"params": self.params}


class OurAdamW(AdamW):
    """ak.optim.AdamW in the layout."""

    def __init__(self, layout: Layout, inputs: Inputs):
        super().__init__(inputs.params, inputs.grads, ak.optim.AdamW, **layout.options)
        self.step_bytes = layout.step_bytes


def scaler(scaler_class: type, params: list[torch.Tensor]) -> torch.amp.GradScaler:
    """One whose scale is 1 and stays."""
    device = params[0].device
    made = scaler_class(device.type, init_scale=1.0, growth_interval=NEVER)
    made.scale(torch.ones((), device=device))  # creates the scale
    return made


def _fused(params: list[torch.Tensor]) -> dict:
    return {"fused": True, "capturable": params[0].device.type == "cuda"}


def clip_factor(grads: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    """That of clipping to a norm, in float64."""
    norm = sum(grad.double().square().sum() for grad in grads).sqrt()
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def reference(layout: Layout, inputs: Inputs, max_norm: float | None) -> dict:
    """STEPS steps of AdamW in float64 on the same gradients, clipped to `max_norm`."""
    clip = 1.0 if max_norm is None else clip_factor(inputs.grads, max_norm)
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

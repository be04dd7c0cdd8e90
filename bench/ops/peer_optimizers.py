"""The optimizers of other libraries: AdamW in the layouts that `layouts.py` names."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..harness.case import Call, Prepare, WithFacts
from ..harness.memory import held_bytes
from .layouts import ADAMW, EIGHT_BIT, MAX_NORM, Inputs, Layout, clip_factor
from .peers import skipped

Params = list[torch.Tensor]


@dataclass(frozen=True)
class PeerOptimizer:
    """A class, the layouts that it has, and its options for a layout."""

    module: str
    name: str
    layouts: tuple[str, ...]
    options: Callable[[Layout], dict] = lambda layout: {}

    def make(self, params: Params, layout: Layout, **options) -> torch.optim.Optimizer:
        made = getattr(importlib.import_module(self.module), self.name)
        return made(params, **options, **self.options(layout))


def _transformer_engine(layout: Layout) -> dict:
    split = layout.name == "bf16 + split master"
    return {"adam_w_mode": True, "master_weights": layout.half, "store_param_remainders": split}


# By provider: the library's name, and after a colon the variant.
OPTIMIZERS = {
    "apex": PeerOptimizer(
        "apex.optimizers",
        "FusedAdam",
        ("fp32", "bf16 + fp32 master"),
        lambda layout: {"adam_w_mode": True, "capturable": True, "master_weights": layout.half},
    ),
    "transformer_engine": PeerOptimizer(
        "transformer_engine.pytorch.optimizers",
        "FusedAdam",
        ("fp32", "bf16 + fp32 master", "bf16 + split master"),
        _transformer_engine,
    ),
    "flashoptim": PeerOptimizer(
        "flashoptim",
        "FlashAdamW",
        ("bf16 + split master",),
        lambda layout: {"quantize": False, "master_weight_bits": 32},
    ),
    "flashoptim:8 bit": PeerOptimizer(
        "flashoptim", "FlashAdamW", (EIGHT_BIT.name,), lambda layout: {"quantize": True, "master_weight_bits": None}
    ),
    "bitsandbytes": PeerOptimizer("bitsandbytes.optim", "AdamW32bit", ("fp32",)),
    "bitsandbytes:8 bit": PeerOptimizer("bitsandbytes.optim", "AdamW8bit", (EIGHT_BIT.name,)),
    "torchao:8 bit": PeerOptimizer("torchao.optim", "AdamW8bit", (EIGHT_BIT.name,)),
    "torchao:fp8": PeerOptimizer("torchao.optim", "AdamWFp8", (EIGHT_BIT.name,)),
    "optimi": PeerOptimizer("optimi", "AdamW", ("fp32",)),
}


def adamw(layout: Layout, device: torch.device, whole_step: bool = False) -> dict[str, Prepare]:
    """The peers that have this layout on this device: their update, or all that they do of a step."""
    chosen = [name for name, of in OPTIMIZERS.items() if layout.name in of.layouts]
    chosen = [name for name in chosen if skipped(name.split(":")[0], device) is None]
    return {name: lambda inputs, name=name: _prepare(name, layout, inputs, whole_step) for name in chosen}


def _prepare(name: str, layout: Layout, inputs: Inputs, whole_step: bool) -> Call:
    if whole_step:
        torch._foreach_mul_(inputs.grads, clip_factor(inputs.grads, MAX_NORM).item())
    for param, grad in zip(inputs.params, inputs.grads, strict=True):
        param.requires_grad_()
        param.grad = grad
    optimizer = OPTIMIZERS[name].make(inputs.params, layout, **ADAMW)
    before = _apex_check(inputs.grads) if whole_step and name == "apex" else None

    def call():
        if before:
            before()
        optimizer.step()
        return {"params": [param.detach() for param in inputs.params]}

    def facts() -> dict:
        """An update reads and writes what is held, and reads the gradients; Apex's check is three more passes."""
        held, grads = held_bytes(inputs.params, optimizer), held_bytes(inputs.grads)
        return {
            "params": sum(param.numel() for param in inputs.params),
            "state_bytes": held,
            "moved_bytes": 2 * held + (4 if before else 1) * grads,
            "pipeline": "check, norm, update; no clip" if before else "update; no check, norm or clip",
        }

    return WithFacts(call, facts) if whole_step else call


def _apex_check(grads: Params) -> Callable[[], None]:
    """Norm, then unscaling with the non-finite check: Apex's multi-tensor kernels, in the order of its users."""
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    overflow = torch.zeros(1, dtype=torch.int32, device=grads[0].device)

    def check():
        multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [grads], False)
        multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [grads, grads], 1.0)

    return check

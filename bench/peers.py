"""Other libraries' AdamW, timed where they are installed. They run on a GPU; where they are absent the harness says so.

Only the weights are compared: each keeps its moments in a form of its own. In a whole step none of them clips, and
only Apex checks and takes the norm; AdamW's update hardly depends on the size of the gradients, so that the weights are
right all the same. What each does stands in its row (`pipeline`).
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch

from .harness import Call, WithFacts
from .layouts import BETAS, EPS, LR, WEIGHT_DECAY, Inputs, Layout, held_bytes

PEERS = ("apex", "flashoptim", "transformer_engine")
LAYOUTS = {
    "fp32": ("apex", "transformer_engine"),
    "bf16 + fp32 master": ("apex", "transformer_engine"),
    "bf16 + split master": ("flashoptim", "transformer_engine"),
}


def version(name: str) -> str | None:
    """Installed version of a peer, "unknown" if it carries none, None if it is absent or does not import."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        importlib.import_module(name)
    except Exception:  # built for another torch, for instance: the ways to fail are the peer's own
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def adamw(layout: Layout, whole_step: bool = False) -> dict[str, Callable[[Inputs], Call]]:
    """The installed peers that have this layout: their update, or all that they do of a step."""
    chosen = [name for name in LAYOUTS.get(layout.name, ()) if version(name)]
    return {name: lambda inputs, name=name: _prepare(name, layout, inputs, whole_step) for name in chosen}


def _prepare(name: str, layout: Layout, inputs: Inputs, whole_step: bool) -> Call:
    make = {"apex": _apex, "flashoptim": _flashoptim, "transformer_engine": _transformer_engine}[name]
    for param, grad in zip(inputs.params, inputs.grads, strict=True):
        param.requires_grad_()
        param.grad = grad
    optimizer = make(inputs.params, layout, {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY})
    before = _apex_check(inputs.grads) if whole_step and name == "apex" else None

    def call():
        if before:
            before()
        optimizer.step()
        return {"params": [param.detach() for param in inputs.params]}

    def facts() -> dict:
        """An update reads and writes what is held, and reads the gradients; Apex's check is three more passes."""
        held, grads = held_bytes(inputs.params, optimizer), held_bytes(inputs.grads)
        pipeline = "check, norm, update; no clip" if before else "update; no check, norm or clip"
        return {
            "params": sum(param.numel() for param in inputs.params),
            "state_bytes": held,
            "moved_bytes": 2 * held + (4 if before else 1) * grads,
            "pipeline": pipeline,
        }

    return WithFacts(call, facts) if whole_step else call


def _apex(params, layout: Layout, options: dict):
    from apex.optimizers import FusedAdam

    return FusedAdam(params, adam_w_mode=True, capturable=True, master_weights=layout.half, **options)


def _apex_check(grads: list[torch.Tensor]) -> Callable[[], None]:
    """Norm, then unscaling with the non-finite check: Apex's multi-tensor kernels, in the order of its users."""
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    overflow = torch.zeros(1, dtype=torch.int32, device=grads[0].device)

    def check():
        multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [grads], False)
        multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [grads, grads], 1.0)

    return check


def _flashoptim(params, layout: Layout, options: dict):
    from flashoptim import FlashAdamW

    return FlashAdamW(params, quantize=False, master_weight_bits=32, **options)


def _transformer_engine(params, layout: Layout, options: dict):
    from transformer_engine.pytorch.optimizers import FusedAdam

    split = layout.name == "bf16 + split master"
    return FusedAdam(params, adam_w_mode=True, master_weights=layout.half, store_param_remainders=split, **options)


def norms(kind: str, eps: float) -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """The installed peers that have this norm, as functions of rows and weight."""
    found = {}
    if version("liger_kernel"):
        from liger_kernel.ops import layer_norm, rms_norm

        if kind == "rms_norm":
            found["liger"] = lambda x, weight: rms_norm.LigerRMSNormFunction.apply(x, weight, eps)
        else:
            found["liger"] = lambda x, weight: layer_norm.LigerLayerNormFunction.apply(
                x, weight, torch.zeros_like(weight), eps
            )
    if version("quack") and kind == "rms_norm":
        from quack import rmsnorm

        found["quack"] = lambda x, weight: rmsnorm(x, weight, eps=eps)
    return found


def softmax() -> dict[str, Callable[[torch.Tensor, int], torch.Tensor]]:
    """The installed peers that have softmax, as functions of rows and their dimension, which is the last."""
    found = {}
    if version("liger_kernel"):
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        found["liger"] = lambda x, dim: LigerSoftmaxFunction.apply(x)
    if version("quack"):
        from quack.softmax import softmax

        found["quack"] = lambda x, dim: softmax(x)
    return found


def cross_entropy() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """The installed peers that have the mean loss, as functions of logits and classes. Not Liger's: it writes the gradient
    over the logits, which the next call reads."""
    found = {}
    if version("quack"):
        from quack.cross_entropy import cross_entropy

        found["quack"] = cross_entropy
    return found

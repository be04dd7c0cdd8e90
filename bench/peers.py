"""Other libraries, timed where they are installed. They run on a GPU; where they are absent the harness says so.

Of AdamW only the weights are compared: each keeps its moments in a form of its own. In a whole step none of them clips, and
only Apex checks and takes the norm; AdamW's update hardly depends on the size of the gradients, so that the weights are
right all the same. What each does stands in its row (`pipeline`).
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .harness import Call, WithFacts
from .layouts import BETAS, EPS, LR, WEIGHT_DECAY, Inputs, Layout, held_bytes

PEERS = ("apex", "flashoptim", "transformer_engine", "liger", "quack")
MODULES = {"liger": "liger_kernel"}  # of another name
LAYOUTS = {
    "fp32": ("apex", "transformer_engine"),
    "bf16 + fp32 master": ("apex", "transformer_engine"),
    "bf16 + split master": ("flashoptim", "transformer_engine"),
}


def version(name: str) -> str | None:
    """Installed version of a peer, "unknown" if it carries none, None if it is absent or does not import."""
    module = MODULES.get(name, name)
    if importlib.util.find_spec(module) is None:
        return None
    try:
        importlib.import_module(module)
    except Exception:  # built for another torch, for instance: the ways to fail are the peer's own
        return None
    try:
        return importlib.metadata.version(module)
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


def _having(name: str, load: Callable[[], Callable]) -> dict[str, Callable]:
    """What `load` imports from a peer; nothing where the peer is absent, or its version lacks it."""
    if version(name) is None:
        return {}
    try:
        return {name: load()}
    except ImportError:
        return {}


def norms(kind: str, eps: float) -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """The installed peers that have this norm, as functions of rows and weight. QuACK's layer norm has a forward alone, and an fp32
    weight: a case with a backward reports that it failed."""

    def liger():
        from liger_kernel.ops import layer_norm, rms_norm

        if kind == "rms_norm":
            return lambda x, weight: rms_norm.LigerRMSNormFunction.apply(x, weight, eps)
        return lambda x, weight: layer_norm.LigerLayerNormFunction.apply(x, weight, torch.zeros_like(weight), eps)

    def quack():
        if kind == "rms_norm":
            from quack import rmsnorm

            return lambda x, weight: rmsnorm(x, weight, eps=eps)
        from quack.layernorm import layernorm

        return lambda x, weight: layernorm(x, weight.float(), eps=eps)

    return _having("liger", liger) | _having("quack", quack)


def softmax() -> dict[str, Callable[[torch.Tensor, int], torch.Tensor]]:
    """The installed peers that have softmax, as functions of rows and their dimension, which is the last."""

    def liger():
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return lambda x, dim: LigerSoftmaxFunction.apply(x)

    def quack():
        from quack.softmax import softmax

        return lambda x, dim: softmax(x)

    return _having("liger", liger) | _having("quack", quack)


def cross_entropy() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """The installed peers that have the mean loss, as functions of logits and classes. Not Liger's: it writes the gradient
    over the logits, which the next call reads."""

    def quack():
        from quack.cross_entropy import cross_entropy

        return cross_entropy

    return _having("quack", quack)


def linear_cross_entropy() -> dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]]:
    """The installed peers that fuse a last layer with its mean loss, as functions of rows, weight and classes, and torch's own, which
    2.13 has. Those that ask for it get the weight in the dtype of the rows."""

    def liger():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

        return lambda x, weight, target: Fused.apply(x, weight, target)[0]

    def quack():
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        return lambda x, weight, target: chunked_linear_cross_entropy(x, weight.to(x.dtype), target)

    found = _having("liger", liger) | _having("quack", quack)
    if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()  # without any it is the two operations
        found["torch:fused"] = lambda x, weight, target: F.linear_cross_entropy(
            x, weight.to(x.dtype), target, options=options
        )
    return found


def swiglu() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The installed peers that have it, as functions of gate and up side by side."""

    def liger():
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, -1))

    return _having("liger", liger)


def embedding() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """The installed peers that have the lookup and its gradient, as functions of indices and table."""

    def liger():
        from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

        return lambda indices, table: LigerEmbeddingFunction.apply(table, indices)

    return _having("liger", liger)

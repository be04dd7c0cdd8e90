"""Other libraries, timed where they are installed. They run on a GPU; where they are absent the harness says so.

Of AdamW only the weights are compared: each keeps its moments in a form of its own. In a whole step none of them clips, and
only Apex checks and takes the norm; AdamW's update hardly depends on the size of the gradients, so that the weights are
right all the same. Each one's work is in its row (`pipeline`).
"""

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..harness.case import Call, WithFacts
from ..harness.memory import held_bytes
from .layouts import BETAS, EPS, LR, WEIGHT_DECAY, Inputs, Layout

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


def functions(op: str) -> dict[str, Callable]:
    """The installed peers that have an op, as functions with torch's arguments; without those whose version lacks it."""
    found = {}
    for name, (module, attribute, make) in FUNCTIONS[op].items():
        if version(name) is not None:
            with contextlib.suppress(ImportError, AttributeError):
                found[name] = make(getattr(importlib.import_module(module), attribute))
    return found


NORM_EPS = 1e-5
# By op and peer: where its function is, and what gives it the arguments of torch's. QuACK's layer norm has a forward alone, and
# an fp32 weight: a case with a backward reports that it failed. Its linear_cross_entropy asks for a weight in the dtype of
# the rows. Liger's cross_entropy is left out: it writes the gradient over the logits, which the next call reads.
FUNCTIONS: dict[str, dict[str, tuple[str, str, Callable]]] = {
    "layer_norm": {
        "liger": (
            "liger_kernel.ops.layer_norm",
            "LigerLayerNormFunction",
            lambda f: lambda x, weight: f.apply(x, weight, torch.zeros_like(weight), NORM_EPS),
        ),
        "quack": ("quack.layernorm", "layernorm", lambda f: lambda x, weight: f(x, weight.float(), eps=NORM_EPS)),
    },
    "rms_norm": {
        "liger": (
            "liger_kernel.ops.rms_norm",
            "LigerRMSNormFunction",
            lambda f: lambda x, weight: f.apply(x, weight, NORM_EPS),
        ),
        "quack": ("quack", "rmsnorm", lambda f: lambda x, weight: f(x, weight, eps=NORM_EPS)),
    },
    "softmax": {
        "liger": ("liger_kernel.ops.softmax", "LigerSoftmaxFunction", lambda f: f.apply),
        "quack": ("quack.softmax", "softmax", lambda f: f),
    },
    "cross_entropy": {"quack": ("quack.cross_entropy", "cross_entropy", lambda f: f)},
    "linear_cross_entropy": {
        "liger": (
            "liger_kernel.ops.fused_linear_cross_entropy",
            "LigerFusedLinearCrossEntropyFunction",
            lambda f: lambda x, weight, target: f.apply(x, weight, target)[0],
        ),
        "quack": (
            "quack.linear_cross_entropy",
            "chunked_linear_cross_entropy",
            lambda f: lambda x, weight, target: f(x, weight.to(x.dtype), target),
        ),
    },
    "swiglu": {
        "liger": ("liger_kernel.ops.swiglu", "LigerSiLUMulFunction", lambda f: lambda x: f.apply(*x.chunk(2, -1)))
    },
    "embedding": {
        "liger": (
            "liger_kernel.ops.experimental.embedding",
            "LigerEmbeddingFunction",
            lambda f: lambda table, indices: f.apply(table, indices),
        )
    },
}


def torch_linear_cross_entropy() -> dict[str, Callable]:
    """torch's own fused function, which 2.13 has."""
    if not hasattr(F, "linear_cross_entropy") or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return {}
    options = torch.nn.LinearCrossEntropyOptions()  # without any it is the two operations
    return {
        "torch:fused": lambda x, weight, target: F.linear_cross_entropy(x, weight.to(x.dtype), target, options=options)
    }

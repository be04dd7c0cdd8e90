"""Other libraries' AdamW, timed where they are installed. They run on a GPU; where they are absent the harness says so.

Only the weights are compared: each keeps its moments in a form of its own.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable

from .harness import Call
from .layouts import BETAS, EPS, LR, WEIGHT_DECAY, Inputs, Layout

PEERS = ("apex", "flashoptim", "transformer_engine")


def version(name: str) -> str | None:
    """Installed version of a peer, "unknown" if it carries none, None if it is absent."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def adamw(layout: Layout) -> dict[str, Callable[[Inputs], Call]]:
    """The installed peers that have this layout."""
    makers = {"apex": _apex, "flashoptim": _flashoptim, "transformer_engine": _transformer_engine}
    able = {
        "fp32": ("apex", "transformer_engine"),
        "bf16 + fp32 master": ("apex", "transformer_engine"),
        "bf16 + split master": ("flashoptim", "transformer_engine"),
    }
    chosen = [name for name in able.get(layout.name, ()) if version(name)]
    return {name: lambda inputs, make=makers[name]: _prepare(make, layout, inputs) for name in chosen}


def _prepare(make: Callable, layout: Layout, inputs: Inputs) -> Call:
    for param, grad in zip(inputs.params, inputs.grads, strict=True):
        param.requires_grad_()
        param.grad = grad
    optimizer = make(inputs.params, layout, {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY})

    def call():
        optimizer.step()
        return {"params": [param.detach() for param in inputs.params]}

    return call


def _apex(params, layout: Layout, options: dict):
    from apex.optimizers import FusedAdam

    return FusedAdam(params, adam_w_mode=True, capturable=True, master_weights=layout.half, **options)


def _flashoptim(params, layout: Layout, options: dict):
    from flashoptim import FlashAdamW

    return FlashAdamW(params, master_weight_bits=32, **options)


def _transformer_engine(params, layout: Layout, options: dict):
    from transformer_engine.pytorch.optimizers import FusedAdam

    split = layout.name == "bf16 + split master"
    return FusedAdam(params, adam_w_mode=True, master_weights=layout.half, store_param_remainders=split, **options)

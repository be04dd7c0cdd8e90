"""Changes that others make to a module: hooks, and classes that torch.distributed derives from its class.

``fully_shard`` turns a Linear into an ``FSDPLinear`` with the bases ``FSDPModule`` and ``Linear``; ``replicate`` does the same. They add
methods and hooks and keep the module's forward.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.modules.module import _has_any_global_hook

#: For each mixin: the prefix of its class names, and torch's table of these classes by own class. DDP's replicate has no table.
_MIXINS = {
    "FSDPModule": ("FSDP", "torch.distributed.fsdp._fully_shard._fully_shard", "cls_to_fsdp_cls"),
    "ReplicateModule": ("Replicate", "torch.distributed._composable.replicate_with_fsdp", "cls_to_replicate_cls"),
    "DDP": ("DDP", "", ""),
}
_made: dict[tuple[type, type], type] = {}  # the table (by mixin and own class) for mixins without one


def _mixin(kind: type) -> type | None:
    """The wrapper's mixin if torch.distributed created ``kind``, and not a user with the same bases; else ``None``."""
    if len(kind.__bases__) != 2:
        return None
    mixin, own = kind.__bases__
    if mixin.__name__ not in _MIXINS or not mixin.__module__.startswith("torch.distributed."):
        return None
    made = kind.__name__ == _MIXINS[mixin.__name__][0] + own.__name__
    return mixin if made and "forward" not in vars(kind) else None


def own_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of ``module`` without a wrapper's mixin."""
    kind = type(module)
    return kind if _mixin(kind) is None else kind.__bases__[1]


def wrapped_as(module: torch.nn.Module, own: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """``own`` with the wrapper's mixin of ``module``, if it has one."""
    kind = type(module)
    mixin = _mixin(kind)
    if mixin is None:
        return own
    prefix, module, table = _MIXINS[mixin.__name__]
    # Prefer torch's table: it has the class of a module that was converted first, and dynamo knows it.
    known = getattr(sys.modules.get(module), table, None)
    known, key = (_made, (mixin, own)) if known is None else (known, own)
    if key not in known:
        body = {name: vars(kind)[name] for name in ("__deepcopy__", "__module__") if name in vars(kind)}
        known[key] = type(prefix + own.__name__, (mixin, own), body)
    return known[key]


def is_untouched(module: torch.nn.Module) -> bool:
    """True if calling ``module`` only runs the forward of its class."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or _has_any_global_hook()
    )

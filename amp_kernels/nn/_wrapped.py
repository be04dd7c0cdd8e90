"""Classes that torch.distributed makes of a module's own: ``fully_shard`` turns a Linear into an ``FSDPLinear``, whose bases are
``FSDPModule`` and ``Linear``, and ``replicate`` does the same. They add methods and hooks; the forward is the module's own.
"""

from __future__ import annotations

import sys

import torch

#: By mixin: the prefix of the names of its classes, and where torch keeps them by own class; replicate of DDP makes one a call.
_MIXINS = {
    "FSDPModule": ("FSDP", "torch.distributed.fsdp._fully_shard._fully_shard", "cls_to_fsdp_cls"),
    "ReplicateModule": ("Replicate", "torch.distributed._composable.replicate_with_fsdp", "cls_to_replicate_cls"),
    "DDP": ("DDP", "", ""),
}
_made: dict[tuple[type, type], type] = {}  # by mixin and own class, where torch has no table


def _mixin(kind: type) -> type | None:
    """The wrapper's mixin if torch.distributed made ``kind``; a class of the user's with the same bases is none."""
    if len(kind.__bases__) != 2:
        return None
    mixin, own = kind.__bases__
    if mixin.__name__ not in _MIXINS or not mixin.__module__.startswith("torch.distributed."):
        return None
    made = kind.__name__ == _MIXINS[mixin.__name__][0] + own.__name__
    return mixin if made and "forward" not in vars(kind) else None


def own_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of ``module`` beneath the wrapper's; that of the module itself if nothing wraps it."""
    kind = type(module)
    return kind if _mixin(kind) is None else kind.__bases__[1]


def wrapped_as(module: torch.nn.Module, own: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """``own``, wrapped as the class of ``module`` is."""
    kind = type(module)
    mixin = _mixin(kind)
    if mixin is None:
        return own
    prefix, module, table = _MIXINS[mixin.__name__]
    # In torch's own table it is the class of a module that was converted first, and dynamo finds it.
    known = getattr(sys.modules.get(module), table, None)
    known, key = (_made, (mixin, own)) if known is None else (known, own)
    if key not in known:
        body = {name: vars(kind)[name] for name in ("__deepcopy__", "__module__") if name in vars(kind)}
        known[key] = type(prefix + own.__name__, (mixin, own), body)
    return known[key]

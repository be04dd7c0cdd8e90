"""Formulas for torch.utils.flop_counter, which otherwise counts 0 for ops that it does not know.

Its module takes a quarter of a second to import and brings Triton along, so nothing here imports it: a counter that is
at work shows as a dispatch mode, and then the module is there. A counter copies the table of formulas when it is made,
so those in use are registered too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_formulas: dict[torch._ops.OpOverloadPacket, Callable[..., int]] = {}


def count(op: torch._ops.OpOverloadPacket, formula: Callable[..., int]) -> None:
    """Have ``op`` counted by ``formula(*args, out_shape, **kwargs)``, which sees shapes in place of tensors."""
    _formulas[op] = formula


def tell_counters() -> None:
    """Make the formulas known to flop counters, those at work included. Called where a dispatch mode is active."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    counters = (getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack())
    for registry in (module, *(c for c in counters if isinstance(c, module.FlopCounterMode))):
        if not _formulas.keys() <= registry.flop_registry.keys():
            registry.flop_registry.update({op: module.shape_wrapper(f) for op, f in _formulas.items()})

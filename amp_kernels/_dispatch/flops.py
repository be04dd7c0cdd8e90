"""Formulas for torch.utils.flop_counter, which otherwise counts 0 for ops that it does not know.

Its module takes a quarter of a second to import and brings Triton along, so nothing here imports it: a counter that is
at work shows as a dispatch mode, and then the module is there. A counter copies the table of formulas when it is made,
so those at work are told, too.
"""

from __future__ import annotations

import math
import sys

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def _product(a_shape, b_shape, *args, out_shape=None, **kwargs) -> int:
    """2 M N K, times the batch: what torch counts for mm and bmm; an epilogue counts nothing, as torch has it."""
    return 2 * math.prod(a_shape) * b_shape[-1]


def _accumulate(c_shape, a_shape, b_shape, *args, out_shape=None, **kwargs) -> int:
    return _product(a_shape, b_shape)


FORMULAS = {"gemm": _product, "gemm_preact": _product, "gemm_dact": _product, "gemm_accumulate_": _accumulate}


def tell_counters() -> None:
    """Make the formulas known to flop counters, those at work included. Called where a dispatch mode is active."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    formulas = {getattr(torch.ops.amp_kernels, name): module.shape_wrapper(f) for name, f in FORMULAS.items()}
    if not formulas.keys() <= module.flop_registry.keys():
        module.flop_registry.update(formulas)
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, module.FlopCounterMode) and not formulas.keys() <= counter.flop_registry.keys():
            counter.flop_registry.update(formulas)

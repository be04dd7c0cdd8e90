"""Moments in 8 bits of other libraries, as float32 under torch's names.

bitsandbytes (``Optimizer2State`` and ``Optimizer1State``): ``state1`` and ``state2`` are float32, or uint8 indices into the tables
``qmap1`` and ``qmap2`` times one number of ``absmax1`` or ``absmax2`` for each 256 elements. A state_dict keeps all but the step in a
nested dict. torchao (``OptimState8bit``, ``OptimState4bit``, ``OptimStateFp8``): tensors of its own classes under torch's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_NESTED = "__bnb_optimizer_quant_state__"
_BLOCK = 256


def translated(name: str, values: dict[str, Any], moments: Sequence[str]) -> dict[str, Any]:
    """The loaded state of a parameter, with ``moments`` in float32 if bitsandbytes or torchao wrote them; ``name`` of the optimizer.

    Raises:
        ValueError: codes without their table or scales, or with another number of scales than one for each 256.
    """
    values = {**values, **values.get(_NESTED, {})}
    values.pop(_NESTED, None)
    if "state1" in values:
        result = {"step": values["step"]} if "step" in values else {}
        for number, moment in enumerate(moments, 1):
            if values.get(f"state{number}") is not None:
                result[moment] = _from_table(name, values, str(number))
        return result
    # Two names of a wrapper are enough to know it by, and its library need not be imported.
    packed = {key for key, value in values.items() if hasattr(value, "codes") and hasattr(value, "dequantize")}
    return {key: value.dequantize().float() if key in packed else value for key, value in values.items()}


def _from_table(name: str, values: dict[str, Any], number: str) -> Tensor:
    state = values["state" + number]
    if state.dtype != torch.uint8:
        return state.float()
    table, scales = values.get("qmap" + number), values.get("absmax" + number)
    blocks = -(-state.numel() // _BLOCK)
    if table is None or scales is None or scales.numel() != blocks:
        raise ValueError(
            f"{name}: the loaded state{number} is uint8 of shape {list(state.shape)}; accepted: with qmap{number}, and with "
            f"absmax{number} of {blocks} elements, one for each {_BLOCK} (block-wise states of bitsandbytes)"
        )
    scale = scales.float().repeat_interleave(_BLOCK)[: state.numel()]
    return (table.float()[state.reshape(-1).long()] * scale).view(state.shape)

"""Moments in 8 bits: which parameters have them, and the form in which the state shows and takes them.

:mod:`.._raw._block8` has the format: a code for each element, and an exponent for each block of 32 consecutive ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._checks.lists import flat
from .._raw._block8 import BLOCK, Code8, decode, encode
from .._sharding.local import like, local
from .._sharding.pieces import sharded_dims
from .._updates.op import RULES
from .._updates.state import exponents_at, view_like

CODE, SCALE = "_code", "_scale"
LEAST_NUMEL = 4096


def moment_dtype(shape: torch.Size, state_dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of the moments of a parameter of this global shape; uint8 for codes.

    The shape alone decides, so that it does not depend on the mesh: rows of whole blocks can be sharded anywhere between them.
    """
    if state_dtype != "8bit":
        return state_dtype  # type: ignore[return-value]
    rows_of_blocks = len(shape) > 1 and math.prod(shape[1:]) % BLOCK == 0
    return torch.uint8 if rows_of_blocks and math.prod(shape) >= LEAST_NUMEL else torch.bfloat16


def has_whole_blocks(param: Tensor) -> bool:
    """True if every rank's piece of a DTensor with 8-bit moments consists of blocks of the whole tensor."""
    cut, last, piece = sharded_dims(param), param.dim() - 1, local(param)
    if not cut:
        return True
    inside = cut <= {0} or param.shape[last] % BLOCK == 0
    return piece.is_contiguous() and inside and (last not in cut or piece.shape[last] % BLOCK == 0)


def scale_shape(shape: torch.Size) -> torch.Size:
    """The shape in which the exponents of a row-major tensor are shown: that of its blocks along the last dimension, or if that
    has a part of a block, along rows. Placements of the tensor fit."""
    if shape[-1] % BLOCK == 0:
        return torch.Size((*shape[:-1], shape[-1] // BLOCK))
    return torch.Size((shape[0], math.prod(shape[1:]) // BLOCK))


def coded_views(buffer: Tensor, piece: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """The codes and exponents of a parameter in a buffer of its block. Exponents of a piece that is not row-major are flat, in the
    order of memory."""
    scales = exponents_at(buffer, offset, piece.numel())
    if piece.is_contiguous():
        scales = scales.view(scale_shape(piece.shape))
    return view_like(buffer, piece, offset), scales


def read_coded(code: Tensor, scale: Tensor, format: Code8) -> Tensor:
    """float32 values of codes, in their shape; DTensors if they are."""
    codes = local(code)
    values = decode(flat(codes), local(scale).reshape(-1), format)
    return like(view_like(values, codes, 0), code)


def write_coded(code: Tensor, scale: Tensor, values: Tensor, format: Code8) -> None:
    """Encode values of the same shape to nearest."""
    code, scale = local(code), local(scale)
    ordered = torch.empty(code.numel(), dtype=torch.float32, device=code.device)
    view_like(ordered, code, 0).copy_(values)
    codes, exponents = encode(ordered, format)
    flat(code).copy_(codes)
    scale.copy_(exponents.view(scale.shape))


def moment_of(key: str) -> str | None:
    """The moment that an entry of a state has the codes or the exponents of; ``None`` for other entries."""
    for part in (CODE, SCALE):
        moment = key.removesuffix(part)
        if moment != key and any(moment in rule.declared.moments for rule in RULES.values()):
            return moment
    return None


def check_exponents(name: str, values: dict[str, Any], format_of: Callable[[str], Code8]) -> None:
    """Refuse a parameter's loaded state with exponents that no encoding makes; ``name`` of the optimizer.

    Raises:
        ValueError: an exponent is below the least one of its format, such as the zeros of memory that was never filled.
    """
    for key, scale in values.items():
        moment = moment_of(key)
        if moment is None or key != moment + SCALE or scale.dtype != torch.uint8 or not local(scale).numel():
            continue
        least, found = format_of(moment).least, int(local(scale).min())
        if found < least:
            raise ValueError(f"{name}: the loaded {key} has the exponent {found}; accepted: {least} to 255")


def decoded(name: str, values: dict[str, Any], format_of: Callable[[str], Code8]) -> dict[str, Any]:
    """``values``, a parameter's state, with float32 moments in place of codes and exponents; ``name`` of the optimizer.

    Raises:
        ValueError: codes or exponents are missing, or these are not one for each 32 codes.
        TypeError: codes or exponents are not uint8.
    """
    values = dict(values.items())  # as stored: iteration over a shown state yields other names
    result = {key: value for key, value in values.items() if moment_of(key) is None}
    for moment in dict.fromkeys(filter(None, map(moment_of, values))):
        code, scale = (values.get(moment + part) for part in (CODE, SCALE))
        for part, tensor in ((CODE, code), (SCALE, scale)):
            if tensor is None:
                raise ValueError(f"{name}: the loaded state of {moment} lacks {moment + part!r}")
            if tensor.dtype != torch.uint8:
                raise TypeError(f"{name}: the loaded {moment + part} is {tensor.dtype}; accepted: uint8")
        blocks = -(-code.numel() // BLOCK)
        if scale.numel() != blocks:
            raise ValueError(
                f"{name}: the loaded {moment + SCALE} has {scale.numel()} elements; accepted: {blocks}, one for each {BLOCK} "
                f"codes"
            )
        result[moment] = read_coded(code, scale, format_of(moment))
    return result

"""Checks of an op's tensors: dtypes, devices, shapes and overlap, with one message each."""

from __future__ import annotations

import itertools
import math

import torch

from .lists import HALF_DTYPES, KERNEL_DTYPES, names
from .types import type_name


def check_tensors(op: str, optional: bool = False, **values: object) -> None:
    """Raise unless every argument is a tensor, or ``None`` where that is ``optional``."""
    for name, value in values.items():
        if not (isinstance(value, torch.Tensor) or (optional and value is None)):
            accepted = "a tensor or None" if optional else "a tensor"
            raise TypeError(f"{op}: {name} has type {type_name(value)}; accepted: {accepted}")


def check_tensor(op: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        check_tensors(op, **{name: tensor})
    if tensor.layout != torch.strided:
        raise TypeError(f"{op}: {name} has layout {tensor.layout}; accepted: torch.strided")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{op}: {name} has dtype {names([tensor.dtype])}; accepted: {names(dtypes)}")


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    first = device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, but {first} is on {device}; accepted: one device")


def check_bias(
    op: str, bias: torch.Tensor | None, width: int, dtype: torch.dtype, autocast: bool, name: str = "bias"
) -> None:
    """``dtype`` is the one to work in. Autocast takes any mix of dtypes, :func:`readable_bias` makes of it what kernels read."""
    if bias is None:
        return
    narrow = KERNEL_DTYPES if autocast else tuple({dtype, torch.float32})
    accepted = narrow if dtype in HALF_DTYPES else (dtype,)
    if not isinstance(bias, torch.Tensor) or bias.layout is not torch.strided or bias.dtype not in accepted:
        check_tensor(op, name, bias, accepted)
    if bias.ndim != 1 or bias.shape[0] != width:
        raise ValueError(f"{op}: {name} has shape {list(bias.shape)}; accepted: [{width}], one value per output column")


def readable_bias(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A bias for operands of ``dtype``: fp32 is read as it is, the other 16-bit dtype is rounded to ``dtype``."""
    return bias if bias is None or bias.dtype in (dtype, torch.float32) else bias.to(dtype)


def check_out_dtype(op: str, out_dtype: torch.dtype | None, dtypes: tuple[torch.dtype, ...]) -> None:
    if out_dtype is not None and out_dtype not in dtypes:
        raise TypeError(f"{op}: out_dtype is {out_dtype}; accepted: None, {names(dtypes)}")


def check_no_internal_overlap(op: str, name: str, tensor: torch.Tensor) -> None:
    """A tensor that is written must not have two elements in one place (an expanded one has, or one of sliding windows)."""
    if not tensor.is_contiguous() and _overlaps_itself(tensor):
        raise ValueError(
            f"{op}: {name} has strides {list(tensor.stride())} for shape {list(tensor.shape)}, so elements share "
            "memory; accepted: a tensor without overlap"
        )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """True if two elements that differ in one or two indices are in one place."""
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    if any(stride == 0 for _, stride in dims):
        return True
    return not torch.compiler.is_compiling() and any(
        lcm < a * m and lcm < b * n for (m, a), (n, b) in itertools.combinations(dims, 2) for lcm in [math.lcm(a, b)]
    )

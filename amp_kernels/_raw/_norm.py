"""Shared by the two passes of a normalisation: argument checks, and the statistics of a row in torch's operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_tensor

#: Rows whose squares overflow fp32 are measured once more after multiplication by this (csrc/norm/formula.h).
SHRINK = 2.0**-80


def check_rows(op: str, name: str, tensor: Tensor) -> None:
    check_tensor(op, name, tensor, KERNEL_DTYPES)
    if tensor.ndim != 2 or tensor.shape[1] == 0:
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}; accepted: [rows, columns], with columns > 0")


def check_like(op: str, name: str, tensor: Tensor | None, shape: tuple[int, ...], dtypes=KERNEL_DTYPES) -> None:
    if tensor is None:
        return
    check_tensor(op, name, tensor, dtypes)
    if tensor.shape != shape:
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}; accepted: {list(shape)}")


def check_forward(call: Any) -> None:
    op, x = "norm_forward", call.x
    check_rows(op, "x", x)
    check_like(op, "weight", call.weight, x.shape[1:])
    check_like(op, "bias", call.bias, x.shape[1:])
    check_like(op, "residual", call.residual, x.shape)
    if call.out_dtype not in KERNEL_DTYPES:
        raise TypeError(f"{op}: out_dtype is {call.out_dtype}; accepted: float16, bfloat16, float32")


def check_backward(call: Any) -> None:
    op, x = "norm_backward", call.x
    check_rows(op, "x", x)
    check_like(op, "grad", call.grad, x.shape)
    check_like(op, "grad_sum", call.grad_sum, x.shape)
    check_like(op, "weight", call.weight, x.shape[1:])
    check_like(op, "rstd", call.rstd, x.shape[:1], (torch.float32,))
    check_like(op, "mean", call.mean, x.shape[:1], (torch.float32,))
    if call.parameters not in (0, 1, 2):
        raise ValueError(f"{op}: parameters is {call.parameters}; accepted: 0, 1 (weight) or 2 (weight and bias)")
    if call.branch_dtype not in (None, *KERNEL_DTYPES):
        raise TypeError(f"{op}: branch_dtype is {call.branch_dtype}; accepted: float16, bfloat16, float32")


def statistics(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation of each row of an fp32 ``x``, in two passes; the mean is 0 unless
    ``centred``."""
    mean, square = _moments(x, centred)
    small_mean, small_square = _moments(x * SHRINK, centred)
    fits = square.isfinite()
    rstd = torch.where(fits, 1 / (square + eps).sqrt(), SHRINK / small_square.sqrt())
    return torch.where(fits, mean, small_mean / SHRINK), rstd


def _moments(x: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    mean = x.mean(1) if centred else x.new_zeros(x.shape[0])
    return mean, (x - mean[:, None]).square().mean(1)

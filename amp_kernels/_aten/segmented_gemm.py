"""Products of several matrices over torch's: those of their concatenation."""

from __future__ import annotations

from typing import Any

import torch

from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_out_dtype
from .._raw.segmented_gemm import accumulate_op, check, op
from .gemm import products


@op.bound
def segmented_gemm(call: Any) -> torch.Tensor:
    whole = check("segmented_gemm", call.a, call.b, call.dim)
    check_out_dtype("segmented_gemm", call.out_dtype, KERNEL_DTYPES)
    multiply, _ = products()
    return multiply(whole, call.b, out_dtype=call.out_dtype)[0]


@accumulate_op.bound
def segmented_gemm_accumulate_(call: Any) -> None:
    whole = check("segmented_gemm_accumulate_", call.a, call.b, 0)
    _, accumulate = products()
    accumulate(call.c, whole, call.b, beta=float(not call.overwrite))

"""Products of several matrices over torch's: those of their concatenation."""

from __future__ import annotations

from typing import Any

import torch

from .._raw.segmented_gemm import accumulate_op, joined, op
from .gemm import products


@op.bound
def segmented_gemm(call: Any) -> torch.Tensor:
    multiply, _ = products()
    return multiply(joined(call.a, call.dim), call.b, out_dtype=call.out_dtype)[0]


@accumulate_op.bound
def segmented_gemm_accumulate_(call: Any) -> None:
    _, accumulate = products()
    accumulate(call.c, joined(call.a, 0), call.b, beta=float(not call.overwrite))

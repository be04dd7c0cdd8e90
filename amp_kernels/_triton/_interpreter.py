"""Corrections of Triton's interpreter (``TRITON_INTERPRET=1``), whose bf16 arithmetic is wrong as of 3.6.

It keeps bf16 as its 16-bit code, multiplies these integers in ``tl.dot``, and truncates where the GPU rounds fp32 to nearest even.
Its ``tl.fma`` rounds twice. With the three methods replaced here, a kernel in the interpreter computes what it computes on a GPU.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast_impl = InterpreterBuilder.cast_impl


def _bf16_to_float(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def _float_to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounds to nearest even; NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(x.shape)


def _cast(self, source, target):
    kinds = source.dtype.scalar, target.scalar
    if kinds == (tl.bfloat16, tl.float32):
        return TensorHandle(_bf16_to_float(source.data), tl.float32)
    if kinds == (tl.float32, tl.bfloat16):
        return TensorHandle(_float_to_bf16(source.data), tl.bfloat16)
    return _cast_impl(self, source, target)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    operands = [_bf16_to_float(t.data) if t.dtype.scalar == tl.bfloat16 else t.data for t in (a, b)]
    return TensorHandle(np.matmul(*operands, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _fma(self, x, y, z):
    if z.data.dtype != np.float32:
        return TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
    # The product is exact in fp64. Its sum with z is rounded to odd there, which the rounding to fp32 then cannot tell from the exact
    # sum (Boldo and Melquiond, IEEE Transactions on Computers 57(4), 2008).
    with np.errstate(all="ignore"):
        product, addend = np.broadcast_arrays(x.data.astype(np.float64) * y.data, z.data.astype(np.float64))
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        even = (total.view(np.int64) & 1) == 0
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        exact = (error == 0) | ~np.isfinite(total)
        return TensorHandle(np.where(exact | ~even, total, odd).astype(np.float32), tl.float32)


def correct() -> None:
    InterpreterBuilder.cast_impl = _cast
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.create_fma = _fma

"""The fundamental types of PTX (PTX ISA 9.0, §5.2) as numpy types, and arithmetic that numpy lacks."""

import ctypes
import ctypes.util

import numpy as np

BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4}
BYTES |= {"f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16, "pred": 0}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FLOAT = {2: np.float16, 4: np.float32, 8: np.float64}


WARP, WARPGROUP = 32, 128
GONE = "gone"  # what an instruction returns that has sent its threads elsewhere


class PtxError(Exception):
    """The text or its execution breaks a rule of the manual."""


def numpy_type(name: str):
    """The numpy type of a register's bits under a PTX type. bf16 and pairs stay bits."""
    if name == "pred":
        return np.bool_
    if name in ("bf16", "f16x2", "bf16x2"):
        return UNSIGNED[BYTES[name]]
    return {"u": UNSIGNED, "b": UNSIGNED, "s": SIGNED, "f": FLOAT}[name[0]][BYTES[name]]


def is_float(name: str) -> bool:
    return name[0] == "f" and name != "f16x2"


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even; NaN becomes the canonical one (§9.7.9, cvt)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_f16(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float32)


def to_f16(values: np.ndarray) -> np.ndarray:
    bits = np.asarray(values).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


def fma_f32(a, b, c, *, to_zero: bool = False) -> np.ndarray:
    """a * b + c rounded once (§9.7.3, fma.rn.f32, fma.rz.f32). The product is exact in double; the sum is rounded to odd
    there, which leaves the rounding to single alone."""
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    total = np.atleast_1d(product + addend)
    other = total - product
    error = (product - (total - other)) + (addend - other)
    inexact = (error != 0) & np.isfinite(total)
    if inexact.any():
        bits = total.view(np.int64)
        away = (error > 0) == (total > 0)
        odd = np.where(inexact & ((bits & 1) == 0), np.where(away, bits + 1, bits - 1), bits)
        total = odd.view(np.float64)
    nearest = total.astype(np.float32)
    return (
        np.where(np.abs(nearest) > np.abs(total), np.nextafter(nearest, np.float32(0)), nearest) if to_zero else nearest
    )


_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
_fma = np.frompyfunc(_libm.fma, 3, 1)


def fma_f64(a, b, c) -> np.ndarray:
    """a * b + c rounded once, by the C library."""
    return np.asarray(_fma(a, b, c), np.float64)


def truncating_divide(a, b, signed: bool) -> np.ndarray:
    """§9.7.1, div: the quotient is truncated; division by zero gives an unspecified value, here all ones."""
    a, b = np.broadcast_arrays(np.atleast_1d(a), np.atleast_1d(b))
    divisor = np.where(b == 0, np.ones_like(b), b)
    quotient = a // divisor
    if signed:
        quotient = quotient + ((a % divisor != 0) & ((a < 0) != (divisor < 0))).astype(a.dtype)
    return np.where(b == 0, ~np.zeros_like(a), quotient)

"""Conversions, PTX ISA §9.7.9.21 (cvt) and §9.7.9.20 (cvta)."""

import numpy as np

from ..memory import CLUSTER_STRIDE, PARAM_WINDOW, SHARED_WINDOW
from ..types import PtxError, from_bf16, from_f16, numpy_type, to_bf16, to_f16
from . import meaning

TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


# between integers: truncated, or extended by the source's sign
@meaning(r"cvt\.(?P<to>[us](8|16|32|64))\.(?P<of>[us](8|16|32|64))")
def integers(block, instruction, pc, to, of):
    d, a = instruction.operands
    x, write, kind = block.source(a, of), block.writer(d, to), numpy_type(to)
    return lambda mask: write(np.asarray(x).astype(kind), mask)


# float to integer: rounded, clamped to the range, NaN becomes 0
@meaning(r"cvt\.(?P<mode>rni|rzi|rmi|rpi)\.(?P<to>[us](16|32|64))\.(?P<of>f32|f64)")
def float_to_integer(block, instruction, pc, mode, to, of):
    d, a = instruction.operands
    x, write, kind, rounded = block.source(a, of), block.writer(d, to), numpy_type(to), TO_INTEGER[mode]
    lowest, highest = int(np.iinfo(kind).min), int(np.iinfo(kind).max)

    def run(mask):
        value = rounded(np.asarray(x, np.float64))
        inside = np.where((value > lowest) & (value < highest), value, 0).astype(kind)
        write(np.where(value >= highest, kind(highest), np.where(value <= lowest, kind(lowest), inside)), mask)

    return run


# integer to float
@meaning(r"cvt\.rn\.(?P<to>f32|f64)\.(?P<of>[us](8|16|32|64))")
def integer_to_float(block, instruction, pc, to, of):
    d, a = instruction.operands
    x, write, kind = block.source(a, of), block.writer(d, to), numpy_type(to)
    return lambda mask: write(np.asarray(x).astype(kind), mask)


# exact widenings
@meaning(r"cvt\.f64\.f32")
def to_double(block, instruction, pc):
    d, a = instruction.operands
    x, write = block.source(a, "f32"), block.writer(d, "f64")
    return lambda mask: write(np.asarray(x).astype(np.float64), mask)


@meaning(r"cvt\.(?P<to>f32|f64)\.(?P<of>f16|bf16)")
def widen(block, instruction, pc, to, of):
    d, a = instruction.operands
    x, write, kind = block.source(a, "b16"), block.writer(d, to), numpy_type(to)
    convert = from_f16 if of == "f16" else from_bf16
    return lambda mask: write(convert(np.ascontiguousarray(x)).astype(kind), mask)


@meaning(r"cvt\.rn\.f32\.f64")
def to_single(block, instruction, pc):
    d, a = instruction.operands
    x, write = block.source(a, "f64"), block.writer(d, "f32")
    return lambda mask: write(np.asarray(x).astype(np.float32), mask)


# to 16 bits, to nearest even
@meaning(r"cvt\.rn\.(?P<to>f16|bf16)\.f32")
def to_half(block, instruction, pc, to):
    d, a = instruction.operands
    x, write, convert = block.source(a, "f32"), block.writer(d, "b16"), to_f16 if to == "f16" else to_bf16
    return lambda mask: write(convert(x), mask)


# two values: a becomes the upper half, b the lower
@meaning(r"cvt\.rn\.(?P<to>f16x2|bf16x2)\.f32")
def to_pair(block, instruction, pc, to):
    d, a, b = instruction.operands
    x, y, write = block.source(a, "f32"), block.source(b, "f32"), block.writer(d, "b32")
    convert = to_f16 if to == "f16x2" else to_bf16
    return lambda mask: write((convert(x).astype(np.uint32) << np.uint32(16)) | convert(y), mask)


# §9.7.9.20 cvta: between a state space and the generic address space
@meaning(r"cvta\.(?P<to>to\.)?(?P<space>global|shared|param)\.u64")
def cvta(block, instruction, pc, to, space):
    d, a = instruction.operands
    x, write = block.source(a, "u64"), block.writer(d, "u64")
    window = np.uint64({"global": 0, "shared": SHARED_WINDOW, "param": PARAM_WINDOW}[space])
    return (lambda mask: write(x - window, mask)) if to else (lambda mask: write(x + window, mask))


# §9.7.9.23 mapa: the same variable in another block of the cluster
@meaning(r"mapa\.shared::cluster\.u32")
def mapa(block, instruction, pc):
    d, a, b = instruction.operands
    x, rank, write = block.source(a, "u32"), block.source(b, "u32"), block.writer(d, "u32")

    def run(mask):
        if (block.per_thread(rank)[block.mask] >= len(block.peers)).any():
            raise PtxError(f"the cluster has {len(block.peers)} blocks: {instruction.text}")
        own = np.bitwise_and(x, np.uint32(CLUSTER_STRIDE - 1))
        write(own + (np.asarray(rank) + np.uint32(1)) * np.uint32(CLUSTER_STRIDE), mask)

    return run

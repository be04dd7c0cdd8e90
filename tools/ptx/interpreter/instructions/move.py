"""Data movement between registers, PTX ISA §9.7.9."""

import numpy as np

from ..text import Register, Sink, Vector
from ..types import BYTES, UNSIGNED
from . import meaning


# §9.7.9.3 mov; §9.7.9.4 mov that packs a vector into a register or unpacks one, the first element lowest
@meaning(r"mov\.(?P<kind>[bus](16|32|64)|f32|f64|pred)")
def mov(block, instruction, pc, kind):
    d, a = instruction.operands
    if isinstance(d, Vector):
        return unpack(block, d, a, kind)
    if isinstance(a, Vector):
        return pack(block, d, a, kind)
    x, write = block.source(a, kind), block.writer(d, kind)
    return lambda mask: write(x, mask)


def unpack(block, d, a, kind):
    part = BYTES[kind] // len(d.items)
    register = np.ascontiguousarray(block.source(a, kind)) if not isinstance(a, Register) else block.register(a.name)
    pieces = register.view(UNSIGNED[part]).reshape(block.size, -1)
    writes = [block.writer(item, f"b{8 * part}") for item in d.items]

    def run(mask):
        for i, write in enumerate(writes):
            write(pieces[:, i], mask)

    return run


def pack(block, d, a, kind):
    part = BYTES[kind] // len(a.items)
    sources = [block.source(item, f"b{8 * part}") for item in a.items if not isinstance(item, Sink)]
    write, word = block.writer(d, kind), UNSIGNED[BYTES[kind]]

    def run(mask):
        value = np.zeros(block.size, word)
        for i, x in enumerate(sources):
            value |= np.asarray(x).astype(word) << word(8 * part * i)
        write(value, mask)

    return run


# §9.7.9.7 prmt: four bytes picked from {b, a}; with bit 3 of a selector, the sign of the byte
@meaning(r"prmt\.b32")
def prmt(block, instruction, pc):
    d, a, b, c = instruction.operands
    x, y, selector, write = (*(block.source(o, "b32") for o in (a, b, c)), block.writer(d, "b32"))

    def run(mask):
        both = (block.per_thread(y).astype(np.uint64) << np.uint64(32)) | block.per_thread(x)
        result = np.zeros(block.size, np.uint32)
        for i in range(4):
            pick = (np.asarray(selector) >> np.uint32(4 * i)) & np.uint32(15)
            byte = (both >> ((pick & 7).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            byte = np.where(pick & 8, sign, byte)
            result |= byte.astype(np.uint32) << np.uint32(8 * i)
        write(result, mask)

    return run

"""Atomics, PTX ISA §9.7.13.5 (atom) and §9.7.13.7 (red), one thread after the other."""

import numpy as np

from ..order import STRONG
from ..types import BYTES, numpy_type
from . import meaning
from .memory import acquire, release, resolve, touch


def wrapping_inc(old, limit):
    """§9.7.13.5: old >= limit ? 0 : old + 1"""
    return type(old)(0) if old >= limit else old + type(old)(1)


def wrapping_dec(old, limit):
    return limit if old == 0 or old > limit else old - type(old)(1)


OPERATIONS = {
    "add": lambda old, b: old + b,
    "inc": wrapping_inc,
    "dec": wrapping_dec,
    "min": min,
    "max": max,
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "exch": lambda old, b: b,
}


ORDERS = "relaxed", "acquire", "release", "acq_rel"


@meaning(
    r"(?P<name>atom|red)(?P<modifiers>(\.(relaxed|acquire|release|acq_rel|cta|cluster|gpu|sys|global|shared(::cta)?))*)"
    r"\.(?P<operation>add|inc|dec|min|max|and|or|xor|exch|cas)\.(?P<kind>[bus](32|64)|f32|f64)"
)
def atom(block, instruction, pc, name, modifiers, operation, kind):
    """The manual has order, scope and space in this order; ptxas, and so Triton, takes any."""
    modifiers = modifiers.removesuffix("::cta").split(".")
    order = next((m for m in ORDERS if m in modifiers), "relaxed")
    space = next((m for m in ("global", "shared") if m in modifiers), None)
    operands = list(instruction.operands)
    write = block.writer(operands.pop(0), kind) if name == "atom" else None
    address, b = block.address(operands[0]), block.source(operands[1], kind)
    c = block.source(operands[2], kind) if operation == "cas" else None
    size, kind_of, text, old = BYTES[kind], numpy_type(kind), instruction.text, np.zeros(block.size, numpy_type(kind))

    def run(mask):
        addresses, values = address(), block.per_thread(b)
        swap = None if c is None else block.per_thread(c)
        for thread in np.flatnonzero(block.mask):
            where, warp = addresses[thread : thread + 1], block.warp_of[thread : thread + 1]
            ((region, where, _),) = resolve(block, space, where, text)
            place = int(region.places(where, size, size, text)[0])
            touch(region, block, where, block.thread[thread : thread + 1], size, text, write=True, kind=STRONG)
            if order in ("acquire", "acq_rel", "relaxed"):
                acquire(block, order, region, where, warp)
            data = region.elements[size].view(kind_of)
            old[thread] = data[place]
            if swap is not None:
                data[place] = swap[thread] if data[place] == values[thread] else data[place]
            else:
                data[place] = OPERATIONS[operation](data[place], values[thread])
            release(block, order, region, where, warp)
        if write:
            write(old, mask)

    return run

"""Comparison and selection, PTX ISA §9.7.6."""

import numpy as np

from ..types import from_bf16, from_f16
from . import meaning

ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
JOIN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name: str, kind: str):
    name = UNSIGNED_NAMES.get(name, name)
    if name in ("num", "nan"):
        return lambda x, y: (np.isnan(x) | np.isnan(y)) == (name == "nan")
    if name in ORDERED:
        function = ORDERED[name]
        if kind[0] == "f" and name == "ne":  # ordered: false if one is NaN
            return lambda x, y: np.not_equal(x, y) & ~(np.isnan(x) | np.isnan(y))
        return function
    function = ORDERED[name[:-1]]  # equ, neu, ltu, ...: true if one is NaN
    return lambda x, y: function(x, y) | np.isnan(x) | np.isnan(y)


# §9.7.6.2 setp, with or without a predicate to join: p = (a ? b) join c
@meaning(
    r"setp\.(?P<name>eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)(\.(?P<join>and|or|xor))?\.(?P<kind>[bus](16|32|64)|f32|f64)"
)
def setp(block, instruction, pc, name, join, kind):
    d, a, b, *c = instruction.operands
    x, y, write, compare = block.source(a, kind), block.source(b, kind), block.writer(d, "pred"), comparison(name, kind)
    if not join:
        return lambda mask: write(compare(x, y), mask)
    z, combine = block.source(c[0], "pred"), JOIN[join]
    return lambda mask: write(combine(compare(x, y), z), mask)


# §9.7.7.2 setp of 16-bit floats; of a pair, one predicate each, that of the low half first
@meaning(r"setp\.(?P<name>eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)\.(?P<of>b?f16)(?P<pair>x2)?")
def setp_half(block, instruction, pc, name, of, pair):
    d, a, b = instruction.operands
    convert, compare = from_f16 if of == "f16" else from_bf16, comparison(name, "f32")
    x, y = (block.source(operand, "b32" if pair else "b16") for operand in (a, b))
    writes = [block.writer(p, "pred") for p in ((d.first, d.second) if pair else (d,))]

    def run(mask):
        for half, write in enumerate(writes):
            left, right = (convert((block.per_thread(v) >> (16 * half) & 0xFFFF).astype(np.uint16)) for v in (x, y))
            write(compare(left, right), mask)

    return run


# §9.7.6.3 selp: d = p ? a : b
@meaning(r"selp\.(?P<kind>[bus](16|32|64)|f32|f64)")
def selp(block, instruction, pc, kind):
    d, a, b, p = instruction.operands
    x, y, write = block.source(a, kind), block.source(b, kind), block.writer(d, kind)
    choice = block.source(p, "pred")
    return lambda mask: write(np.where(choice, x, y), mask)

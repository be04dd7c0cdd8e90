"""Meanings of instructions by family, each over the forms that its pattern names; section numbers are those of PTX ISA 9.0.

A meaning is made once per instruction and block: it binds registers, and returns a function of the mask (True where the group is the
whole block) that does the work and returns None, a program counter, or GONE.
"""

import re
from collections.abc import Callable

import numpy as np

from ..types import PtxError

_meanings: list[tuple[re.Pattern, Callable]] = []
_known: dict[str, tuple[Callable, dict] | None] = {}


def meaning(pattern: str):
    """The decorated function gives a meaning to all opcodes that match the whole pattern; named groups become arguments."""

    def register(function):
        _meanings.append((re.compile(pattern), function))
        return function

    return register


def find(op: str) -> tuple[Callable, dict] | None:
    """The meaning of an opcode with all its modifiers, or None."""
    if op not in _known:
        found = [(f, m.groupdict()) for p, f in _meanings if (m := p.fullmatch(op))]
        if len(found) > 1:
            raise AssertionError(f"{op} has {len(found)} meanings")
        _known[op] = found[0] if found else None
    return _known[op]


def build(block, instruction, pc: int) -> Callable:
    found = find(instruction.op)
    if found is None:
        raise PtxError(f"no meaning for {instruction.op}: {instruction.text}")
    function, modifiers = found
    try:
        closure = function(block, instruction, pc, **modifiers)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PtxError(f"operands that do not fit: {instruction.text} ({error!r})") from error
    if pc in block.watched:
        closure = wgmma.watched(block, closure, block.watched[pc], instruction.text)
    if instruction.guard is None or instruction.op.startswith("bra"):
        return closure
    guard, negated = block.register(instruction.guard.name), instruction.guard.negated

    def guarded(mask):
        whole = block.mask
        chosen = whole & (~guard if negated else guard)
        if not chosen.any():
            return None
        block.mask = chosen
        result = closure(True if chosen.all() else chosen)
        block.mask = whole
        if result is not None:
            block.join(pc + 1, whole & ~chosen)
        return result

    return guarded


def nothing(block, instruction, pc, **modifiers):
    """A hint, or an order that another part of the model keeps."""
    return lambda mask: None


def uniform(block, values, what: str) -> int:
    """The value that all active threads share."""
    values = block.per_thread(values)[block.mask]
    if (values != values[0]).any():
        raise PtxError(f"threads disagree: {what}")
    return int(values[0])


def thread_values(block, values) -> list[tuple[int, int]]:
    """(thread, value) of the active threads."""
    values = block.per_thread(values)
    return [(int(t), int(values[t])) for t in np.flatnonzero(block.mask)]


from . import (  # noqa: E402
    atomic,  # noqa: F401
    barrier,  # noqa: F401
    bulk_copy,  # noqa: F401
    compare,  # noqa: F401
    control,  # noqa: F401
    convert,  # noqa: F401
    copy,  # noqa: F401
    floating,  # noqa: F401
    integer,  # noqa: F401
    logic,  # noqa: F401
    matrix,  # noqa: F401
    mbarrier,  # noqa: F401
    memory,  # noqa: F401
    move,  # noqa: F401
    warp,  # noqa: F401
    wgmma,
)

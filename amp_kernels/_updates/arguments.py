"""The arguments of an update op, as schema, reference, checks, Triton's launch and the optimizers take them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Annotated, NamedTuple, get_type_hints

from torch import Tensor

WrittenList = Annotated[Sequence[Tensor], "written"]
Written = Annotated[Tensor, "written"]


class UpdateArguments(NamedTuple):
    """In the order of the schema. ``UpdateCall`` in csrc/update/call.h unpacks them in this order.

    A new argument of all update ops goes before ``squares`` and has a default. Buffers (``moments``, ``steps``, ``masters``, ``shadows``,
    ``emas``) are contiguous. Their elements count, whatever the number of dimensions.

    Args:
        params: float16, bfloat16 or float32, dense, one device; updated.
        grads: same shapes and strides as ``params``, float16, bfloat16 or float32 whatever the param's dtype; only read.
        moments: for each of the declaration's moments one flat float32, bfloat16 or uint8 buffer per block, kind after kind;
            updated. Optional ones have 0 elements for a block without them. uint8 buffers hold 8-bit codes, then exponents
            (:mod:`.state`).
        steps: one float32 buffer per block, one counter per param; incremented.
        masters: per block float32 masters, or int16 or int8 remainders of 16-bit params, or 0 elements; updated.
        shadows: per block a float16 or bfloat16 copy of float32 params, or 0 elements; overwritten.
        emas: per block float32 exponential moving averages of the float32 weights, or 0 elements; updated.
        layout: int64 ``[n, 7]`` on the CPU, row ``(block, offset, slot, group, index, width, pitch)`` for each param
            (:mod:`.state`).
        lrs: empty, or one float32 scalar per group that replaces ``lr`` and is read on the device.
        weight_decays: empty, or one float64 scalar per group that replaces ``weight_decay`` and is read on the device.
        grad_scale: loss scale that the grads still carry, float32 scalar; ``None`` means 1.
        found_inf: float32 scalar; if it is above 0 nothing changes, step counters included. ``None`` never skips.
        sum_sq: squared norm of the unscaled grads (:func:`~amp_kernels._raw.check_and_norm.check_and_norm`); ``None`` does
            not clip.
        options: the numbers of the declaration, group after group.
        ema_decay: one value per group.
        flags: per group, a sum of the declaration's bits (:mod:`.state`).
        max_norm: norm to clip to; read only if ``sum_sq`` is given.
        factors: in place of ``sum_sq``, float32 ``[n]``: for each param its clip factor; above 1 it stays as it is, its step counter
            included.
        seed: 0 to 2^63 - 1; with ``index``, step and element it decides the random bits (:mod:`.._raw._stochastic`).
        squares: of half a step alone, for params that are pieces of tensors: float64 ``[n, 2]``. The first half moves the
            moments and writes the sums of each piece; rows of pieces without elements stay. The second half reads the
            sums of the whole tensors, moves the weights and writes no moment. Both count the step, so the first is given
            copies of the counters. A skipped half writes nothing.
        second: which half.
    """

    params: WrittenList
    grads: Sequence[Tensor]
    moments: WrittenList
    steps: WrittenList
    masters: WrittenList
    shadows: WrittenList
    emas: WrittenList
    layout: Tensor
    lrs: Sequence[Tensor]
    weight_decays: Sequence[Tensor]
    grad_scale: Tensor | None
    found_inf: Tensor | None
    sum_sq: Tensor | None
    options: Sequence[float]
    ema_decay: Sequence[float]
    flags: Sequence[int]
    max_norm: float
    seed: int
    factors: Tensor | None = None
    squares: Written | None = None
    second: bool = True

    def with_flat_buffers(self) -> UpdateArguments:
        """Buffers of any number of dimensions as the 1-D ones that they are in memory."""
        names = "moments", "steps", "masters", "shadows", "emas"
        return self._replace(**{name: [buffer.view(-1) for buffer in getattr(self, name)] for name in names})

    def of_op(self) -> tuple:
        """The arguments of the op over lists, a whole step."""
        return VARIANTS[False, False](self)


def _names(table: bool, half: bool) -> list[str]:
    absent = {*(("params", "grads", "layout") if table else ()), *(() if half else ("squares", "second"))}
    return [name for name in UpdateArguments._fields if name not in absent]


#: ``VARIANTS[table, half](arguments)``: those that a variant of the op takes; with a table, the ones after it.
VARIANTS = {
    variant: operator.itemgetter(*map(UpdateArguments._fields.index, _names(*variant)))
    for variant in itertools.product((False, True), repeat=2)
}
_SCHEMA_TYPES = {
    WrittenList: "Tensor({}!)[]",
    Written | None: "Tensor({}!)",
    Sequence[Tensor]: "Tensor[]",
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[float]: "float[]",
    Sequence[int]: "int[]",
    float: "float",
    int: "int",
    bool: "bool",
}


def schema(name: str, *, table: bool = False, half: bool = False) -> str:
    """The schema of op ``name``; with ``table``, a table of addresses replaces ``params``, ``grads`` and ``layout``."""
    hints, letters = get_type_hints(UpdateArguments, include_extras=True), iter("abcdefgh")
    types = ((_SCHEMA_TYPES[hints[argument]], argument) for argument in _names(table, half))
    texts = [f"{kind.format(next(letters)) if '!' in kind else kind} {argument}" for kind, argument in types]
    return f"{name}({', '.join(['Tensor table'] * table + texts)}) -> ()"

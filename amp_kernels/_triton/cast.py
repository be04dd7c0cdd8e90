"""cast_ in Triton: a list of tensors copied into another one, each element widened or rounded to its destination's dtype.

Work: 4 to 8 bytes an element, read once and written once: bandwidth is the limit. Pairs of tensors of the same two dtypes
and alignment make a class, and each class is one launch of its own specialization, a persistent grid over the list
(``_tables.py``); a model has one or two. The random bits are csrc/base/philox.h's, numbered by element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tables
from ._rounding import round_stochastic, rounding_bits
from ._tables import ELEMENTS, UNIT, find_span, pointer, unit_ends, units_of_run

TABLE_COLUMNS = tl.constexpr(5)  # units up to and including this pair, numel, both addresses, position in the list
BLOCK = 2048
PROGRAMS_PER_SM = 6


@triton.jit
def _cast(destination, source, offsets, mask, first, key, TO: tl.constexpr, FROM: tl.constexpr):
    """One block, whose first element is number ``first``. ``key``: seed, step and index, or ``None``."""
    x = tl.load(source + offsets, mask=mask, cache_modifier=".cg")
    if FROM == TO:
        tl.store(destination + offsets, x, mask=mask, cache_modifier=".cs")
    elif key is not None and tl.float32 != TO:
        half = round_stochastic(x.to(tl.float32), rounding_bits(key[0], key[1], key[2], first, offsets.shape[0]), TO)
        address = destination.to(tl.pointer_type(tl.int16))
        tl.store(address + offsets, half, mask=mask, cache_modifier=".cs")
    else:
        tl.store(destination + offsets, x.to(tl.float32).to(TO), mask=mask, cache_modifier=".cs")


@triton.jit(do_not_specialize=["runs", "per_run", "longer"])
def cast_kernel(
    table,
    tensors,
    runs,
    per_run,
    longer,
    seed,
    step,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    ALIGNED: tl.constexpr,
    TENSORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``seed``: ``None`` to round to nearest even. ``step``: where its count stands, or ``None`` for 0."""
    count = tl.load(step).to(tl.uint32) if step is not None else tl.cast(0, tl.uint32)
    ends = unit_ends(table, tensors, TABLE_COLUMNS, TENSORS)
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        at, stop = units_of_run(run, per_run, longer)
        while at < stop:
            row, begin, elements, at = find_span(table, ends, at, stop, UNIT, TABLE_COLUMNS)
            destination = pointer(tl.load(row + 2), begin, TO, ALIGNED)
            source = pointer(tl.load(row + 3), begin, FROM, ALIGNED)
            key = (seed, count, tl.load(row + 4).to(tl.uint32)) if seed is not None else None
            full = elements // BLOCK * BLOCK
            for i in range(0, full, BLOCK):
                _cast(destination, source, i + tl.arange(0, BLOCK), None, begin + i, key, TO, FROM)
            if full < elements:
                offsets = full + tl.arange(0, BLOCK)
                _cast(destination, source, offsets, offsets < elements, begin + full, key, TO, FROM)


def cast_(
    destinations: list[torch.Tensor],
    sources: list[torch.Tensor],
    *,
    seed: int | None = None,
    step: torch.Tensor | None = None,
) -> None:
    """``amp_kernels::cast_`` for tensors that Triton can reach; see ``amp_kernels/ops/cast.py``."""
    classes: dict[tuple, list[tuple[int, ...]]] = {}
    for index, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
        addresses = destination.data_ptr(), source.data_ptr()
        kind = destination.dtype, source.dtype, not any(address % 16 for address in addresses)
        classes.setdefault(kind, []).append((source.numel(), *addresses, index))
    device = destinations[0].device
    programs = _tables.programs(device, PROGRAMS_PER_SM)
    with _tables.on(device):
        for (to, of, aligned), pairs in classes.items():
            rounds = seed is not None and to != torch.float32 and to != of
            for table in _tables.tensor_tables(pairs, device, programs):
                cast_kernel[(table.programs,)](
                    table.rows,
                    table.tensors,
                    *table.shares,
                    seed if rounds else None,
                    step if rounds else None,
                    TO=ELEMENTS[to],
                    FROM=ELEMENTS[of],
                    ALIGNED=aligned,
                    TENSORS=table.capacity,
                    BLOCK=BLOCK,
                    num_warps=4,
                    maxnreg=80,  # allocated in eights: six programs of 128 threads; Triton 3.8 would take up to 95
                )

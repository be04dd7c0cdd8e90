"""unscale_ in Triton: a list of gradients of any dtypes multiplied by the inverse loss scale in place, and tested.

Work: 4 bytes (16-bit) to 16 bytes (fp64) an element, read once and written once: bandwidth is the limit. A persistent
grid walks over the whole list (``_tables.py``). The stored value is tested: a product that fits
fp32 may still overflow fp16. The flag is shared with other checks, so it is set and never cleared.

The main loop has neither mask nor unknown alignment, either of which would make its accesses scalar: the elements before
the first 16-byte boundary are peeled off, as in ``check_and_norm.py``. A block is a number of bytes, so that each dtype
has offsets of its own: sharing them, all dtypes would get the thread layout of the smallest one, and every wider block
would pass through shared memory on its way from load to store. Masked accesses are small, because they take registers for each
element's address.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tables
from ._tables import UNIT, find_span, not_finite, unit_ends, units_of_run
from .check_and_norm import DTYPE_CODES

TABLE_COLUMNS = tl.constexpr(4)  # units up to and including this tensor, numel, address, dtype code
BLOCK_BYTES = 4096  # two 16-byte accesses a thread
EDGE = tl.constexpr(256)  # elements of a masked access: no fewer than threads, which would then share elements and race
PROGRAMS_PER_SM = 8


@triton.jit
def _unscale(pointers, mask, inv_scale, bad):
    """Unscales what ``pointers`` point to; sets ``bad`` in the lanes of non-finite results."""
    x = tl.load(pointers, mask=mask, cache_modifier=".cg")
    wide = x if x.dtype == tl.float64 else x.to(tl.float32)
    stored = (wide * inv_scale.to(wide.dtype)).to(x.dtype)
    tl.store(pointers, stored, mask=mask, cache_modifier=".cs")
    found = not_finite(stored)
    return bad | (found if mask is None else found & mask)


@triton.jit
def _unscale_span(address, begin, count, inv_scale, ELEMENT: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Unscales ``count`` elements; returns 1 if one of them is not finite now, else 0."""
    size: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    BLOCK: tl.constexpr = BLOCK_BYTES // size
    edge = tl.arange(0, EDGE)
    bad_edge = tl.zeros((EDGE,), tl.int1)
    bad = tl.zeros((BLOCK,), tl.int1)
    address += begin * size

    head = tl.minimum((16 - address % 16) % 16 // size, count)
    if head > 0:
        bad_edge = _unscale(address.to(tl.pointer_type(ELEMENT)) + edge, edge < head, inv_scale, bad_edge)
    # The hint is lost on the sum of a pointer and an offset, so the sum is made of integers.
    aligned = tl.multiple_of((address + head * size).to(tl.pointer_type(ELEMENT)), 16)
    blocks = (count - head) // BLOCK
    for i in range(blocks):
        bad = _unscale(aligned + i * BLOCK + tl.arange(0, BLOCK), None, inv_scale, bad)
    for i in range(blocks * BLOCK, count - head, EDGE):
        bad_edge = _unscale(aligned + i + edge, i + edge < count - head, inv_scale, bad_edge)
    return tl.max(bad.to(tl.int32), 0) | tl.max(bad_edge.to(tl.int32), 0)


@triton.jit(do_not_specialize=["runs", "per_run", "longer"])
def unscale_kernel(
    table, tensors, runs, per_run, longer, found_inf, inv_scale, TENSORS: tl.constexpr, BLOCK_BYTES: tl.constexpr
):
    inv = tl.load(inv_scale)
    ends = unit_ends(table, tensors, TABLE_COLUMNS, TENSORS)
    end = runs
    if found_inf is None:
        end = tl.where(inv == 1.0, 0, runs)  # nothing to do, and nobody asks what is there
    bad = 0
    for run in range(tl.program_id(0), end, tl.num_programs(0)):
        at, stop = units_of_run(run, per_run, longer)
        while at < stop:
            row, begin, count, at = find_span(table, ends, at, stop, UNIT, TABLE_COLUMNS)
            address, dtype = tl.load(row + 2), tl.load(row + 3)
            if dtype == 0:
                bad |= _unscale_span(address, begin, count, inv, tl.float16, BLOCK_BYTES)
            elif dtype == 1:
                bad |= _unscale_span(address, begin, count, inv, tl.bfloat16, BLOCK_BYTES)
            elif dtype == 2:
                bad |= _unscale_span(address, begin, count, inv, tl.float32, BLOCK_BYTES)
            else:
                bad |= _unscale_span(address, begin, count, inv, tl.float64, BLOCK_BYTES)
    if found_inf is not None:  # many programs may store here, each of them the same
        tl.store(found_inf, 1.0, mask=bad != 0)


def unscale_(grads: list[torch.Tensor], found_inf: torch.Tensor | None, inv_scale: torch.Tensor) -> None:
    """``amp_kernels::unscale_`` for tensors that Triton can reach; see ``amp_kernels/_raw/unscale.py``."""
    device = grads[0].device
    entries = [(g.numel(), g.data_ptr(), DTYPE_CODES[g.dtype]) for g in grads]
    programs = _tables.programs(device, PROGRAMS_PER_SM)
    with _tables.on(device):
        for table in _tables.tensor_tables(entries, device, programs):
            unscale_kernel[(table.programs,)](
                table.rows,
                table.tensors,
                *table.shares,
                found_inf,
                inv_scale,
                TENSORS=table.capacity,
                BLOCK_BYTES=BLOCK_BYTES,
                num_warps=4,
            )

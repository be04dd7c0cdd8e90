"""check_and_norm in Triton: one read of a list of gradients of any dtypes, then one program that adds the partial sums.

Programs walk over the chunks of the whole list (``_tables.py``). Sums are kept in fp32 within a chunk and in fp64
above, and nothing is added by atomics, so a call gives the same bits each time.

The speed hangs on ``tl.multiple_of`` in ``_sum_squares``: without the hint, or under a mask of unknown divisibility,
every load becomes scalar. The elements before the first 16-byte boundary are peeled off, so that the hint is true for
any address.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tables
from ._tables import chunk_ends, find_chunk, not_finite

TABLE_COLUMNS = tl.constexpr(4)  # chunks up to and including this tensor, numel, address, dtype code
DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
BLOCK = 1024
PROGRAMS_PER_SM = 4


@triton.jit
def _add(x, inv_scale, total, bad):
    unscaled = (x if x.dtype == tl.float64 else x.to(tl.float32)) * inv_scale.to(total.dtype)
    return total + unscaled * unscaled, bad | not_finite(unscaled)


@triton.jit
def _sum_squares(address, begin, count, inv_scale, bad, ELEMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of squares of ``count`` elements, one per lane of the block, in fp64; sets ``bad`` in non-finite lanes."""
    offsets = tl.arange(0, BLOCK)
    size: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    address += begin * size
    total = tl.zeros((BLOCK,), tl.float64 if tl.float64 == ELEMENT else tl.float32)

    head = tl.minimum((16 - address % 16) % 16 // size, count)
    if head > 0:
        x = tl.load(address.to(tl.pointer_type(ELEMENT)) + offsets, mask=offsets < head, other=0.0)
        total, bad = _add(x, inv_scale, total, bad)
    # The hint is lost on the sum of a pointer and an offset, so the sum is made of integers.
    aligned = tl.multiple_of((address + head * size).to(tl.pointer_type(ELEMENT)), 16)
    blocks = (count - head) // BLOCK
    for i in range(blocks):
        total, bad = _add(tl.load(aligned + i * BLOCK + offsets), inv_scale, total, bad)
    rest = count - head - blocks * BLOCK
    if rest > 0:
        x = tl.load(aligned + blocks * BLOCK + offsets, mask=offsets < rest, other=0.0)
        total, bad = _add(x, inv_scale, total, bad)
    return total.to(tl.float64), bad


@triton.jit
def check_and_norm_kernel(table, tensors, grad_scale, sums, flags, TENSORS: tl.constexpr, BLOCK: tl.constexpr):
    """Writes this program's sum of squares and non-finite flag to its slot of ``sums`` and ``flags``."""
    scale = 1.0 if grad_scale is None else tl.load(grad_scale)
    inv_scale = (1.0 / tl.cast(scale, tl.float64)).to(tl.float32)
    ends, chunks = chunk_ends(table, tensors, TABLE_COLUMNS, TENSORS)
    total = tl.zeros((BLOCK,), tl.float64)
    bad = tl.zeros((BLOCK,), tl.int1)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row, begin, count = find_chunk(table, ends, chunk, TABLE_COLUMNS)
        address, dtype = tl.load(row + 2), tl.load(row + 3)
        if dtype == 0:
            part, bad = _sum_squares(address, begin, count, inv_scale, bad, tl.float16, BLOCK)
        elif dtype == 1:
            part, bad = _sum_squares(address, begin, count, inv_scale, bad, tl.bfloat16, BLOCK)
        elif dtype == 2:
            part, bad = _sum_squares(address, begin, count, inv_scale, bad, tl.float32, BLOCK)
        else:
            part, bad = _sum_squares(address, begin, count, inv_scale, bad, tl.float64, BLOCK)
        total += part
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
    tl.store(flags + tl.program_id(0), tl.max(bad.to(tl.int32), 0))


@triton.jit
def finish_kernel(sums, flags, slots, sum_sq, found_inf, BLOCK: tl.constexpr):
    """Adds the slots of all programs, always in the same order. One program."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, slots, BLOCK):
        mask = start + offsets < slots
        total += tl.load(sums + start + offsets, mask=mask, other=0.0)
        bad |= tl.load(flags + start + offsets, mask=mask, other=0)
    tl.store(sum_sq, tl.sum(total, 0).to(tl.float32))
    tl.store(found_inf, tl.max(bad, 0).to(tl.float32))


def launch(grads: list[torch.Tensor], grad_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``amp_kernels::check_and_norm`` for tensors that Triton can reach; see ``amp_kernels/ops/check_and_norm.py``."""
    device = grads[0].device
    tables = _tables.tensor_tables([(g.numel(), g.data_ptr(), DTYPE_CODES[g.dtype]) for g in grads], device)
    sum_sq = torch.empty((), dtype=torch.float32, device=device)
    found_inf = torch.empty_like(sum_sq)
    if not tables:
        return sum_sq.zero_(), found_inf.zero_()
    programs = _tables.programs(device, PROGRAMS_PER_SM)
    sums = torch.empty(len(tables) * programs, dtype=torch.float64, device=device)
    flags = torch.empty(len(tables) * programs, dtype=torch.int32, device=device)
    with _tables.on(device):
        for i, table in enumerate(tables):
            slots = slice(i * programs, (i + 1) * programs)
            check_and_norm_kernel[(programs,)](
                table.rows,
                table.tensors,
                grad_scale,
                sums[slots],
                flags[slots],
                TENSORS=table.capacity,
                BLOCK=BLOCK,
                num_warps=4,
            )
        finish_kernel[(1,)](sums, flags, sums.numel(), sum_sq, found_inf, BLOCK=BLOCK, num_warps=4)
    return sum_sq, found_inf

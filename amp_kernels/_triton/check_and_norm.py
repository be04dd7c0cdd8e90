"""check_and_norm in Triton: one read of a list of gradients of any dtypes, then one program that adds the partial sums.

A Triton kernel cannot take a list in its arguments, so the addresses lie in a table on the device. Programs walk over
the chunks of the whole list; each keeps the running chunk totals of the list in registers and finds a chunk's tensor by
counting the totals at or below it, which costs no memory access. Sums are kept in fp32 within a chunk and in fp64
above, and nothing is added by atomics, so a call gives the same bits each time.

The speed hangs on ``tl.multiple_of`` in ``_sum_squares``: without the hint, or under a mask of unknown divisibility,
every load becomes scalar. The elements before the first 16-byte boundary are peeled off, so that the hint is true for
any address.
"""

from __future__ import annotations

import collections

import torch
import triton
import triton.language as tl

CHUNK = tl.constexpr(16384)
TABLE_COLUMNS = tl.constexpr(4)  # address, numel, dtype code, chunks up to and including this tensor
DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
TENSORS_PER_LAUNCH = 1024
BLOCK = 1024
PROGRAMS_PER_SM = 4
INTERPRETED_PROGRAMS = 3  # off the GPU: few, since the interpreter runs one after the other, and not a power of two


@triton.jit
def _not_finite(x):
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        return (bits & 0x7FF0000000000000) == 0x7FF0000000000000
    else:
        bits = x.to(tl.int32, bitcast=True)
        return (bits & 0x7F800000) == 0x7F800000


@triton.jit
def _add(x, inv_scale, total, bad):
    unscaled = (x if x.dtype == tl.float64 else x.to(tl.float32)) * inv_scale.to(total.dtype)
    return total + unscaled * unscaled, bad | _not_finite(unscaled)


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
    places = tl.arange(0, TENSORS)
    ends = tl.load(table + places * TABLE_COLUMNS + 3, mask=places < tensors, other=0x7FFFFFFF).to(tl.int32)
    chunks = tl.load(table + (tensors - 1) * TABLE_COLUMNS + 3).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float64)
    bad = tl.zeros((BLOCK,), tl.int1)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        before = ends <= chunk
        tensor = tl.sum(before.to(tl.int32), 0)
        first_chunk = tl.max(tl.where(before, ends, 0), 0)
        row = table + tensor * TABLE_COLUMNS
        address = tl.load(row)
        begin = (chunk - first_chunk).to(tl.int64) * CHUNK
        count = tl.minimum(tl.load(row + 1) - begin, CHUNK).to(tl.int32)
        dtype = tl.load(row + 2)
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
    filled = [grad for grad in grads if grad.numel() > 0]
    sum_sq = torch.empty((), dtype=torch.float32, device=device)
    found_inf = torch.empty_like(sum_sq)
    if not filled:
        return sum_sq.zero_(), found_inf.zero_()
    lists = [filled[i : i + TENSORS_PER_LAUNCH] for i in range(0, len(filled), TENSORS_PER_LAUNCH)]
    programs = INTERPRETED_PROGRAMS
    if device.type == "cuda":
        programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    sums = torch.empty(len(lists) * programs, dtype=torch.float64, device=device)
    flags = torch.empty(len(lists) * programs, dtype=torch.int32, device=device)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        for i, tensors in enumerate(lists):
            slots = slice(i * programs, (i + 1) * programs)
            check_and_norm_kernel[(programs,)](
                _table(tensors, device),
                len(tensors),
                grad_scale,
                sums[slots],
                flags[slots],
                TENSORS=max(16, triton.next_power_of_2(len(tensors))),
                BLOCK=BLOCK,
                num_warps=4,
            )
        finish_kernel[(1,)](sums, flags, sums.numel(), sum_sq, found_inf, BLOCK=BLOCK, num_warps=4)
    return sum_sq, found_inf


_TABLES_KEPT = 32
_tables: collections.OrderedDict[tuple, torch.Tensor] = collections.OrderedDict()
_captured: list[torch.Tensor] = []


def _table(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The list as the kernel reads it, kept until the list changes.

    A table is never written again, and one that a CUDA graph reads, or is filled from, lives as long as the process: a
    replay must find it unchanged. The stream is part of the key because the copy is only ordered before later work of
    its own stream.
    """
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    key = (device, stream, *((t.data_ptr(), t.numel(), t.dtype) for t in tensors))
    table = _tables.pop(key, None)
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    if table is None:
        rows, chunks = [], 0
        for t in tensors:
            chunks += triton.cdiv(t.numel(), CHUNK.value)
            rows.append((t.data_ptr(), t.numel(), DTYPE_CODES[t.dtype], chunks))
        host = torch.tensor(rows, dtype=torch.int64, pin_memory=on_gpu)
        table = host.to(device, non_blocking=True)
        if capturing:
            _captured.append(host)
    if capturing:
        _captured.append(table)
    else:
        _tables[key] = table
        if len(_tables) > _TABLES_KEPT:
            _tables.popitem(last=False)
    return table

"""Lists of tensors for Triton kernels, whose arguments cannot be lists: tables of integers on the device.

A kernel walks over a whole list. Tensors are cut into units and these joined to runs, which the programs share out, as in
csrc/device/tensor_list.cuh. A row of a :class:`TensorTable` is one tensor: the units up to and including it, its number of
elements, and the columns of the kernel. The running totals of the list stay in registers, and a unit's tensor is found by
counting the totals at or below it, which costs no memory access.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

UNIT = tl.constexpr(1024)  # elements
RUN_UNITS = 16
TENSORS_PER_TABLE = 1024
ELEMENTS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}
INTERPRETED_PROGRAMS = 3  # the interpreter runs them one by one; not a power of two


@triton.jit
def unit_ends(table, tensors, COLUMNS: tl.constexpr, TENSORS: tl.constexpr):
    """The running totals of units, one per tensor."""
    places = tl.arange(0, TENSORS)
    return tl.load(table + places * COLUMNS, mask=places < tensors, other=0x7FFFFFFF).to(tl.int32)


@triton.jit
def units_of_run(run, per_run, longer):
    """The first unit of a run, and the first of the next one."""
    begin = run * per_run + tl.minimum(run, longer)
    return begin, begin + per_run + (run < longer).to(tl.int32)


@triton.jit
def find_span(table, ends, index, stop, unit, COLUMNS: tl.constexpr):
    """The units from ``index`` to ``stop``, or as many of them as belong to one tensor: the row of that tensor, the first
    element, the number of elements, and the first unit after them."""
    before = ends <= index
    row = table + tl.sum(before.to(tl.int32), 0) * COLUMNS
    begin = (index - tl.max(tl.where(before, ends, 0), 0)).to(tl.int64) * unit
    last = tl.minimum(tl.load(row).to(tl.int32), stop)
    return row, begin, tl.minimum(tl.load(row + 1) - begin, (last - index) * unit).to(tl.int32), last


@triton.jit
def run_of(index, per_run, longer):
    """The run of a unit."""
    of_longer = longer * (per_run + 1)
    return tl.where(index < of_longer, index // (per_run + 1), longer + (index - of_longer) // per_run)


@triton.jit
def not_finite(x):
    """True if x is infinite or NaN, by its bits. Any of the four dtypes."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        return (bits & 0x7FF0000000000000) == 0x7FF0000000000000
    elif x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        return (bits & 0x7F800000) == 0x7F800000
    elif x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True)
        return (bits & 0x7F80) == 0x7F80
    else:
        bits = x.to(tl.int16, bitcast=True)
        return (bits & 0x7C00) == 0x7C00


@triton.jit
def pointer(address, begin, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    if ELEMENT is None:
        return address
    else:
        # The hint is lost on the sum of a pointer and an offset, so the sum is made of integers.
        address += begin * (ELEMENT.primitive_bitwidth // 8)
        return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16 if ALIGNED else 1)


@dataclass(frozen=True)
class TensorTable:
    """The tensors of one launch."""

    rows: torch.Tensor
    tensors: int
    units: int
    runs: int
    programs: int  # of a persistent grid, each with as many runs

    @property
    def shares(self) -> tuple[int, int, int]:
        """Runs, units of each, and how many have one more."""
        return self.runs, *divmod(self.units, self.runs)

    @property
    def capacity(self) -> int:
        """A power of two: how many lanes the totals take. Few different ones, since each is compiled for."""
        return max(16, triton.next_power_of_2(self.tensors))


def tensor_tables(
    tensors: Sequence[tuple[int, ...]], device: torch.device, most_programs: int, unit: int = UNIT.value
) -> list[TensorTable]:
    """One table for each :data:`TENSORS_PER_TABLE` tensors that have elements; an entry begins with the number of elements."""
    filled = [entry for entry in tensors if entry[0] > 0]
    tables = []
    for first in range(0, len(filled), TENSORS_PER_TABLE):
        rows, units = [], 0
        for entry in filled[first : first + TENSORS_PER_TABLE]:
            units += -(-entry[0] // unit)  # triton.cdiv takes a microsecond
            rows.append((units, *entry))
        per_program = -(-units // most_programs)
        programs = -(-units // per_program)
        runs = programs * -(-per_program // RUN_UNITS)
        tables.append(TensorTable(upload(tuple(rows), device), len(rows), units, runs, programs))
    return tables


def programs(device: torch.device, per_sm: int) -> int:
    """Programs of a persistent grid."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return per_sm * torch.cuda.get_device_properties(device).multi_processor_count


def on(device: torch.device) -> torch.cuda.device:
    """A context in which Triton launches on ``device``."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def bits(x: float) -> int:
    """The bits of a double, as a table holds it."""
    return struct.unpack("<q", struct.pack("<d", x))[0]


_UPLOADS_KEPT = 64
_uploads: collections.OrderedDict[tuple, torch.Tensor] = collections.OrderedDict()
_captured: list[torch.Tensor] = []


def upload(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """Rows of 64-bit integers as a tensor on the current device, cached for the next call with the same rows.

    A table is never written again. Tables that a CUDA graph reads or copies live as long as the process: a replay must
    find them unchanged. The stream is part of the key because the copy is only ordered before later work of its stream.
    """
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    key = (device, stream, rows)
    table = _uploads.pop(key, None)
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    if table is None:
        host = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        table = host.to(device, non_blocking=True)
        if capturing:
            _captured.append(host)
    if capturing:
        _captured.append(table)
    else:
        _uploads[key] = table
        if len(_uploads) > _UPLOADS_KEPT:
            _uploads.popitem(last=False)
    return table

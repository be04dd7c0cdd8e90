"""Triton's kernels beside the CUDA kernels of the same ops: what an SM of sm_90a has in flight, how long the code is, and what was
measured. `python -m tests.triton.beside_cuda` prints the table of docs/triton.md.

Triton's side is read in the kernels that it compiles here: registers and shared memory say how many threads share an SM, the order of
the machine code how many bytes are on their way to one of them when it waits, and a thread is followed through a row for the
instructions that it executes. The CUDA side is what tests/build holds its kernels to.
"""

from __future__ import annotations

import re
import statistics
import struct
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from triton.compiler import CompiledKernel

from amp_kernels._triton import (
    activation_forward,
    cast,
    check_and_norm,
    cross_entropy_rows,
    embedding_accumulate,
    norm_backward,
    norm_forward,
    unscale,
)
from bench.harness.rows import OURS, TRITON
from bench.prediction.measured import run
from tools.ptx.cuobjdump import cuobjdump

from ..build.bytes_in_flight import rounds
from ..build.kernel_budgets import BUDGETS
from ..build.listing import Instruction, branch_tables, parse
from ..build.sass import Thread
from ..build.test_row_instructions import BF16 as CODE_OF_BF16
from ..build.test_row_instructions import BIAS, LOSSES, MEAN, NORMS, RINGS, WIDTH, bank
from . import aot

ARCH = 90
REGISTERS, THREADS, PROGRAMS, SHARED = 65_536, 2_048, 32, 228 * 1024  # of an SM
BF16 = torch.bfloat16


class Case(NamedTuple):
    name: str
    launch: Callable[[], object]
    cuda: str  # a budget, a ring, or KB in flight
    why: str
    ops: tuple[str, ...] = ()  # of the benchmark
    shape: str = ".*"  # and which of its shapes
    programs: int = PROGRAMS  # that a launch starts on an SM
    columns: int = 0  # of a row of one program's, where a thread is followed
    instructions: float | None = None  # an element in CUDA's kernel, where a test counts them


def rows(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def norm(columns: int) -> None:
    weight = torch.ones(columns)
    x = rows(2, columns)
    norm_forward.norm_forward(x, weight, weight, eps=0.1, centred=True, out_dtype=BF16)


def norm_gradient(columns: int) -> None:
    x, dy, weight, statistic = rows(2, columns), rows(2, columns), torch.ones(columns), torch.zeros(2)
    options = {"parameters": 2, "branch_dtype": None, "strips": 1}
    norm_backward._run(dy, x, statistic, statistic, weight, None, **options)


def loss(columns: int) -> None:
    logits = rows(3, columns)
    target = torch.zeros(3, dtype=torch.int64)
    cross_entropy_rows.cross_entropy_rows_(
        logits, target, None, torch.ones(3), torch.zeros(3), torch.empty_like(logits)
    )


def gradient_of_table() -> None:
    index = torch.zeros(100, dtype=torch.int64)
    embedding_accumulate.embedding_accumulate_(torch.zeros(4, 768), rows(100, 768), index, index)


PIECES, ROW = "40 and more", "64, one row"  # KB an SM on their way to shared memory (docs/ptx.md)
HAND = "not for speed: it has the bits of the CPU kernel and needs no compiler at run time"
CASES = [
    Case(
        "check_and_norm",
        lambda: check_and_norm.check_and_norm([rows(8)] * 161, torch.ones(())),
        "check_and_norm_kernel",
        "not timed; the tensor list is in the launch arguments, without a table to fill and copy",
        programs=check_and_norm.PROGRAMS_PER_SM,
    ),
    Case(
        "unscale_",
        lambda: unscale.unscale_([rows(8)] * 161, torch.ones(()), torch.zeros(())),
        "unscale_kernel",
        "not timed; as check_and_norm",
        programs=unscale.PROGRAMS_PER_SM,
    ),
    Case(
        "cast_, fp32 to bf16",
        lambda: cast.cast_([rows(8)] * 100, [rows(8, dtype=torch.float32)] * 100),
        "cast_kernel",
        "as check_and_norm; one launch for all pairs of dtypes, Triton needs one for each",
        ("cast_",),
        programs=cast.PROGRAMS_PER_SM,
    ),
    Case(
        "layer_norm, 768 columns",
        lambda: norm(768),
        "norm_forward, 16 bits",
        "half the instructions; prefetches the next rows while it processes one. In that run 16-bit layer norms gained 4 %, fp32 "
        "lost as much",
        ("layer_norm", "rms_norm"),
        r"32768x768 forward( under autocast)?",
        columns=WIDTH,
    ),
    Case(
        "layer_norm, 32,768 columns",
        lambda: norm(32_768),
        ROW,
        "reads the row from memory once, then from shared memory; Triton reads it three times through L2",
        ("layer_norm", "rms_norm"),
        r"2048x32768 forward( under autocast)?",
        columns=32_768,
        instructions=next(most for dtype, has, most in NORMS if (dtype, has) == (CODE_OF_BF16, MEAN | BIAS)),
    ),
    Case(
        "layer_norm gradient, 768 columns",
        lambda: norm_gradient(768),
        "norm_backward, 16 bits",
        "prefetches two rows in addition to the sums over rows, whose registers Triton needs for its loads",
        ("layer_norm", "rms_norm"),
        r"32768x768 forward \+ backward.*",
        columns=WIDTH,
    ),
    Case(
        "cross_entropy, 50,257 classes",
        lambda: loss(50_257),
        PIECES,
        "not timed; 16-byte copies of unaligned rows; the second pass reads the row from shared memory",
        ("cross_entropy",),
        "8192x50257.*",
        columns=50_257,
        instructions=next(most for dtype, *has, most in LOSSES if (dtype, *has) == (CODE_OF_BF16, True, 0.0)),
    ),
    Case(
        "gelu",
        lambda: activation_forward.activation_forward(rows(4, 8192), activation="gelu"),
        "activation_forward_kernel",
        HAND,
        ("activation",),
        columns=2048,
    ),
    Case("embedding gradient", gradient_of_table, "embedding_pieces_kernel", HAND, ("embedding",)),
]


class MachineCode(NamedTuple):
    code: dict[int, Instruction]
    table: list[int]  # of branches


def compiled(case: Case) -> tuple[CompiledKernel, MachineCode]:
    """The first kernel that Triton launches."""
    with aot.compiling_for(ARCH) as kernels:
        case.launch()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernels[0].asm["cubin"])
        file.flush()
        (code,) = parse(cuobjdump("-sass", file.name)).values()
        tables = branch_tables(cuobjdump("-elf", file.name))
    return kernels[0], MachineCode(code, next(iter(tables.values()), []))


def arguments(kernel: CompiledKernel, rows: int, columns: int) -> bytes:
    """Arguments of a launch over contiguous rows: pointers anywhere, strides and counts by their names."""
    counts = {"rows": rows, "strip": rows, "ignore_index": -100, "threshold": 0}
    packed = bytearray()
    for name, kind in kernel.src.signature.items():
        if kind == "constexpr":
            continue
        value, form = (counts.get(name, columns), "i") if kind == "i32" else (0.5, "f")
        if kind.startswith("*"):
            value, form = 0x7E00 + len(packed) << 32, "Q"
        packed += bytes(-len(packed) % struct.calcsize(form)) + struct.pack(form, value)
    return bytes(packed) + bytes(24)  # and what Triton adds


def executed(case: Case) -> float | None:
    """Instructions an element. A program that takes rows in turn is asked for one more."""
    if not case.columns:
        return None
    kernel, machine = compiled(case)
    threads = 32 * kernel.metadata.num_warps
    two, three = (
        len(Thread(*machine, bank(threads, arguments(kernel, count, case.columns)), 37).run()) for count in (2, 3)
    )
    return ((three - two) or two) * threads / case.columns


def in_flight(case: Case) -> tuple[str, float]:
    """Registers and threads of an SM, and its KB in flight."""
    kernel, machine = compiled(case)
    used, threads = aot.usage(kernel), 32 * kernel.metadata.num_warps
    held = -(-used.registers // 8) * 8 * threads, used.shared + 1024
    programs = min(case.programs, PROGRAMS, THREADS // threads, REGISTERS // held[0], SHARED // held[1])
    return f"{used.registers} x {programs * threads:,}", max(rounds(machine.code.values())) * programs * threads / 1024


def budget(case: Case) -> str:
    """KB in flight an SM."""
    if ring := RINGS.get(case.cuda):
        return f"{(ring.stages - 1) * WIDTH * ring.read * ring.warps / 1024:.0f}"
    if case.cuda not in BUDGETS:
        return case.cuda
    b = BUDGETS[case.cuda]
    return (
        f"{b.in_flight * b.threads * b.blocks / 1024:.0f}"
        if b.blocks and b.in_flight
        else "in " + f"{b.registers} registers"
    )


def measured(case: Case) -> str:
    """Triton's time over CUDA's on the H200: the geometric mean, and of how many cases."""
    found = run()
    ratios = [
        row["p50_us"] / found[op, shape, dtype, OURS]["p50_us"]
        for (op, shape, dtype, who), row in found.items()
        if who == TRITON and op in case.ops and re.fullmatch(case.shape, shape) and (op, shape, dtype, OURS) in found
    ]
    return f"{statistics.geometric_mean(ratios):.2f} ({len(ratios)})" if ratios else ""


def table() -> str:
    head = (
        "| op | Triton: registers x threads per SM | KB in flight per SM | instructions per element | CUDA: KB in flight per SM "
        "| instructions per element | Triton's time over CUDA's | why CUDA |\n|---|---|---|---|---|---|---|---|\n"
    )
    lines = []
    for case in CASES:
        (held, kb), count = in_flight(case), executed(case)
        of_cuda = RINGS[case.cuda].most if case.cuda in RINGS else case.instructions
        triton_side = f"{held} | {kb:.0f} | {f'{count:.0f}' if count else ''}"
        cuda_side = f"{budget(case)} | {f'{of_cuda:.0f}' if of_cuda else ''}"
        lines.append(f"| {case.name} | {triton_side} | {cuda_side} | {measured(case)} | {case.why} |\n")
    return f"Triton {triton.__version__}, sm_{ARCH}a.\n\n{head}{''.join(lines)}"


if __name__ == "__main__":
    print(table(), end="")

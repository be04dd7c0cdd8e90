"""What kernels of long rows execute for an element: a thread is followed through the machine code (sm_90a) of a row that it finds
in the middle of its work, as the next one is on its way. At a copy's rate an SM of the H200 issues some 25 instructions for an element
of 16 bits, of which 4 bytes move. Needs nvcc, no GPU."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from ..cuobjdump import cuobjdump
from .listing import branch_tables, parse
from .sass import Thread

ROOT = Path(__file__).parents[2]
FP16, BF16, FP32 = range(3)
PARAMETERS = 0x210  # where they begin in the first constant bank
COLUMNS = 32_768
THREADS = 512  # that share a row
CLASSES = 50_257  # GPT-2's
LOSS_THREADS = 1024  # that share a row of so many
MEAN, BIAS, RESIDUAL = 1, 2, 4

# type of all tensors, what the call has, instructions an element
NORMS = [
    (FP16, MEAN | BIAS, 20.5),
    (BF16, MEAN | BIAS, 21),
    (FP32, MEAN | BIAS, 19.5),
    (BF16, 0, 17.5),
    (BF16, MEAN | BIAS | RESIDUAL, 31),
]


# type of the logits, whether there is a gradient, the label smoothing, instructions an element
LOSSES = [
    (FP16, True, 0.0, 34),
    (BF16, True, 0.0, 34.5),
    (BF16, False, 0.0, 20.5),
    (BF16, True, 0.1, 46),
]


class Code(NamedTuple):
    """What Thread follows of a kernel."""

    instructions: dict
    table: list[int]


def kernels_of(source: str, folder: Path) -> dict[str, Code]:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH: there is no machine code to follow")
    cubin = folder / "rows.cubin"
    flags = ["-std=c++20", "--fmad=false", "--expt-relaxed-constexpr", "--extended-lambda", "-arch=sm_90a"]
    command = ["nvcc", *flags, "-I", ROOT / "csrc", "-cubin", ROOT / "csrc" / "kernels" / source, "-o", cubin]
    subprocess.run(command, check=True, timeout=600)
    tables = branch_tables(cuobjdump("-elf", cubin))
    return {name: Code(code, tables.get(name, [])) for name, code in parse(cuobjdump("-sass", cubin)).items()}


@pytest.fixture(scope="module")
def norms(tmp_path_factory) -> dict[str, Code]:
    """The kernels whose rows stay in shared memory, by whether they add a residual."""
    found = kernels_of("norm_forward.cu", tmp_path_factory.mktemp("norm"))
    return {re.search(r"Lb([01])E", n)[1]: c for n, c in found.items() if "norm_forward_resident_kernel" in n}


@pytest.fixture(scope="module")
def loss(tmp_path_factory) -> Code:
    """The kernel of the longest rows."""
    found = kernels_of("cross_entropy_rows.cu", tmp_path_factory.mktemp("loss"))
    (name,) = (name for name in found if f"cross_entropy_rows_kernelILi{LOSS_THREADS}E" in name)
    return found[name]


def bank(threads: int, arguments: bytes) -> bytes:
    """The first constant bank: a block of so many threads, a grid of one, and the kernel's arguments."""
    result = bytearray(0x400)
    struct.pack_into("<I", result, 0x0, threads)
    struct.pack_into("<I", result, 0xC, 1)
    result[PARAMETERS : PARAMETERS + len(arguments)] = arguments
    return bytes(result)


def pointers(*given: object) -> list[int]:
    return [(0x7E00 + i << 32) if there else 0 for i, there in enumerate(given)]


def norm(dtype: int, has: int, rows: int) -> bytes:
    """NormForward and the number of teams."""
    bias, residual = has & BIAS, has & RESIDUAL
    # x, residual, weight, bias, sum, y, mean, rstd
    tensors = pointers(1, residual, 1, bias, residual, 1, has & MEAN, 1)
    return bank(THREADS, struct.pack("<8Q5B3xqifQIfi", *tensors, *[dtype] * 5, rows, COLUMNS, 1e-5, 0, 0, 1.0, 1))


def cross_entropy(dtype: int, gradient: bool, smoothing: float, rows: int) -> bytes:
    """CrossEntropyRows of classes, and the PieceShape of rows of 16 bits: whole ones in two slots."""
    tensors = pointers(1, 1, 0, 1, 1, gradient)  # logits, target, weight, factor, loss, grad
    terms = 1 - smoothing, smoothing / CLASSES, 0.0
    strides = CLASSES, 1, 1, CLASSES
    problem = struct.pack("<6Qqi4x4qq3f3Bx", *tensors, rows, CLASSES, *strides, -100, *terms, dtype, 0, 0)
    slot, sums = (CLASSES * 2 + 30) & -16, 2 * (LOSS_THREADS // 32) * 4
    return bank(LOSS_THREADS, problem + struct.pack("<5i", CLASSES, 2, slot, sums + 2 * slot, 1))


def of_a_row(code: Code, constants, thread: int) -> int:
    """What a row adds that is neither the first nor the last; constants: of a number of rows."""
    two, three = (len(Thread(*code, constants(rows), thread).run()) for rows in (2, 3))
    return three - two


@pytest.mark.parametrize(("dtype", "has", "most"), NORMS)
def test_norms_of_long_rows(dtype, has, most, norms):
    code = norms["1" if has & RESIDUAL else "0"]
    assert of_a_row(code, lambda rows: norm(dtype, has, rows), 37) / (COLUMNS / THREADS) <= most


@pytest.mark.parametrize(("dtype", "gradient", "smoothing", "most"), LOSSES)
def test_losses_of_long_rows(dtype, gradient, smoothing, most, loss):
    """Of a row whose target is none of the thread's columns."""
    executed = of_a_row(loss, lambda rows: cross_entropy(dtype, gradient, smoothing, rows), 70)
    assert 0.9 * most < executed / (CLASSES / LOSS_THREADS) <= most

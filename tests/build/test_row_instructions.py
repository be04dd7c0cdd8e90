"""What kernels of long rows execute for an element: a thread is followed through the machine code (sm_90a) of a row that it finds
in the middle of its work, as the next one is on its way. At a copy's rate an SM of the H200 issues some 25 instructions for an element
of 16 bits, of which 4 bytes move. Needs nvcc, no GPU."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from ..cuobjdump import cuobjdump
from .listing import branch_tables, parse
from .sass import Thread

ROOT = Path(__file__).parents[2]
FP16, BF16, FP32 = range(3)
PARAMETERS = 0x210  # where they begin in the first constant bank
COLUMNS = 32_768
THREADS = 512  # that share a row
MEAN, BIAS, RESIDUAL = 1, 2, 4

# type of all tensors, what the call has, instructions an element
NORMS = [
    (FP16, MEAN | BIAS, 20.5),
    (BF16, MEAN | BIAS, 21),
    (FP32, MEAN | BIAS, 19.5),
    (BF16, 0, 17.5),
    (BF16, MEAN | BIAS | RESIDUAL, 31),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, tuple[dict, list[int]]]:
    """Code and branch table of the kernels whose rows stay in shared memory, by whether they add a residual."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH: there is no machine code to follow")
    cubin = tmp_path_factory.mktemp("norm") / "norm_forward.cubin"
    flags = ["-std=c++20", "--fmad=false", "--expt-relaxed-constexpr", "--extended-lambda", "-arch=sm_90a"]
    source = ROOT / "csrc" / "kernels" / "norm_forward.cu"
    subprocess.run(["nvcc", *flags, "-I", ROOT / "csrc", "-cubin", source, "-o", cubin], check=True, timeout=600)
    codes, tables = parse(cuobjdump("-sass", cubin)), branch_tables(cuobjdump("-elf", cubin))
    found = {name: code for name, code in codes.items() if "norm_forward_resident_kernel" in name}
    return {re.search(r"Lb([01])E", name)[1]: (code, tables.get(name, [])) for name, code in found.items()}


def constants(dtype: int, has: int, rows: int) -> bytes:
    """The first constant bank: a block of 512 threads, a grid of one, and NormForward with the number of teams."""
    bank = bytearray(0x400)
    struct.pack_into("<I", bank, 0x0, THREADS)
    struct.pack_into("<I", bank, 0xC, 1)
    given = [
        1,
        has & RESIDUAL,
        1,
        has & BIAS,
        has & RESIDUAL,
        1,
        has & MEAN,
        1,
    ]  # x, residual, weight, bias, sum, y, mean, rstd
    pointers = [(0x7E00 + i << 32) if there else 0 for i, there in enumerate(given)]
    struct.pack_into("<8Q5B3xqifQIfi", bank, PARAMETERS, *pointers, *[dtype] * 5, rows, COLUMNS, 1e-5, 0, 0, 1.0, 1)
    return bytes(bank)


@pytest.mark.parametrize(("dtype", "has", "most"), NORMS)
def test_norms_of_long_rows(dtype, has, most, kernels):
    code, table = kernels["1" if has & RESIDUAL else "0"]
    two, three = (len(Thread(code, table, constants(dtype, has, rows), 37).run()) for rows in (2, 3))
    assert (three - two) / (COLUMNS / THREADS) <= most

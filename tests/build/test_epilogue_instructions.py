"""What the epilogue of the Hopper GEMM executes for an element of C: a thread of a consumer is followed through the machine code of a few
instances, from the last product of its tile to the end, and the budgets hold for all that it does there. Needs nvcc, no GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ..cuobjdump import cuobjdump
from .sass import Instruction, Thread, branch_tables, parse

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
THREAD = 128 + 5  # of the first consumer

RAGGED = 12  # 144 columns
# (number in kGemmTiles, fp32 output) -> sums of a thread: two consumers, two slices of rows, pingpong, rows instead of boxes
TILES = {(0, False): 128, (12, False): 72}
EXHAUSTIVE = {(1, False): 128, (9, False): 128, (3, False): 64, (5, False): 32, (0, True): 128}

PLAIN, BIAS, STAGED, SUMS = 1.6, 6, 18, 8
ROWS = 5  # more where a tile's width does not divide into boxes: the threads store its rounded rows themselves
ARITHMETIC = {"relu": 2, "gelu": 60, "gelu_tanh": 58, "silu": 54}


def budget(epilogue: str) -> float:
    """Instructions for a sum, at most."""
    if epilogue in ("plain", "alpha"):
        return PLAIN + (epilogue == "alpha")
    if epilogue in ("bias", "float_bias"):
        return BIAS
    if epilogue == "unaligned":  # one element at a time
        return 80
    if epilogue == "swiglu":  # two sums make an element
        return (STAGED + 58) / 2 + 4
    if epilogue == "dswiglu":  # two elements
        return STAGED + 70
    name = epilogue.removeprefix("bias_").removesuffix("_sums").removesuffix("_z").removeprefix("d")
    extra = 3 * epilogue.endswith("_z") + SUMS * epilogue.endswith("_sums")
    return STAGED + extra + ARITHMETIC.get(name, 0)


def compile_instance(folder: Path, tile: int, as_float: bool) -> Path:
    source = folder / "instance.cu"
    kernel = "gemm_sm90_kernel<bf16, Major::kK, Major::kK, FLOAT, Staged<TILE, stages<TILE, FLOAT>()>>"
    maps = "AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(Args)"
    source.write_text(
        f'#include "kernels/gemm_sm90.cuh"\nnamespace ak::gemm {{ template __global__ void {kernel}({maps}); }}\n'
    )
    cubin = folder / "instance.cubin"
    defines = [f"-DTILE={tile}", f"-DFLOAT={str(as_float).lower()}"]
    options = ["-std=c++20", "--fmad=false", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]
    subprocess.run(
        ["nvcc", *options, *defines, "-I", ROOT / "csrc", "-cubin", "-o", cubin, source],
        check=True,
        capture_output=True,
        timeout=600,
    )
    return cubin


def arguments(folder: Path, tile: int, as_float: bool) -> dict[str, bytes]:
    """What the launcher passes, by epilogue."""
    program = folder / "arguments"
    emulator = sorted((ROOT / "csrc" / "emulator").glob("*.cpp"))
    defines = ["-DAK_EMULATE", f"-DTILE={tile}", f"-DFLOAT={str(as_float).lower()}"]
    command = ["c++", "-std=c++20", "-O0", "-w", *defines, "-I", ROOT / "csrc", HERE / "epilogue_arguments.cpp"]
    subprocess.run([*command, *emulator, "-o", program, "-pthread"], check=True, timeout=600)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: bytes.fromhex(data) for name, data in (line.split() for line in lines)}


def constants(data: bytes) -> bytes:
    """The first constant bank: blocks and threads of the launch, then, behind three tensor maps, the arguments."""
    bank = bytearray(0x400)
    bank[0x0:0x4] = (384).to_bytes(4, "little")
    bank[0xC:0x10] = (2).to_bytes(4, "little")
    return bytes(bank) + data


def after_the_products(path: list[Instruction]) -> list[Instruction]:
    last = max(i for i, x in enumerate(path) if x.name == "HGMMA")
    return path[last + 1 :]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH: there is no machine code to follow")
@pytest.mark.parametrize(
    ("tile", "as_float", "sums"),
    [(*key, sums) for key, sums in TILES.items()]
    + [pytest.param(*key, sums, marks=pytest.mark.exhaustive) for key, sums in EXHAUSTIVE.items()],
)
def test_instructions_per_element(tile, as_float, sums, tmp_path):
    cubin = compile_instance(tmp_path, tile, as_float)
    ((name, code),) = parse(cuobjdump("-sass", cubin)).items()
    table = branch_tables(cuobjdump("-elf", cubin)).get(name, [])
    over = {}
    for epilogue, data in arguments(tmp_path, tile, as_float).items():
        path = after_the_products(Thread(code, table, constants(data), THREAD).run())
        assert not [x for x in path if x.name in ("STL", "LDL")], f"{epilogue}: registers are spilled"
        allowed = budget(epilogue) + (ROWS if tile == RAGGED else 0)
        if len(path) / sums > allowed:
            over[epilogue] = (round(len(path) / sums, 2), allowed)
    assert not over

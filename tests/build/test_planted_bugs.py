"""The rules about machine code see what they are for: slow code, planted in a copy of the sources. Needs nvcc, no GPU."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools.ptx.cuobjdump import cuobjdump
from tools.sass import listing, main_loop

from . import test_epilogue_instructions as epilogue
from .gemm_instance import compile_instance
from .kernel_budgets import BUDGETS
from .machine_code import CSRC, compile_cubin
from .test_kernel_budgets import crowded, too_little_in_flight

NORM, WALK, GEMM = "gradients/check_and_norm.cu", "base/vector_walk.cuh", "gemm/sm90/main_loop.cuh"
TILE = "gemm/sm90/tile.cuh"

pytestmark = pytest.mark.nvcc


def planted(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of csrc with the first `old` of a file replaced."""
    shutil.copytree(CSRC, folder / "csrc")
    text = (CSRC / file).read_text()
    assert old in text, f"{file} has no {old!r}"
    (folder / "csrc" / file).write_text(text.replace(old, new, 1))
    return folder / "csrc"


def norm_faults(folder: Path, csrc: Path) -> set[str]:
    """The verdicts of the rules on check_and_norm's kernel for sm_90."""
    cubin = folder / "norm.cubin"
    compile_cubin(csrc / NORM, cubin, csrc=csrc)
    budget, found = BUDGETS["check_and_norm_kernel"], set()
    usage = re.findall(r"Function \S*check_and_norm_kernel.*\n\s*REG:(\d+) STACK:(\d+)", cuobjdump("-res-usage", cubin))
    assert usage
    for registers, stack in usage:
        found |= {"spill"} if int(stack) else set()
        found |= {"registers"} if crowded(budget, int(registers)) or int(registers) > budget.registers else set()
    for symbol, _, code in listing.listed(cuobjdump("-sass", cubin)):
        if "check_and_norm_kernel" in symbol and too_little_in_flight(budget, code):
            found.add("in flight")
    return found


@pytest.mark.parametrize(
    ("file", "old", "new", "seen"),
    [
        (NORM, "kNormLoads = 8", "kNormLoads = 4", {"in flight"}),
        pytest.param(WALK, "AK_UNROLL", "AK_NO_UNROLL", {"in flight", "spill"}, marks=pytest.mark.exhaustive),
        pytest.param(NORM, "kNormThreads = 256", "kNormThreads = 512", {"in flight"}, marks=pytest.mark.exhaustive),
        pytest.param(
            NORM,
            "kNormBlocksPerSm = 2;\nconstexpr int kNormLoads = 8",
            "kNormBlocksPerSm = 2;\nconstexpr int kNormLoads = 16",
            {"registers"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_step_kernels(file, old, new, seen, tmp_path):
    assert norm_faults(tmp_path, planted(tmp_path, file, old, new)) == seen


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("file", "old", "new", "seen"),
    [
        (GEMM, "wgmma_fence();", "wgmma_fence();\n    __threadfence();", "MEMBAR"),
        (GEMM, "wgmma_wait<1>();", "wgmma_wait<0>();", "waits"),
        (GEMM, "AK_UNROLL\n    for (int k16 = 0;", "AK_NO_UNROLL\n    for (int k16 = 0;", "products"),
    ],
)
def test_main_loop(file, old, new, seen, tmp_path):
    csrc = planted(tmp_path, file, old, new)
    ((_, code),) = listing.parse(cuobjdump("-sass", compile_instance(tmp_path, 0, csrc=csrc))).items()
    found = main_loop.faults(list(code.values()), columns=256, slices=1)
    assert any(seen in fault for fault in found), found


@pytest.mark.exhaustive
def test_an_epilogue_without_registers_waits(tmp_path):
    """232 registers instead of 240: derivatives are computed with fewer independent chains."""
    csrc = planted(tmp_path, TILE, "kManyRegisters ? 24 : 40;", "40;")
    text = (csrc / TILE).read_text()
    (csrc / TILE).write_text(text.replace("kManyRegisters ? 240 : 232;", "232;"))
    tile = epilogue.number("128x128 pingpong")
    over, _ = epilogue.faults(tile, False, compile_instance(tmp_path, tile, csrc=csrc), tmp_path)
    assert {("dgelu", "cycles"), ("dsilu", "cycles")} <= over.keys()

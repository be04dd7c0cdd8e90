"""The PTX side of csrc/device: ptxas accepts every entry. Needs nvcc, no GPU."""

from pathlib import Path

import pytest

from ..helpers.processes import run

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.nvcc, pytest.mark.slow]


@pytest.mark.parametrize("arch", ["75", "80", "90a", "120"])
def test_ptxas_accepts_every_entry(arch, tmp_path):
    command = ["nvcc", "-std=c++20", "--fmad=false", "--expt-relaxed-constexpr", "-I", ROOT / "csrc", "-cubin"]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}", Path(__file__).parent / "vocabulary.cu"]
    run(*command, "-o", tmp_path / "vocabulary.cubin")

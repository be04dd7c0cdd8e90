"""The machine code of symmetric products on Hopper: the main loop of every instance, and stores of both triangles. Needs nvcc, no GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from amp_kernels.testing.patience import PATIENCE

from ..cuobjdump import cuobjdump
from .listing import parse
from .main_loop import faults

CSRC = Path(__file__).parents[2] / "csrc"
BOXES, BLOCKS = 4, 4  # of 64 x 64 a consumer, of 16 columns a box


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH: there is no machine code to read")
def test_every_instance(tmp_path):
    cubin = tmp_path / "symmetric.cubin"
    options = ["-std=c++20", "--fmad=false", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]
    command = ["nvcc", *options, "-I", CSRC, "-cubin", "-o", cubin, CSRC / "gemm/sm90/symmetric.cu"]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    kernels = parse(cuobjdump("-sass", cubin))
    assert len(kernels) == 4  # two dtypes, two layouts
    for code in kernels.values():
        instructions = list(code.values())
        assert not faults(instructions, 128, 2)
        names = [".".join((instruction.name, *instruction.modifiers)) for instruction in instructions]
        # A box is staged twice, by one store of four 8 x 8 blocks for each 16 columns, and nothing is spilled.
        assert names.count("STSM.16.M88.4") == names.count("STSM.16.MT88.4") == BOXES * BLOCKS
        assert sum(name.startswith("UTMASTG") for name in names) == 2 * BOXES
        assert not any(name.startswith(("STL", "LDL")) for name in names)

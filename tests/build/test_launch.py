"""The host side of a launch, on stand-ins for the CUDA runtime and driver. Needs nvcc for CUDA's headers, no GPU."""

from pathlib import Path

import pytest

from ..helpers.processes import run

HERE = Path(__file__).parent


@pytest.mark.nvcc
def test_arguments_of_a_launch(tmp_path):
    program = tmp_path / "launch"
    options = ["-std=c++20", "-x", "c++", "-cudart", "none", "-Xcompiler", "-w", "-I", HERE.parents[1] / "csrc"]
    options += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("80", "90a", "120")]
    source = HERE / "launch_on_a_fake_runtime.cpp"
    run("nvcc", *options, source, "-o", program)
    run(program)
    for overlap in (0, 1):
        run(program, "no overlap", status=overlap, AMP_KERNELS_PDL=str(overlap))

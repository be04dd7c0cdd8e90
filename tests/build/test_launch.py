"""The host side of a launch, on stand-ins for the CUDA runtime and driver. Needs nvcc for CUDA's headers, no GPU."""

import os
import subprocess
from pathlib import Path

import pytest

from ..helpers.patience import PATIENCE

HERE = Path(__file__).parent


@pytest.mark.nvcc
def test_arguments_of_a_launch(tmp_path):
    program = tmp_path / "launch"
    options = ["-std=c++20", "-x", "c++", "-cudart", "none", "-Xcompiler", "-w", "-I", HERE.parents[1] / "csrc"]
    options += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("80", "90a", "120")]
    source = HERE / "launch_on_a_fake_runtime.cpp"
    subprocess.run(["nvcc", *options, source, "-o", program], check=True, timeout=PATIENCE)
    run = subprocess.run([program], capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stdout + run.stderr
    no_overlap = [program, "no overlap"]
    assert subprocess.run(no_overlap, timeout=PATIENCE, env={**os.environ, "AMP_KERNELS_PDL": "0"}).returncode == 0
    assert subprocess.run(no_overlap, timeout=PATIENCE, env={**os.environ, "AMP_KERNELS_PDL": "1"}).returncode == 1

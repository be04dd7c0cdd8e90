"""One instance of the Hopper GEMM's kernel, compiled."""

from __future__ import annotations

import subprocess
from pathlib import Path

from amp_kernels.testing.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def compile_instance(folder: Path, number: int, as_float: bool = False, csrc: Path = ROOT / "csrc") -> Path:
    source = folder / "instance.cu"
    kernel = "gemm_sm90_kernel<bf16, Major::kK, Major::kK, FLOAT, StagedTile<TILE, stages<TILE, FLOAT>()>>"
    maps = "AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(Args)"
    source.write_text(
        f'#include "gemm/sm90/gemm.cuh"\nnamespace ak::gemm {{ template __global__ void {kernel}({maps}); }}\n'
    )
    cubin = folder / "instance.cubin"
    defines = [f"-DTILE={number}", f"-DFLOAT={str(as_float).lower()}"]
    options = ["-std=c++20", "--fmad=false", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]
    command = ["nvcc", *options, *defines, "-I", csrc, "-cubin", "-o", cubin, source]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    return cubin

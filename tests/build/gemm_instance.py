"""One instance of the Hopper GEMM's kernel, compiled."""

from __future__ import annotations

from pathlib import Path

from .machine_code import CSRC, compile_cubin


def compile_instance(folder: Path, number: int, as_float: bool = False, csrc: Path = CSRC) -> Path:
    source = folder / "instance.cu"
    kernel = "gemm_sm90_kernel<bf16, Major::kK, Major::kK, FLOAT, StagedTile<TILE, stages<TILE, FLOAT>()>>"
    maps = "AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(Args)"
    source.write_text(
        f'#include "gemm/sm90/gemm.cuh"\nnamespace ak::gemm {{ template __global__ void {kernel}({maps}); }}\n'
    )
    cubin = folder / "instance.cubin"
    compile_cubin(source, cubin, f"-DTILE={number}", f"-DFLOAT={str(as_float).lower()}", csrc=csrc)
    return cubin

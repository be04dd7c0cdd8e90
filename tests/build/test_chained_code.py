"""The machine code of sums that start from C: loads before the first wgmma, which takes its accumulators, and plain stores. Needs
nvcc, no GPU."""

from __future__ import annotations

import pytest

from tools.ptx.cuobjdump import cuobjdump
from tools.sass.listing import parse
from tools.sass.main_loop import faults

from .machine_code import compile_cubin

SOURCE = """#include "gemm/sm90/chained.cuh"
namespace ak::gemm {
constexpr int kIndex = gemm_tile_index(64, 128);
template __global__ void gemm_sm90_kernel<bf16, Major::kMN, Major::kMN, true, ChainedTile<StagedTile<kIndex, stages<kIndex, true>()>>>(
    AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(TensorMap), AK_PARAM(Args));
}
"""


@pytest.mark.nvcc
def test_sums_start_from_c(tmp_path):
    source, cubin = tmp_path / "chained.cu", tmp_path / "chained.cubin"
    source.write_text(SOURCE)
    assert "serialized" not in compile_cubin(source, cubin)
    ((_, code),) = parse(cuobjdump("-sass", cubin)).items()
    code = list(code.values())
    assert not faults(code, 128, 1)
    products = [x for x in code if x.name == "HGMMA"]
    assert all(x.operands[2] == x.operands[0] and not any("UP" in o for o in x.operands) for x in products)
    loads = [x for x in code if x.name == "LDG" and x.address < products[0].address]
    assert len(loads) >= 64 / 2, "64 sums of a thread, in pairs"
    assert not [x for x in code if x.name in ("UTMAREDG", "UBLKRED", "RED", "REDG")]

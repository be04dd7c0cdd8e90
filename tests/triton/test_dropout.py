"""The Triton kernel of dropout, compiled for GPUs that are not there: fp32, wide accesses, no spills."""

import pytest
import torch

from amp_kernels._triton import dropout as module

from . import aot


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_compiles(arch):
    x, seed = torch.zeros(4, 1001, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    with aot.compiling_for(arch) as kernels:
        module.dropout(x, seed, x.float() if arch != 90 else None, p=0.1, out_dtype=torch.bfloat16)
    assert not aot.count(r"\.f64", kernels[0])
    assert aot.count(r"ld\.global\.v4\.b32", kernels[0]) >= 1
    assert aot.count(r"st\.global\.v4\.b32", kernels[0]) == 1
    assert aot.usage(kernels[0]).stack == 0
    assert aot.usage(kernels[0]).registers <= 64

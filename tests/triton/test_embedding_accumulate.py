"""The Triton kernels of embedding_accumulate_, compiled for GPUs that are not there: fp32 sums, wide accesses, no spills."""

import pytest
import torch

from amp_kernels._triton import embedding_accumulate as module

from . import aot


@pytest.mark.parametrize(
    ("arch", "dtype", "frequency"),
    [*((arch, torch.bfloat16, False) for arch in (80, 90, 100, 120)), (90, torch.float32, True)],
)
def test_compiles(arch, dtype, frequency):
    out, grad = torch.zeros(4, 768), torch.zeros(100, 768, dtype=dtype)
    index = torch.zeros(100, dtype=torch.int64)
    with aot.compiling_for(arch) as kernels:
        module.embedding_accumulate_(out, grad, index, index, scale_by_frequency=frequency)
    assert len(kernels) == 2
    for kernel in kernels:
        assert not aot.count(r"\.f64", kernel)
        assert aot.count(r"ld\.global\.v4\.b32", kernel) >= 1
        assert aot.count(r"st\.global\.v4\.b32", kernel) >= 1
        used = aot.usage(kernel)
        assert used.stack == 0
        assert used.registers <= 64

"""The Triton kernels of softmax_rows and its backward, compiled for GPUs that are not there: fp32, wide, no spills."""

import pytest
import torch

from amp_kernels._triton import softmax_rows as module

from . import aot


@pytest.mark.parametrize(
    ("arch", "columns", "log"), [*((arch, 1024, False) for arch in (80, 90, 100, 120)), (90, 50304, True)]
)
def test_compiles(arch, columns, log):
    x = torch.zeros(4, columns, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, columns, dtype=torch.bool).expand(1, 2, 2, columns)
    with aot.compiling_for(arch) as kernels:
        module.softmax_rows(x, mask, log=log, out_dtype=x.dtype)
        module.softmax_rows_backward(x, x, torch.zeros(2, 4) if log else None, mask, out_dtype=x.dtype)
    assert len(kernels) == 2
    for kernel in kernels:
        assert not aot.count(r"\.f64", kernel)
        assert aot.count(r"ld\.global\.v4\.b32", kernel) >= 1
        assert aot.count(r"st\.global\.v4\.b32", kernel) >= 1
        used = aot.usage(kernel)
        assert used.stack == 0
        assert used.registers <= 128

"""The Triton kernels of unit_matrices, compiled for GPUs that are not there: no spills."""

import pytest
import torch

from amp_kernels._triton.unit_matrices import unit_matrices

from . import aot


@pytest.mark.parametrize("arch", [80, 90])
def test_unit_matrices_compile(arch):
    with aot.compiling_for(arch) as kernels:
        unit_matrices(torch.zeros(2, 16, 64), eps=1e-7, dtype=torch.float16)
    assert len(kernels) == 3
    assert all(aot.usage(kernel).stack == 0 for kernel in kernels)

"""The Triton kernels of syrk and unit_matrices, compiled for GPUs that are not there: Tensor Cores, no spills."""

import pytest
import torch

from amp_kernels._triton import syrk as module
from amp_kernels._triton.unit_matrices import unit_matrices

from . import aot

PRODUCT = {80: r"mma\.sync", 90: r"wgmma", 100: r"tcgen05\.mma", 120: r"mma\.sync"}


@pytest.mark.parametrize("arch", PRODUCT)
def test_syrk_compiles(arch):
    a, c = torch.zeros(2, 256, 128, dtype=torch.bfloat16), torch.zeros(2, 256, 256, dtype=torch.bfloat16)
    with aot.compiling_for(arch) as kernels:
        module.syrk(a, a, c, alpha=0.5, beta=2.0)
    (kernel,) = kernels
    assert aot.count(PRODUCT[arch], kernel)
    assert aot.usage(kernel).stack == 0
    assert kernel.metadata.shared <= aot.SHARED_LIMIT[arch]


@pytest.mark.parametrize("arch", [80, 90])
def test_unit_matrices_compile(arch):
    with aot.compiling_for(arch) as kernels:
        unit_matrices(torch.zeros(2, 16, 64), eps=1e-7, dtype=torch.float16)
    assert len(kernels) == 3
    assert all(aot.usage(kernel).stack == 0 for kernel in kernels)

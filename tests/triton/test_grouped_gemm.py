"""The Triton kernel of grouped products, compiled for GPUs that are not there: Tensor Cores, no spills, wide loads."""

import pytest
import torch

from amp_kernels._triton import grouped_gemm as module

from . import aot

PRODUCT = {80: r"mma\.sync", 90: r"wgmma", 100: r"tcgen05\.mma", 120: r"mma\.sync"}


def rows(**options):
    a, b = torch.zeros(4096, 1024, dtype=torch.bfloat16), torch.zeros(8, 2048, 1024, dtype=torch.bfloat16).mT
    module.grouped_gemm(a, b, torch.zeros(8, dtype=torch.int32), torch.zeros(8, 2048), **options)


def accumulated():
    a, b = torch.zeros(4096, 1024, dtype=torch.bfloat16).t(), torch.zeros(4096, 2048, dtype=torch.bfloat16)
    module.grouped_gemm_accumulate_(torch.zeros(8, 1024, 2048), a, b, torch.zeros(8, dtype=torch.int32))


CALLS = {"rows": rows, "swiglu": lambda: rows(activation="swiglu", preact=True), "sums": accumulated}


@pytest.mark.parametrize("arch", PRODUCT)
@pytest.mark.parametrize("name", CALLS)
def test_compiles(arch, name):
    with aot.compiling_for(arch) as kernels:
        CALLS[name]()
    (kernel,) = kernels
    assert aot.count(PRODUCT[arch], kernel)
    assert aot.usage(kernel).stack == 0
    assert kernel.metadata.shared <= aot.SHARED_LIMIT[arch]

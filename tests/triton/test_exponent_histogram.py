"""exponent_histogram's Triton kernel, compiled for GPUs that are not there: it compiles, loads wide, and fits."""

import pytest
import torch

from amp_kernels._triton import exponent_histogram as module

from . import aot


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_compiles_with_wide_loads(arch):
    with aot.compiling_for(arch) as kernels:
        module.exponent_histogram([torch.zeros(1, dtype=torch.bfloat16)] * 161)
    (kernel,) = kernels
    assert aot.count(r"ld\.global\.v4\.b32", kernel) == 4  # fp16 and bf16 one, fp32 two
    assert aot.count(r"ld\.global\.v2\.b64", kernel) == 4
    used = aot.usage(kernel)
    assert used.registers * 128 * module.PROGRAMS_PER_SM <= 65_536  # of an SM: all programs run at once
    assert used.stack == 0

"""cast_ in Triton, compiled for GPUs that are not there: wide accesses, registers, conversions in hardware."""

import pytest
import torch

from amp_kernels._triton import cast

from . import aot

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ARCHS = [80, 90, 100, 120]
WIDE_LOAD, WIDE_STORE = r"ld\.global\.cg\.v4\.b32", r"st\.global\.cs\.v4\.b32"


def compile_cast(arch, to, of, **options):
    with aot.compiling_for(arch) as kernels:
        cast.cast_([torch.zeros(8, dtype=to)] * 100, [torch.zeros(8, dtype=of)] * 100, **options)
    (kernel,) = kernels  # one launch for a list of one pair of dtypes
    return kernel


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("to", "of", "seed"), [(BF16, F32, None), (F32, F16, None), (F16, F32, 3)], ids=str)
def test_cast(arch, to, of, seed):
    kernel = compile_cast(arch, to, of, seed=seed)
    # A program of 128 threads takes 2,048 elements at a time: 16 a thread.
    assert aot.count(WIDE_LOAD, kernel) >= of.itemsize
    assert aot.count(WIDE_STORE, kernel) >= to.itemsize
    assert aot.count(r"\.f64", kernel) == 0
    assert aot.count(r"\.ftz", kernel) == 0
    used = aot.usage(kernel)
    assert used.stack == 0, used
    assert used.registers * 128 * cast.PROGRAMS_PER_SM <= 65_536, used

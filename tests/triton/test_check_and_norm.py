"""check_and_norm's Triton kernels, compiled for GPUs that are not there: they compile, load wide, and fit."""

import pytest
import torch

from amp_kernels._triton import _tables
from amp_kernels._triton import check_and_norm as module

from . import aot


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize(("tensors", "scaled"), [(1, False), (161, True), (_tables.TENSORS_PER_TABLE, True)])
def test_compiles_with_wide_loads(arch, tensors, scaled, per_tensor):
    grads = [torch.zeros(1, dtype=torch.bfloat16)] * tensors
    with aot.compiling_for(arch) as kernels:
        module.check_and_norm(grads, torch.ones(()) if scaled else None, per_tensor=per_tensor)
    main, finish = kernels
    # fp16 and bf16 take one 16-byte load for a thread's eight elements, fp32 two, fp64 four. A lost alignment hint or a
    # masked main loop makes all of them scalar.
    assert aot.count(r"ld\.global\.v4\.b32", main) == 4
    assert aot.count(r"ld\.global\.v2\.b64", main) == 4
    for kernel in (main, finish):
        used = aot.usage(kernel)
        assert used.stack <= 16, "two saved registers outside of the loops are tolerated, spills within them are more"
        assert used.registers * 128 * module.PROGRAMS_PER_SM <= 65_536  # of an SM: all programs run at once
        assert used.shared <= 4096

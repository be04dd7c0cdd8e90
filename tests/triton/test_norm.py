"""The Triton kernels of the norms, compiled for GPUs that are not there: wide accesses, no spills, no float64."""

import pytest
import torch

from amp_kernels._triton import norm_backward, norm_forward

from . import aot


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize(("columns", "whole"), [(768, True), (4096, True), (8192, True), (131_072, False)])
def test_compiles(arch, columns, whole):
    x = torch.zeros(2, columns, dtype=torch.bfloat16)
    residual = torch.zeros(2, columns)
    weight = torch.ones(columns)
    statistic = torch.zeros(2)
    with aot.compiling_for(arch) as kernels:
        norm_forward.norm_forward(x, weight, weight, residual, eps=0.1, centred=True, out_dtype=torch.bfloat16)
        norm_backward._run(x, residual, statistic, statistic, weight, residual, parameters=2, strips=1)
    assert len(kernels) == 2
    for kernel in kernels:
        assert aot.count(r"\.f64", kernel) == 0, "a scalar argument became float64"
        assert aot.count(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", kernel) > 0, "accesses are narrow"
        assert aot.count(r"atom|red\.global", kernel) == 0
        assert aot.usage(kernel).stack == 0, "registers are spilled"

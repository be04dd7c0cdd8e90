"""The Triton kernels of the norms, compiled for GPUs that are not there: wide accesses, no spills, no float64."""

import pytest
import torch

from amp_kernels._triton import norm_backward, norm_forward

from . import aot


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize(
    ("columns", "p"), [(768, 0.0), (4096, 0.0), (4096, 0.1), (8192, 0.0), (8192, 0.1), (131_072, 0.0)]
)
def test_compiles(arch, columns, p):
    x = torch.zeros(2, columns, dtype=torch.bfloat16)
    residual = torch.zeros(2, columns)
    weight = torch.ones(columns)
    statistic = torch.zeros(2)
    seed = torch.tensor([1]) if p > 0 else None
    with aot.compiling_for(arch) as kernels:
        norm_forward.norm_forward(
            x, weight, weight, residual, seed, eps=0.1, centred=True, out_dtype=torch.bfloat16, dropout_p=p
        )
        options = {"parameters": 2, "dropout_p": p, "branch_dtype": torch.bfloat16 if p > 0 else None, "strips": 1}
        norm_backward._run(x, residual, statistic, statistic, weight, residual, seed, **options)
    assert len(kernels) == 2
    for kernel in kernels:
        assert aot.count(r"\.f64", kernel) == 0, "a scalar argument became float64"  # Liger-Kernel#1358
        assert aot.count(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", kernel) > 0, "accesses are narrow"
        assert aot.count(r"atom|red\.global", kernel) == 0
        assert aot.usage(kernel).stack == 0, "registers are spilled"

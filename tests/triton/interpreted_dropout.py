"""The Triton kernel of dropout in the interpreter, bit for bit against the CPU kernel; run by test_interpreted.py."""

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._triton import dropout as module
from amp_kernels.testing.backends import check_backend

OP = REGISTRY["dropout"]


def test_samples_of_the_op():
    assert check_backend(OP, "triton", "cpu") > 0


@pytest.mark.parametrize("count", [1, 7, 2047, 2048, 4100])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_bits_of_the_cpu_kernel(count, p):
    generator = torch.Generator().manual_seed(count)
    x, residual = (torch.randn(count + 1, generator=generator)[1:] for _ in range(2))
    seed = torch.tensor([0x7EDCBA9876543210])
    for added in (None, residual.half()):
        for out_dtype in (torch.float32, torch.bfloat16):
            arguments = {"p": p, "out_dtype": out_dtype}
            got = module.dropout(x.bfloat16(), seed, added, **arguments)
            want = OP.overload(x.bfloat16(), seed, added, **arguments)
            assert torch.equal(got, want)

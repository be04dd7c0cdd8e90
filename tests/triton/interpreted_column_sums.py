"""The Triton kernels of column_sums in the interpreter; run by test_interpreted.py."""

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._triton import column_sums as module
from amp_kernels.cli.check import check_backend

from ..helpers.bounds import assert_within

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_samples_of_the_op():
    assert check_backend(REGISTRY["column_sums"], "triton", "cpu") > 0


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("programs", [2, 1024])
def test_shares_and_strips(dtype, programs, monkeypatch):
    """Around the rows of a program and of all, and the columns of one; rows with a gap, whose values are NaN."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((0, 5), (1, 128), (31, 129), (33, 7), (200, 260)):
        x = torch.full((rows, columns + 3), torch.nan, dtype=dtype)[:, :columns]
        x.copy_(torch.randn(rows, columns, generator=generator))
        exact = x.double()
        bound = rows * 2.0**-24 * exact.abs().sum(0)
        assert_within(module.column_sums(x), exact.sum(0), bound, f"{rows} x {columns}")


def test_rows_far_apart():
    far = 2**31 + 8
    x = torch.empty(far + 40, dtype=BF16).as_strided((2, 40), (far, 1))
    x[0], x[1] = 1, 2
    assert module.column_sums(x).tolist() == [3.0] * 40

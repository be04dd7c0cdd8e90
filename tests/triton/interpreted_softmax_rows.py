"""The Triton kernels of softmax_rows and its backward in the interpreter; run by test_interpreted.py."""

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._triton import softmax_rows as module
from amp_kernels.testing.backends import check_backend

FORWARD, BACKWARD = REGISTRY["softmax_rows"], REGISTRY["softmax_rows_backward"]


@pytest.mark.parametrize("op", [FORWARD, BACKWARD], ids=lambda op: op.name)
def test_samples_of_the_op(op):
    assert check_backend(op, "triton", "cpu") > 0


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("safe", [False, True])
def test_rows_in_pieces_and_odd_rows(log, safe, monkeypatch):
    monkeypatch.setattr(module, "LIMIT", 64)
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(7, 201, generator=generator)
    x[0, :70] = -torch.inf
    x[1] = -torch.inf
    x[2, 3] = torch.nan
    x[3, 200] = torch.inf
    x[4, :] = -torch.inf
    x[4, 77] = torch.nan
    x[5] = -200.0
    mask = torch.rand(1, 1, 7, 201, generator=generator) < 0.8
    mask[..., 5, 3:] = False  # most lanes see nothing, and the base is far below 0
    mask[..., 6, :] = False  # of NaN the gradient is 0
    grad = torch.randn(7, 201, generator=generator)
    for m in (None, mask):
        options = {"log": log, "safe": safe, "out_dtype": torch.float32}
        want, statistics = FORWARD.reference(x, m, **options)
        got, found = module.softmax_rows(x, m, **options)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
        if log:  # what a row of NaN is relative to means nothing
            numbers = ~statistics[1].isnan()
            assert torch.equal(found[1].isnan(), ~numbers)
            torch.testing.assert_close(found[:, numbers], statistics[:, numbers], rtol=1e-5, atol=0)
        call = (grad, x, statistics, m) if log else (grad, want, None, m)
        torch.testing.assert_close(
            module.softmax_rows_backward(*call, out_dtype=torch.float32),
            BACKWARD.reference(*call, out_dtype=torch.float32),
            rtol=1e-5,
            atol=1e-5,
            equal_nan=True,
        )

"""The Triton kernels of the norms in the interpreter against float64; run by test_interpreted.py."""

import pytest
import torch

from amp_kernels._raw._norm import statistics
from amp_kernels._triton import norm_backward, norm_forward

from ..helpers.bounds import assert_within, norm_backward_bound, norm_forward_bound
from ..helpers.generators import normal

#: One program holds the row, all of it or not; a row in pieces, the last one whole or not.
COLUMNS = [1, 31, 32, 100, 1024, 3000]


@pytest.fixture(params=["whole rows", "pieces"])
def pieces(request, monkeypatch):
    """Both ways through the kernels, at sizes that the interpreter can walk."""
    if request.param == "pieces":
        monkeypatch.setattr(norm_forward, "LIMIT", 512)
        monkeypatch.setattr(norm_backward, "LIMIT", 512)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("centred", [False, True])
def test_forward(pieces, columns, centred):
    generator = torch.Generator().manual_seed(columns)
    x, residual = (torch.randn(3, columns, generator=generator) + 8 for _ in range(2))
    weight, bias = (torch.randn(columns, generator=generator) for _ in range(2))
    x[1] *= 1e30  # its squares overflow
    options = {"eps": 1e-5, "centred": centred, "out_dtype": torch.float32}
    y, total, mean, rstd = norm_forward.norm_forward(x, weight, bias, residual.bfloat16(), **options)
    assert torch.equal(total, (x + residual.bfloat16()).bfloat16())
    assert_within(y, *norm_forward_bound(total, weight, bias, **options))
    expected = statistics(total.float(), 1e-5, centred)
    torch.testing.assert_close((mean, rstd), (expected[0] if centred else mean, expected[1]), rtol=1e-5, atol=1e-5)
    y = norm_forward.norm_forward(x, **options)[0]
    assert_within(y, *norm_forward_bound(x, None, None, **options))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("centred", [False, True])
def test_backward(pieces, columns, centred, monkeypatch):
    monkeypatch.setattr(norm_backward, "programs", lambda device, per_sm: 3)  # strips of 3, 3 and 1 rows
    generator = torch.Generator().manual_seed(columns)
    x, grad, grad_sum = (torch.randn(7, columns, generator=generator) for _ in range(3))
    weight = torch.randn(columns, generator=generator)
    mean, rstd = statistics(x, 1e-5, centred)
    mean = mean if centred else None
    for args in ((grad, x.half(), rstd, mean, weight, grad_sum), (grad.bfloat16(), x, rstd, mean, None, None)):
        dx, dx_bound, sums, sums_bound = norm_backward_bound(*args)
        for parameters in (0, 1, 2):
            got, got_sums, _ = norm_backward.norm_backward(*args, parameters=parameters)
            assert got.dtype == args[1].dtype
            assert_within(got, dx, dx_bound, "grad_x")
            assert_within(got_sums, sums[:parameters], sums_bound[:parameters], "sums")


def test_the_error_of_a_sum_does_not_grow_with_the_row(monkeypatch):
    """A lane adds 512 squares, which in one chain are off by 5e-6."""
    for module in (norm_forward, norm_backward):
        monkeypatch.setattr(module, "LIMIT", 512)
    x = torch.full((1, 2**18), 1.2).sqrt()
    y, _, _, rstd = norm_forward.norm_forward(x, eps=0.0, centred=False, out_dtype=torch.float32)
    assert (y - 1).abs().max() < 4e-7
    dx, _, _ = norm_backward.norm_backward(torch.ones_like(x), x, rstd, parameters=0)
    assert dx.abs().max() < 4e-7  # g - n mean(g n)


def test_rows_of_fp32_of_more_than_128k():
    """QuACK's backward refuses it."""
    columns = 2**17 + 3
    x, grad = normal(2, 2, columns)
    options = {"eps": 1e-5, "centred": True, "out_dtype": torch.float32}
    y, _, mean, rstd = norm_forward.norm_forward(x, **options)
    assert_within(y, *norm_forward_bound(x, None, None, **options))
    dx, dx_bound, sums, sums_bound = norm_backward_bound(grad, x, rstd, mean, None, None)
    got, got_sums, _ = norm_backward.norm_backward(grad, x, rstd, mean, parameters=2)
    assert_within(got, dx, dx_bound, "grad_x")
    assert_within(got_sums, sums, sums_bound, "sums")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_branch_gets_the_gradient_as_rounded(pieces, dtype):
    generator = torch.Generator().manual_seed(1030)
    x, grad, grad_sum = (torch.randn(3, 1030, generator=generator) for _ in range(3))
    mean, rstd = statistics(x, 1e-5, True)
    args = grad, x.bfloat16(), rstd, mean, None, grad_sum
    of_x, _, of_branch = norm_backward.norm_backward(*args, branch_dtype=dtype)
    assert torch.equal(of_x, norm_backward.norm_backward(*args)[0])
    assert torch.equal(of_branch, of_x.to(dtype))

"""softmax and log_softmax against float64, their masks, and what rows hold that is no number."""

import copy
import math

import pytest
import torch

import amp_kernels as ak
from amp_kernels._raw.softmax_rows import backward_op, forward_op
from amp_kernels.testing.bounds import TINY, UNIT_ROUNDOFF, assert_within
from amp_kernels.testing.generators import normal
from amp_kernels.testing.poison import poisoned_allocations

from .targets import device_for

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
device = device_for(forward_op)
BOTH = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
INF, NAN = math.inf, math.nan


def ours(log):
    return ak.log_softmax if log else ak.softmax


def theirs(log):
    return torch.log_softmax if log else torch.softmax


def check(x, dim, log, mask=None, out_dtype=None, **options):
    """Result and gradient against float64 of the same inputs, within the roundings of fp32 and of what is stored."""
    out_dtype = out_dtype or x.dtype
    fresh = x.detach().requires_grad_()  # of the same memory
    with poisoned_allocations():
        y = ours(log)(fresh, dim, mask=mask, **options)
        grad = normal(*y.shape, dtype=y.dtype, device=x.device, seed=1)
        y.backward(grad)
    assert (y.dtype, fresh.grad.dtype) == (out_dtype, x.dtype)
    assert y.is_contiguous()
    assert y.shape == x.shape

    wide = x.detach().double()
    wide = wide if mask is None else wide.masked_fill(~mask, -INF)
    want = theirs(log)(wide, dim)
    moved = (wide - wide.amax(dim, keepdim=True)).abs().nan_to_num(posinf=0.0)
    u, count = UNIT_ROUNDOFF[torch.float32], x.shape[dim]
    # The exponential's argument is rounded to u |x - m|, its value to 4 u; the sum adds some 64 partial sums of a share.
    relative = (2 * moved + count / 64 + 64) * 2 * u
    bound = (relative + moved * u) if log else relative * want
    assert_within(
        y.detach(), want, bound + UNIT_ROUNDOFF[out_dtype] * want.abs().nan_to_num(posinf=0) * 1.01 + TINY[out_dtype]
    )

    g = grad.double()
    if log:
        p = want.exp()
        expected = g - p * g.sum(dim, keepdim=True)
        expected = expected if mask is None else torch.where(mask, expected, 0.0)
        slack = p * g.abs().sum(dim, keepdim=True) * (relative + count / 64 * u)
    else:
        p = y.detach().double()  # what is saved is what was stored
        expected = p * (g - (g * p).sum(dim, keepdim=True))
        slack = p * (g.abs() + (g * p).abs().sum(dim, keepdim=True)) * (count / 64 + 64) * u
    slack = slack + 4 * u * g.abs()
    assert_within(fresh.grad, expected, slack + UNIT_ROUNDOFF[x.dtype] * expected.abs() * 1.01 + TINY[x.dtype])


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1), (5, 7), (2, 64), (2, 3, 513), (1, 8200)])
def test_within_the_bound(device, shape, dtype, log):
    check(4 * normal(*shape, dtype=dtype, device=device), -1, log)


@BOTH
@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_any_dimension(log, dim):
    check(normal(4, 5, 6, dtype=torch.bfloat16), dim, log)
    check(normal(6, 5, 4).permute(2, 1, 0), dim, log)
    mask = torch.rand(5, 1, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[0] = True
    check(normal(4, 5, 6), dim, log, mask=mask if dim in (1, -2) else torch.ones(6, dtype=torch.bool))


@BOTH
@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 24), (1, 3, 4, 24), (24,), (4, 1), (2, 3, 4, 24), (1, 1, 4, 24), (2, 3, 1, 1)]
)
def test_masks_broadcast(device, shape, log):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[..., 0] = True
    check(normal(2, 3, 4, 24, device=device), -1, log, mask=mask.to(device))
    if len(shape) == 4:
        five = normal(2, 2, 3, 4, 24, dtype=torch.bfloat16, device=device)
        check(five, -1, log, mask=mask.to(device).expand(2, 3, 4, 24))


@BOTH
@pytest.mark.parametrize("safe", [False, True])
def test_rows_that_are_no_numbers(device, log, safe):
    rows = [[-INF] * 4, [-INF, 0, -INF, -INF], [NAN, -INF, -INF, -INF], [NAN, 1, 2, 3], [INF, 1, 2, 3], [-INF, 1, 2, 3]]
    x = torch.tensor(rows, device=device)
    y, want = ours(log)(x, -1, safe=safe), theirs(log)(x, -1)
    if safe:
        want[0] = -INF if log else 0
    torch.testing.assert_close(y, want, equal_nan=True, rtol=1e-6, atol=1e-7)
    mask = torch.zeros(6, 4, dtype=torch.bool, device=device)
    mask[3:, 1:] = True
    y = ours(log)(x, -1, mask=mask, safe=safe)
    assert (y[:3] == (-INF if log else 0)).all() if safe else y[:3].isnan().all()
    assert not y[3:].isnan().any()  # the NaN of row 3 is left out


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 264, 1041, 8200])
def test_masked_elements_have_no_gradient(device, columns, dtype, log):
    """Not even NaN, of rows of which nothing is kept: they are padding, as a rule, of which nobody reads the result."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(4, columns, generator=generator) < 0.5
    mask[1], mask[:, 0] = False, torch.tensor([True, False, True, True])
    x, grad, mask = normal(4, columns, dtype=dtype).to(device), normal(4, columns, seed=1).to(device), mask.to(device)
    for of_padding in (1.0, 0.0):
        grad[1] *= of_padding
        for mask_dims in (mask, mask[:, :1]):
            ours_x, wide = x.clone().requires_grad_(), x.double().requires_grad_()
            ours(log)(ours_x, -1, mask=mask_dims).backward(grad.to(dtype))
            theirs(log)(wide.masked_fill(~mask_dims, -INF), -1).backward(grad.to(dtype).double())
            assert (ours_x.grad[~mask_dims.expand(mask.shape)] == 0).all()
            torch.testing.assert_close(
                ours_x.grad.double(), wide.grad, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-4
            )
    again = torch.autograd.grad(ours(log)(ours_x, -1, mask=mask), ours_x, grad.to(dtype), create_graph=True)[0]
    assert (again[1] == 0).all()


def test_a_fully_masked_row_has_no_gradient_when_safe(device):
    x = normal(3, 8, device=device).requires_grad_()
    mask = torch.tensor([True, False, True], device=device)[:, None]
    for log in (False, True):
        (grad,) = torch.autograd.grad(ours(log)(x, -1, mask=mask, safe=True)[::2].sum() * 3 + x.sum(), x)
        assert torch.equal(grad[1], torch.ones(8, device=device))
        assert not grad.isnan().any()


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [0, 1, 2])
def test_rows_of_several_tiles(tile, dtype, log):
    """The CPU's kernel takes 1,024 columns at a time. The largest logits, without which the others' exponentials
    overflow, are in one tile; the masks of the tiles differ."""
    x = normal(3, 2500, dtype=dtype)
    x[:, 1024 * tile : 1024 * tile + 300] += 200
    mask = torch.rand(3, 2500, generator=torch.Generator().manual_seed(2)) < 0.7
    for masked in (None, mask):
        with ak.backend("cpu"):
            check(x, -1, log, masked)


@BOTH
def test_shift_invariance_and_extremes(device, log):
    x = torch.tensor([[0.0, 1.0, 2.0]], device=device)
    assert torch.equal(ours(log)(x + 2.0**20, -1), ours(log)(x, -1))
    big = torch.tensor([[65504.0, -65504.0, 65504.0]], dtype=torch.float16, device=device)
    check(big, -1, log)
    check(torch.full((2, 1000), -3.0, dtype=torch.bfloat16, device=device), -1, log)


def test_gradient_of_log_softmax_in_16_bits_is_not_that_of_a_rounded_result():
    """exp(y) of a bf16 y near -11 is off by 3 %; p from the input by a rounding."""
    x = torch.zeros(1, 50257, dtype=torch.bfloat16, requires_grad=True)
    y = ak.log_softmax(x, -1)
    grad = torch.zeros_like(y)
    grad[0, 5] = 1.0
    y.backward(grad)
    assert x.grad[0, 7].item() == pytest.approx(-1 / 50257, rel=2.0**-8)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(log, dtype):
    with torch.autocast("cpu", dtype=dtype):
        for source in DTYPES:
            check(normal(4, 30, dtype=source), -1, log, out_dtype=dtype)
        check(normal(4, 30), -1, log, out_dtype=torch.float32, dtype=torch.float32)
        assert ours(log)(normal(4, 3).double(), -1).dtype == torch.float64


@BOTH
def test_dtype_argument(log):
    check(normal(4, 30, dtype=torch.bfloat16), -1, log, out_dtype=torch.float32, dtype=torch.float32)
    x = normal(4, 3, dtype=torch.bfloat16)
    assert torch.equal(ours(log)(x, -1, dtype=torch.float64), theirs(log)(x, -1, dtype=torch.float64))
    assert torch.equal(ours(log)(torch.arange(3), 0, dtype=torch.float32), theirs(log)(torch.arange(3.0), 0))


@BOTH
def test_second_derivatives_and_transforms(log):
    x = normal(2, 5).double().requires_grad_()
    mask = torch.tensor([True, True, False, True, True])
    assert torch.autograd.gradcheck(lambda x: ours(log)(x, -1), x)
    narrow, wide = x.detach().float().requires_grad_(), x.detach().clone().requires_grad_()
    results = []
    for t in (narrow, wide):
        y = ours(log)(t, -1, mask=mask)
        (first,) = torch.autograd.grad((torch.where(mask, y, 0.0) ** 3).sum(), t, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), t)
        results.append(second.double())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    batched = torch.vmap(lambda row: ours(log)(row, 0))(narrow)
    torch.testing.assert_close(batched, theirs(log)(narrow, -1))
    primal, tangent = torch.func.jvp(lambda t: ours(log)(t, -1), (narrow.detach(),), (torch.ones(2, 5),))
    torch.testing.assert_close(tangent, torch.zeros(2, 5), rtol=0, atol=1e-5)
    assert primal.shape == (2, 5)


def test_empty_and_scalar_tensors():
    assert ak.softmax(torch.ones(0, 3), -1).shape == (0, 3)
    assert ak.softmax(torch.ones(3, 0), 0).shape == (3, 0)
    assert ak.softmax(torch.tensor(2.0), 0).item() == 1.0
    assert ak.log_softmax(torch.tensor(2.0), -1).item() == 0.0


@BOTH
def test_modules_and_functions_are_torchs(log):
    ours_, theirs_ = (ak.nn.LogSoftmax, torch.nn.LogSoftmax) if log else (ak.nn.Softmax, torch.nn.Softmax)
    x = normal(3, 4, 5)
    for dim in (-1, 1):
        torch.testing.assert_close(ours_(dim)(x), theirs_(dim)(x))
        function = ak.nn.functional.log_softmax if log else ak.nn.functional.softmax
        torch.testing.assert_close(function(x, dim=dim), theirs_(dim)(x))
    assert repr(copy.deepcopy(ours_(1))) == repr(theirs_(1))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: ak.softmax(x, 2), IndexError, "softmax: dim is 2; accepted: -2 to 1"),
        (lambda x: ak.softmax(x, -1, mask=torch.ones(3)), TypeError, "softmax: mask has dtype float32"),
        (
            lambda x: ak.softmax(x, -1, mask=torch.ones(2, dtype=torch.bool)),
            ValueError,
            r"softmax: mask has shape \[2\]",
        ),
        (lambda x: ak.log_softmax(x, -1, mask=torch.ones(1, 2, 3) > 0), ValueError, r"log_softmax: mask has shape"),
        (lambda x: ak.softmax(x.to_sparse(), -1, safe=True), TypeError, "softmax: input is torch.sparse_coo"),
    ],
)
def test_bad_calls(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(2, 3))


def test_the_raw_ops_guard_memory():
    x, mask = torch.ones(4, 3), torch.ones(1, 1, 4, 3, dtype=torch.bool)
    for namespace in ("overload", "emulated"):
        forward, backward = (getattr(op, namespace) for op in (forward_op, backward_op))
        for bad in (mask[:, :, :3], mask.transpose(2, 3), mask.to(torch.uint8), mask[0]):
            with pytest.raises(RuntimeError, match="softmax_rows: mask must"):
                forward(x, bad, out_dtype=torch.float32)
        with pytest.raises(RuntimeError, match="softmax_rows: x must be contiguous"):
            forward(x.t(), out_dtype=torch.float32)
        with pytest.raises(RuntimeError, match="softmax_rows_backward: of must have the shape of grad"):
            backward(x, x[:2], out_dtype=torch.float32)
        with pytest.raises(RuntimeError, match="softmax_rows_backward: statistics must be contiguous with shape"):
            backward(x, x, torch.ones(2, 3), out_dtype=torch.float32)

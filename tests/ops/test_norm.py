"""layer_norm and rms_norm against torch: what is returned in which dtype, gradients, autocast, and bugs that other
libraries' norms had."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak
from amp_kernels._raw._norm import statistics
from amp_kernels._raw.norm_backward import op as norm_backward
from amp_kernels._raw.norm_forward import op as norm_forward

from ..helpers.bounds import assert_within, norm_backward_bound, norm_forward_bound
from ..helpers.generators import normal
from ..helpers.ops import Ops
from ..helpers.poison import poisoned_allocations

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CENTRED = {"layer_norm": True, "rms_norm": False}


@pytest.fixture(params=["cpu", "reference", "emulate"])
def backend(request):
    with ak.backend(request.param):
        yield request.param


@pytest.fixture(params=CENTRED)
def kind(request):
    return request.param


def call(kind, x, shape, weight=None, bias=None, **kwargs):
    if kind == "layer_norm":
        return ak.layer_norm(x, shape, weight, bias, **kwargs)
    return ak.rms_norm(x, shape, weight, **kwargs)


def stock(kind, x, shape, weight=None, bias=None, eps=1e-5):
    return F.layer_norm(x, shape, weight, bias, eps) if kind == "layer_norm" else F.rms_norm(x, shape, weight, eps)


# ---- the raw ops against float64


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 63, 64, 65, 768, 1001, 4200])
def test_forward_within_bounds(backend, kind, columns):
    """Elements beyond a row, and threads that a short row leaves idle, do not enter its variance (QuACK, twice)."""
    centred = CENTRED[kind]
    for i, dtype in enumerate(DTYPES):
        x = (3 * normal(5, columns, seed=i) + 2).to(dtype)
        weight, bias = normal(columns, dtype=DTYPES[i - 1], seed=8), normal(columns, dtype=DTYPES[i - 2], seed=9)
        for w, b, out_dtype in ((weight, bias, dtype), (weight, None, DTYPES[i - 1]), (None, bias, torch.float32)):
            options = {"eps": 1e-3, "centred": centred, "out_dtype": out_dtype}
            y, total, mean, rstd = norm_forward(x, w, b, **options)
            assert (y.dtype, total.numel(), mean.numel()) == (out_dtype, 0, 5 if centred else 0)
            assert_within(y, *norm_forward_bound(x, w, b, **options))
            wide = x.double()
            centre = wide.mean(1) if centred else 0 * wide[:, 0]
            expected = ((wide - centre[:, None]).square().mean(1) + 1e-3).rsqrt()
            torch.testing.assert_close(rstd.double(), expected, rtol=1e-5, atol=0)
            if centred:
                torch.testing.assert_close(mean.double(), centre, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [40, 2100])
def test_the_sum_is_rounded_to_the_residuals_dtype_and_normalised(backend, kind, columns):
    for x_dtype, sum_dtype in itertools.product(DTYPES, DTYPES):
        x, residual = normal(4, columns, dtype=x_dtype), normal(4, columns, dtype=sum_dtype, seed=1)
        before = residual.clone()
        options = {"eps": 1e-5, "centred": CENTRED[kind], "out_dtype": torch.float32}
        y, total, *_ = norm_forward(x, None, None, residual, **options)
        assert torch.equal(total, (x.float() + residual.float()).to(sum_dtype))
        assert torch.equal(y, norm_forward(total, **options)[0])
        assert torch.equal(residual, before), "the residual was written to"  # as in nano-vllm#170


@pytest.mark.parametrize("columns", [1, 15, 17, 64, 100, 768, 2100])
def test_backward_within_bounds(backend, kind, columns):
    for i, dtype in enumerate(DTYPES):
        x = normal(9, columns, seed=i).to(dtype)
        grad, grad_sum = (normal(9, columns, dtype=DTYPES[i - 1], seed=s) for s in (3, 4))
        _, _, mean, rstd = norm_forward(x, eps=1e-3, centred=CENTRED[kind], out_dtype=dtype)
        mean = mean if CENTRED[kind] else None
        for weight, added in ((normal(columns, dtype=DTYPES[i - 2], seed=5), grad_sum), (None, None)):
            dx, dx_bound, sums, sums_bound = norm_backward_bound(grad, x, rstd, mean, weight, added)
            # The emulator has threads for the sums of some 4,000 columns.
            for parameters in (0, 1) if columns > 2000 else (0, 1, 2):
                got, got_sums, _ = norm_backward(grad, x, rstd, mean, weight, added, parameters=parameters)
                assert got.dtype == dtype
                assert got_sums.shape == (parameters, columns)
                assert_within(got, dx, dx_bound, "grad_x")
                assert_within(got_sums, sums[:parameters], sums_bound[:parameters], "sums")


def test_backward_is_exact_where_it_can_be(backend):
    """Integers: a dropped or doubled row is no matter of bounds. 300 rows make several strips, blocks and programs."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 8), (7, 33), (300, 24)):
        x, grad = (torch.randint(-8, 9, (rows, columns), generator=generator).float() for _ in range(2))
        _, sums, _ = norm_backward(grad, x, torch.ones(rows), torch.zeros(rows), parameters=2)
        assert torch.equal(sums, torch.stack([(grad * x).sum(0), grad.sum(0)]))


# ---- what other libraries got wrong


@pytest.mark.parametrize("offset", [1e2, 1e3, 1e4])
def test_a_large_mean_leaves_the_variance(backend, offset):
    """E[x^2] - E[x]^2 in fp32 is off by 0.3 % at a mean of 100 standard deviations, by all of it at 10,000."""
    x = normal(4, 1000) + offset
    rstd = norm_forward(x, eps=0.0, centred=True, out_dtype=torch.float32)[3]
    expected = x.double().var(1, unbiased=False).rsqrt()
    torch.testing.assert_close(rstd.double(), expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize("columns", [50, 2500])
@pytest.mark.parametrize("scale", [1e19, 1e30, 2e38])
def test_rows_whose_squares_overflow(backend, kind, scale, columns):
    x = torch.rand(3, columns, generator=torch.Generator().manual_seed(1)) + 0.5
    x *= torch.tensor([scale, 1.0, scale])[:, None]
    options = {"eps": 1e-5, "centred": CENTRED[kind], "out_dtype": torch.float32}
    y, _, _, rstd = norm_forward(x, **options)
    assert_within(y, *norm_forward_bound(x, None, None, **options))
    assert (rstd > 0).all()


def test_nan_and_infinity_stay_in_their_rows(backend, kind):
    x = normal(6, 40)
    clean = call(kind, x, 40)
    x[1, 3], x[3, 0], x[4, 39] = torch.nan, torch.inf, -torch.inf
    y = call(kind, x, 40)
    assert torch.equal(y[[0, 2, 5]], clean[[0, 2, 5]])
    assert y[1].isnan().all()
    assert torch.equal(y.isnan(), stock(kind, x, (40,)).isnan()) or kind == "rms_norm"


@pytest.mark.parametrize("columns", [30, 4096])
def test_all_equal_and_zero_rows(backend, kind, columns):
    x = torch.tensor([0.0, 3.0, 2.0**-140])[:, None].repeat(1, columns)
    torch.testing.assert_close(call(kind, x, columns, eps=1e-5), stock(kind, x, (columns,)), rtol=1e-5, atol=1e-6)
    large = torch.full((1, columns), 2.0**100)  # its square overflows, its distance from the mean is 0
    assert torch.equal(call(kind, large, columns, eps=1e-5), torch.full_like(large, 0.0 if CENTRED[kind] else 1.0))


@pytest.mark.parametrize("apart", [1.0, 1e3, 1e25])
def test_parts_of_a_row_with_means_of_their_own(backend, kind, apart):
    """The CPU's kernel joins the moments of 1,024 columns at a time, the last of 452 of them."""
    x = normal(2, 2500)
    x[:, 1024:2048] += apart
    x[:, 2048:] -= 2 * apart
    options = {"eps": 1e-5, "centred": CENTRED[kind], "out_dtype": torch.float32}
    y, _, mean, rstd = norm_forward(x, **options)
    assert_within(y, *norm_forward_bound(x, None, None, **options))
    if CENTRED[kind]:
        torch.testing.assert_close(mean.double(), x.double().mean(1), rtol=1e-5, atol=1e-6)
        expected = x.double().var(1, unbiased=False).rsqrt()
        torch.testing.assert_close(rstd.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 5), (1, 1), (7, 1), (5,)])
def test_shapes_at_the_edge(kind, shape):
    x = normal(*shape).requires_grad_()
    weight = torch.ones(shape[-1:], requires_grad=True)
    ours, theirs = (f(kind, x, shape[-1:], weight, eps=1e-5) for f in (call, stock))
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    for a, b in zip(*(torch.autograd.grad(y.sum(), [x, weight]) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize(
    ("backend", "shape"),
    [("cpu", (2**16 + 5, 3)), ("cpu", (2, 2**17 + 3)), ("emulate", (2, 2**17 + 3))],
    indirect=["backend"],
)
def test_many_rows_and_long_rows(kind, backend, shape):
    """More than 2^16 rows (apex#411; of the CUDA and Triton kernels the far rows of test_far_elements are), rows longer than a block
    takes (Liger), in fp32 more than 128k (QuACK's backward)."""
    x = normal(*shape).requires_grad_()
    y = call(kind, x, shape[-1], eps=1e-5)
    options = {"eps": 1e-5, "centred": CENTRED[kind], "out_dtype": torch.float32}
    assert_within(y.detach(), *norm_forward_bound(x.detach(), None, None, **options))
    grad = normal(*shape, seed=1)
    theirs = x.detach().double().requires_grad_()
    stock(kind, theirs, shape[-1:]).backward(grad.double())
    mine = torch.autograd.grad(y, x, grad)[0]
    torch.testing.assert_close(mine.double(), theirs.grad, rtol=1e-4, atol=1e-4 * theirs.grad.abs().max().item())


def test_the_same_bits_again_and_for_any_number_of_threads(kind, same_bits_for):
    x, grad, weight = normal(400, 700).requires_grad_(), normal(400, 700, seed=1), normal(700, seed=2).requires_grad_()

    same_bits_for((1, 1, 2, 5), lambda: torch.autograd.grad(call(kind, x, 700, weight), [x, weight], grad))


# ---- the differentiable ops against torch


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("shape", "weighted"), [((6,), True), ((4, 6), True), ((4, 6), False)])
def test_gradients_are_torchs(backend, kind, shape, weighted, with_residual):
    tensors = [normal(2, 3, 4, 6, seed=1), normal(*shape, seed=2), normal(*shape, seed=3), normal(2, 3, 4, 6, seed=4)]
    grads = [normal(2, 3, 4, 6, seed=5), normal(2, 3, 4, 6, seed=6)]

    def run(ours):
        x, weight, bias, residual = (t.to(torch.float32 if ours else torch.float64).requires_grad_() for t in tensors)
        weight, bias = weight if weighted else None, bias if kind == "layer_norm" else None
        wanted = [t for t in (x, weight, bias, residual if with_residual else None) if t is not None]
        if ours:
            out = call(kind, x, shape, weight, bias, eps=1e-5, **({"residual": residual} if with_residual else {}))
            out = list(out) if with_residual else [out]
        else:
            total = x + residual if with_residual else x
            out = [stock(kind, total, shape, weight, bias), total][: 1 + with_residual]
        return [*out, *torch.autograd.grad(out, wanted, [g.to(out[0].dtype) for g in grads[: len(out)]])]

    for ours, theirs in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_the_two_results_alone(which):
    x, residual = normal(3, 8).requires_grad_(), normal(3, 8, seed=1).requires_grad_()
    out = ak.layer_norm(x, 8, residual=residual)[which]
    want, grad = [F.layer_norm(x + residual, (8,)), x + residual][which], normal(3, 8, seed=2)
    torch.testing.assert_close(*(torch.autograd.grad(y, [x, residual], grad) for y in (out, want)))


def test_every_argument_gets_its_gradient_in_its_dtype(kind):
    for x_dtype, weight_dtype, residual_dtype in itertools.product(DTYPES, DTYPES, (None, *DTYPES)):
        x = normal(3, 8, dtype=x_dtype).requires_grad_()
        weight = normal(8, dtype=weight_dtype, seed=1).requires_grad_()
        residual = None if residual_dtype is None else normal(3, 8, dtype=residual_dtype, seed=2).requires_grad_()
        out = call(kind, x, 8, weight, residual=residual)
        y = out if residual is None else out[0]
        assert y.dtype == (residual_dtype or x_dtype)
        y.sum().backward()
        assert (x.grad.dtype, weight.grad.dtype) == (x_dtype, weight_dtype)
        assert residual is None or residual.grad.dtype == residual_dtype


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_gradient_of_the_dtype_that_a_leaf_asks_for(with_residual):
    x = torch.randn(4, 16).bfloat16().requires_grad_()
    x.grad_dtype = torch.float64
    y = ak.layer_norm(x, 16, residual=torch.randn(4, 16) if with_residual else None)
    sum(t.float().sum() for t in (y if with_residual else [y])).backward()
    assert x.grad.dtype == torch.float64


class GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_results_without_a_gradient_give_none():
    x, residual = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    y, _ = ak.layer_norm(x, 16, residual=residual)
    GivesNone.apply(y).sum().backward()
    assert x.grad is None
    assert residual.grad is None


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(8,), (1, 8), (8, 1), (1, 2, 4), (1,)])
def test_second_derivatives(implementation, kind, shape, with_residual):
    """Also of rows that begin with dimensions of one element, which the number of columns does not tell apart."""

    def second(norm, dtype):
        x = normal(3, *shape).to(dtype).requires_grad_()
        residual = normal(3, *shape, seed=2).to(dtype).requires_grad_() if with_residual else None
        weight = normal(*shape, seed=1).to(dtype).requires_grad_()
        y, total = norm(x, weight, residual)
        inputs = [t for t in (x, weight, residual) if t is not None]
        loss = y.square().sum() + total.pow(3).sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    def ours(x, weight, residual):
        if residual is None:
            return call(kind, x, shape, weight, eps=1e-5), x
        return call(kind, x, shape, weight, eps=1e-5, residual=residual)

    def theirs(x, weight, residual):
        total = x if residual is None else x + residual
        return stock(kind, total, shape, weight), total

    for a, b in zip(second(ours, torch.float32), second(theirs, torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_gradcheck_in_float64(kind):
    x, weight = normal(2, 5).double().requires_grad_(), normal(5, seed=1).double().requires_grad_()
    residual = normal(2, 5, seed=2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w, r: call(kind, x, 5, w, residual=r), (x, weight, residual))


def test_forward_mode(kind):
    x, weight, tangent = normal(4, 3, 8), normal(8, seed=1), normal(4, 3, 8, seed=2)

    def ours(x):
        return call(kind, x, 8, weight, eps=1e-5)

    def theirs(x):
        return stock(kind, x, (8,), weight)

    torch.testing.assert_close(*(torch.func.jvp(f, (x,), (tangent,)) for f in (ours, theirs)))


# ---- 16 bits that are added to fp32


def test_a_norm_of_a_sum_is_one_kernel_each_way():
    """The branch's dtype included: no kernel in front of the norm, none after its backward."""
    x, residual = normal(4, 24, dtype=torch.bfloat16).requires_grad_(), normal(4, 24, seed=1).requires_grad_()
    grad = normal(4, 24, seed=2)
    with ak.backend("cpu"), Ops() as ops:
        y, total = ak.layer_norm(x, 24, residual=residual)
        torch.autograd.grad([y, total], [x, residual], [grad, grad])
    kernels = [name for name in ops.names if name not in ("aten::view", "aten::detach")]
    assert kernels == ["amp_kernels::norm_forward", "amp_kernels::norm_backward"]


def test_gradients_of_branch_and_residual_within_bounds(backend, kind):
    """Under autocast; the branch's gradient is the residual's, rounded to 16 bits."""
    x, residual = normal(5, 72, dtype=torch.bfloat16), normal(5, 72, seed=1)
    weight, grad = normal(72, seed=2), normal(5, 72, dtype=torch.bfloat16, seed=3)
    leaves = x.requires_grad_(), residual.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16), poisoned_allocations():
        y, total = call(kind, x, 72, weight, eps=1e-5, residual=residual)
        of_x, of_residual, of_weight = torch.autograd.grad(y, leaves, grad)
    assert torch.equal(total, x + residual)
    total, weight = total.detach(), weight.detach()
    mean, rstd = statistics(total, 1e-5, CENTRED[kind])
    dx, dx_bound, sums, sums_bound = norm_backward_bound(
        grad, total, rstd, mean if CENTRED[kind] else None, weight, None
    )
    assert_within(of_residual, dx, dx_bound, "of_residual")
    assert_within(of_weight, sums[0], sums_bound[0], "of_weight")
    assert torch.equal(of_x, of_residual.bfloat16())


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_one_of_branch_and_residual_needs_a_gradient(backend, needs):
    x, residual = normal(4, 16, dtype=torch.bfloat16), normal(4, 16, seed=1)
    (leaf,) = (t.requires_grad_() for t, needed in zip((x, residual), needs, strict=True) if needed)
    want = torch.autograd.grad(ak.layer_norm(x + residual, 16).square().sum(), leaf)
    y, _ = ak.layer_norm(x, 16, residual=residual)
    assert torch.equal(torch.autograd.grad(y.square().sum(), leaf)[0], want[0])


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_autocast_decides_the_dtype_of_the_result(backend, kind, dtype, x_dtype):
    """Whatever comes in, on every version of torch; and it is rounded once, from fp32."""
    x, weight = normal(4, 64, dtype=x_dtype), normal(64, seed=1).requires_grad_()
    with torch.autocast("cpu", dtype):
        y = call(kind, x, 64, weight, eps=1e-5)
        with_sum = call(kind, x, 64, weight, eps=1e-5, residual=normal(4, 64, seed=2))
    assert (y.dtype, with_sum[0].dtype, with_sum[1].dtype) == (dtype, dtype, torch.float32)
    options = {"eps": 1e-5, "centred": CENTRED[kind], "out_dtype": dtype}
    assert_within(y, *norm_forward_bound(x, weight.detach(), None, **options))
    y.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_compiled_under_autocast_as_in_eager(kind):
    x, residual = normal(4, 64).requires_grad_(), normal(4, 64, seed=2).requires_grad_()
    weight = normal(64, seed=1).requires_grad_()

    def step(x, residual, weight):
        with torch.autocast("cpu", torch.bfloat16):
            y, total = call(kind, x, 64, weight, residual=residual)
        return y, total, (y.float() * total).sum()

    def run(function):
        y, total, loss = function(x, residual, weight)
        return [y, total, *torch.autograd.grad(loss, [x, residual, weight])]

    torch._dynamo.reset()
    compiled = run(torch.compile(step, backend="aot_eager", fullgraph=True))
    assert compiled[0].dtype == torch.bfloat16
    torch.testing.assert_close(compiled, run(step))


# ---- eps


def test_eps_none_is_that_of_the_computation():
    x = torch.full((1, 4), 2.0**-14)
    for dtype in DTYPES:
        torch.testing.assert_close(ak.rms_norm(x.to(dtype), 4), F.rms_norm(x, (4,)).to(dtype))
    assert torch.equal(ak.rms_norm(x.double(), 4), F.rms_norm(x.double(), (4,)))


# ---- bad input


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, r"normalized_shape is \[5\] and x has shape \[3, 4\]", (torch.ones(3, 4), 5)),
        (ValueError, r"normalized_shape is \[\]", (torch.ones(3, 4), [])),
        (ValueError, r"weight has shape \[5\]; accepted: \[4\]", (torch.ones(3, 4), 4, torch.ones(5))),
        (TypeError, "weight has dtype float64", (torch.ones(3, 4), 4, torch.ones(4).double())),
        (TypeError, "x has dtype int64", (torch.ones(3, 4).long(), 4)),
    ],
)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_errors_name_the_argument(kind, error, message, arguments):
    with pytest.raises(error, match=f"{kind}: {message}"):
        getattr(ak, kind)(*arguments)


def test_a_residual_of_another_shape_is_no_broadcast():
    with pytest.raises(ValueError, match=r"layer_norm: residual has shape \[4\]; accepted: \[3, 4\]"):
        ak.layer_norm(torch.ones(3, 4), 4, residual=torch.ones(4))

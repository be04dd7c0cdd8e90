"""matmul: torch.matmul's shapes and errors, gradients, autocast; see test_differentiable.py."""

import pytest
import torch

from amp_kernels.ops.matmul import matmul

from ..helpers.bounds import assert_within, reference_and_bound
from ..helpers.generators import HALF_DTYPES, OUT_DTYPES, normal
from .tensors import leaves

pytestmark = pytest.mark.usefixtures("implementation")

SHAPES = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((4, 5), (5, 3)),
    ((5,), (2, 5, 3)),
    ((2, 4, 5), (5,)),
    ((2, 4, 5), (5, 3)),
    ((4, 5), (2, 5, 3)),
    ((2, 4, 5), (2, 5, 3)),
    ((2, 1, 4, 5), (3, 5, 3)),
    ((2, 3, 4, 5), (2, 3, 5, 3)),
    ((2, 3, 4, 5), (5, 3)),
    ((1, 4, 5), (6, 5, 1)),
    ((0, 4, 5), (5, 3)),
    ((2, 4, 0), (0, 3)),
    ((2, 0, 5), (2, 5, 3)),
    ((3, 1, 4, 5), (3, 0, 5, 2)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32, torch.float64])
def test_shapes_and_values_are_torch_matmuls(shapes, dtype):
    a, b = normal(*shapes[0], dtype=dtype), normal(*shapes[1], dtype=dtype, seed=1)
    out = matmul(a, b)
    expected = torch.matmul(a, b)
    assert out.shape == expected.shape
    assert out.dtype == dtype
    if dtype in HALF_DTYPES:
        assert_within(out, *reference_and_bound(a, b, out_dtype=dtype))
    else:
        assert torch.equal(out, expected)


def test_out_on_meta():
    """Shape propagation: meta tensors have no memory, so none of it is shared."""
    a, out = torch.empty(3, 4, dtype=torch.float16, device="meta"), torch.empty(3, 5, device="meta")
    assert matmul(a, a.new_empty(4, 5), out=out) is out


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
def test_out_dtype(dtype, out_dtype):
    a, b = normal(3, 9, 20, dtype=dtype), normal(20, 11, dtype=dtype, seed=1)
    out = matmul(a, b, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert_within(out, *reference_and_bound(a, b, out_dtype=out_dtype))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, None), (torch.float16, None), (torch.float32, torch.bfloat16)])
def test_gradients_are_rounded_once(shapes, dtypes):
    """Each gradient is within the bound of a GEMM whose result is rounded once to the operand's dtype, summed over the
    batch."""
    dtype, autocast = dtypes
    a = normal(*shapes[0], dtype=dtype, grad=True)
    b = normal(*shapes[1], dtype=dtype, seed=1, grad=True)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        out = matmul(a, b)
    grad = normal(*out.shape, dtype=out.dtype, seed=2)
    out.backward(grad)
    a16, b16 = leaves([t.to(autocast or dtype) for t in (a, b)], torch.float64)
    torch.matmul(a16, b16).backward(grad.double())
    sizes = [t.detach().abs().requires_grad_() for t in (a16, b16)]
    torch.matmul(*sizes).backward(grad.double().abs())
    for actual, exact, size in ((a, a16, sizes[0]), (b, b16, sizes[1])):
        assert actual.grad.dtype == dtype
        u = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[dtype]
        assert_within(actual.grad, exact.grad, u * exact.grad.abs() + 100 * 2.0**-23 * size.grad + 2.0**-25)


def test_the_gradient_of_a_broadcast_operand_is_summed_in_fp32():
    """4096 batches of gradient 1 + 2^-7: bf16 sums would stand still at 256."""
    a = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    b = torch.full((4096, 1, 1), 1 + 2.0**-7, dtype=torch.bfloat16)
    matmul(a, b).sum().backward()
    assert a.grad.item() == 4096 + 32


def test_only_the_gradients_that_are_needed(op_calls):
    a, b = normal(4, 5, dtype=torch.float16, grad=True), normal(5, 3, dtype=torch.float16)
    matmul(a, b).sum().backward()
    assert len(op_calls["gemm"]) == 2
    assert b.grad is None


@pytest.mark.parametrize("autocast", HALF_DTYPES)
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_autocast_follows_the_users_dtype(autocast, dtypes):
    a, b = normal(6, 5, dtype=dtypes[0]), normal(5, 4, dtype=dtypes[1], seed=1)
    with torch.autocast("cpu", autocast):
        out = matmul(a, b)
        wide = matmul(a, b, out_dtype=torch.float32)
    assert out.dtype == autocast
    assert wide.dtype == torch.float32
    assert_within(out, *reference_and_bound(a.to(autocast), b.to(autocast), out_dtype=autocast))
    assert_within(wide, *reference_and_bound(a.to(autocast), b.to(autocast), out_dtype=torch.float32))


def test_autocast_leaves_float64_alone():
    a, b = normal(6, 5, dtype=torch.float64), normal(5, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(matmul(a, b), a @ b)
        with pytest.raises(TypeError, match="a is float64, b is float32; accepted: float64 for all or for none"):
            matmul(a, b.float())


def test_backward_inside_autocast_computes_in_the_forwards_dtype():
    """fp16 gradients of an fp16 product must not become bf16 because backward is called inside another autocast."""
    a = normal(32, 32, dtype=torch.float16, grad=True)
    out = matmul(a, a.detach())
    grad = normal(32, 32, dtype=torch.float16, seed=1)
    expected = torch.autograd.grad(out, a, grad, retain_graph=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.autograd.grad(out, a, grad)[0], expected)


# ---- out=


def test_out_is_written_where_it_lies():
    a, b = normal(4, 5, dtype=torch.bfloat16), normal(5, 3, dtype=torch.bfloat16, seed=1)
    out = torch.empty(3, 4).t()
    assert matmul(a, b, out=out) is out
    assert torch.equal(out, matmul(a, b, out_dtype=torch.float32))
    x = normal(2, 2, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):  # as in torch, autocast does not apply to out=
        wide = matmul(x, x, out=torch.empty(2, 2))
    assert torch.equal(wide, x @ x)


def test_views_of_one_buffer_that_interleave_are_accepted():
    buffer = normal(4, 8, dtype=torch.float16)
    a, out = buffer[:, :4], buffer[:, 4:]
    expected = matmul(a, a.clone())
    matmul(a, a.clone(), out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("out", "kwargs", "error", "message"),
    [
        (torch.empty(2, 3), {"out_dtype": torch.half}, TypeError, "out_dtype is torch.float16 but out has .*float32"),
        (torch.empty(2, 3).double(), {}, TypeError, "out has dtype float64; accepted: float16, bfloat16, float32"),
        (torch.empty(3, 2), {}, ValueError, r"out has shape \[3, 2\]; accepted: \[2, 3\]"),
        (torch.empty(1, 3).expand(2, 3), {}, ValueError, "out has strides .* elements share memory"),
        (torch.empty(2, 3, device="meta"), {}, ValueError, "out is on meta, but a is on cpu"),
        (torch.empty(2, 3, requires_grad=True), {}, RuntimeError, "requires grad"),
    ],
)
def test_bad_out(out, kwargs, error, message):
    with pytest.raises(error, match=message):
        matmul(normal(2, 4, dtype=torch.float16), normal(4, 3, dtype=torch.float16), out=out, **kwargs)


def test_out_must_not_overlap_an_operand():
    buffer = torch.ones(3, 2, 2, dtype=torch.float16).flatten()
    a, b = buffer[:4].view(2, 2), torch.ones(2, 2, dtype=torch.float16)
    for start, name, operands in ((2, "a", (a, b)), (0, "b", (b, a))):
        before = buffer.clone()
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            matmul(*operands, out=buffer[start : start + 4].view(2, 2))
        assert torch.equal(buffer, before)
    matmul(a, b, out=buffer[4:8].view(2, 2))


# ---- bad input


X = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("a", "b", "kwargs", "error", "message"),
    [
        (X.half(), X.bfloat16(), {}, TypeError, "a is float16, b is bfloat16; accepted: one dtype"),
        (X.half(), X, {}, TypeError, "a is float16, b is float32"),
        (X.int(), X.int(), {}, TypeError, "a has dtype int32; accepted: float16, bfloat16"),
        (X, X.cfloat(), {}, TypeError, "b has dtype complex64"),
        (X, X.to("meta"), {}, ValueError, "b is on meta, but a is on cpu"),
        (X[0, 0], X, {}, ValueError, r"a has shape \[\]"),
        (torch.ones(2, 3), X, {}, ValueError, "a has 3 columns but b has 2 rows"),
        (X.expand(2, 2, 2), X.expand(3, 2, 2), {}, ValueError, "must broadcast"),
        (X, X, {"out_dtype": torch.float16}, TypeError, "out_dtype is torch.float16; accepted"),
        (X.half(), X.half(), {"out_dtype": torch.float64}, TypeError, "out_dtype is torch.float64"),
    ],
)
def test_bad_input(a, b, kwargs, error, message):
    with pytest.raises(error, match=message):
        matmul(a, b, **kwargs)

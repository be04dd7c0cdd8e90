"""The Triton activations in the interpreter against csrc/activation/formula.h, compiled for the host; run by test_interpreted.py."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from amp_kernels import _host
from amp_kernels._checks.activations import ACTIVATIONS as ACTIVATIONS_OF_TORCH
from amp_kernels._raw.activation_backward import DERIVATIVES
from amp_kernels._triton import _activations, activation_backward, activation_forward, column_sums

from ..helpers.generators import normal
from ..helpers.poison import assert_only_written

ACTIVATIONS = ["none", "relu", "gelu", "gelu_tanh", "silu"]

# Every exponent, both signs, eight mantissas; then the range in which the functions bend; then what is special.
CODES = (np.arange(2**9)[:, None] << 23) + np.random.default_rng(0).integers(0, 2**23, (2**9, 16))
X = np.concatenate(
    [
        CODES.astype(np.uint32).view(np.float32).ravel(),
        np.linspace(-16, 16, 4001, dtype=np.float32),
        np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 14.5, -14.5, 11.5, -11.5, 128.0, -128.0], np.float32),
    ]
)
X = np.resize(X[np.isfinite(X) | (np.arange(X.size) >= CODES.size)], 2**14)  # NaN once; the rest of the block repeats


def distance(got, expected):
    """Units in the last place between two arrays; NaN equals NaN."""
    ordered = [np.where((i := x.view(np.int32)) < 0, np.int64(-(2**31)) - i, i) for x in (got, expected)]
    return np.where(np.isnan(got) & np.isnan(expected), 0, np.abs(ordered[0] - ordered[1]))


@triton.jit
def both_kernel(x, grad, y, dx, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, _activations.activate(tl.load(x + i), ACTIVATION))
    tl.store(dx + i, _activations.activate_backward(tl.load(grad + i), tl.load(x + i), ACTIVATION))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bits_of_the_host(name):
    grad = np.random.default_rng(1).standard_normal(X.size).astype(np.float32)
    y, dx = torch.empty(X.size), torch.empty(X.size)
    both_kernel[(1,)](torch.from_numpy(X), torch.from_numpy(grad), y, dx, ACTIVATION=name, BLOCK=X.size)
    check_bits(y.numpy(), _host.activate(name, X))
    check_bits(dx.numpy(), _host.activate_backward(name, grad, X))


@triton.jit
def gated_kernel(gate, up, grad, y, d_gate, d_up, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, _activations.swiglu(tl.load(gate + i), tl.load(up + i)))
    gradients = _activations.swiglu_backward(tl.load(grad + i), tl.load(gate + i), tl.load(up + i))
    tl.store(d_gate + i, gradients[0])
    tl.store(d_up + i, gradients[1])


def test_bits_of_the_host_for_two_values():
    up, grad = np.random.default_rng(2).standard_normal((2, X.size)).astype(np.float32)
    results = [torch.empty(X.size) for _ in range(3)]
    gated_kernel[(1,)](*(torch.from_numpy(x) for x in (X, up, grad)), *results, BLOCK=X.size)
    for got, expected in zip(results, (_host.swiglu(X, up), *_host.swiglu_backward(grad, X, up)), strict=True):
        check_bits(got.numpy(), expected)


def check_bits(got, expected):
    apart = distance(got, expected)
    # The Newton steps of the division round correctly as long as their remainder is a normal number.
    small = np.abs(expected) < 2.0**-100
    worst = np.where(small, 0, apart).argmax()
    assert apart[worst] == 0, f"at {X[worst]!r}: {got[worst]!r}, on the host {expected[worst]!r}"
    with np.errstate(invalid="ignore"):
        difference = np.abs(got - expected)
    assert difference[small].max(initial=0) <= 2.0**-122


@pytest.mark.parametrize("shape", [(), (2,), (2046,), (2050,), (2, 3, 40), (5, 2), (3, 4200)])
@pytest.mark.parametrize("name", ["silu", "swiglu"])
def test_forward_of_shapes_and_strides(shape, name):
    z = 2 * normal(*(shape or (2,)), seed=1)
    z = z[0] if name == "silu" and not shape else z
    for preact in (z, z.mT.contiguous().mT if z.ndim > 1 else z, torch.stack([z, z], -1)[..., 0]):
        got = activation_forward.activation_forward(preact, activation=name)
        torch.testing.assert_close(got, ACTIVATIONS_OF_TORCH[name](z), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 1), (3, 2100), (2, 40, 33)])
def test_gated_shapes_and_strides(shape):
    """Columns of both halves, one row to the next, where an even number of tiles does not cover them."""
    generator = torch.Generator().manual_seed(1)
    z = 2 * torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)
    g = torch.randn(shape, generator=generator)
    for grad, preact in ((g, z), (g, z.mT.contiguous().mT), (g[..., :1].expand(shape), z)):
        got, _ = activation_backward.activation_backward(grad, preact, activation="swiglu")
        torch.testing.assert_close(got, DERIVATIVES["swiglu"](grad, preact), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (2047,), (2049,), (3, 5), (2, 3, 40), (5, 1), (3, 2100)])
def test_shapes_and_strides(shape):
    generator = torch.Generator().manual_seed(len(shape))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        z = (2 * torch.randn(shape, generator=generator)).to(dtype)
        g = torch.randn(shape, generator=generator)
        for grad, preact in (
            (g.to(dtype), z),
            (g, z),
            (g.flatten()[:1].expand(z.numel()).reshape(shape), z),
            *permuted(g, z),
        ):
            got, _ = activation_backward.activation_backward(grad, preact, activation="gelu")
            expected = DERIVATIVES["gelu"](grad.double(), preact.double()).to(dtype)
            assert got.dtype == dtype
            assert got.is_contiguous()
            tolerance = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20}[dtype]
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("programs", [2, 1024])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_sums_have_the_bits_of_column_sums(activation, programs, monkeypatch):
    monkeypatch.setattr(column_sums, "PROGRAMS", programs)
    generator = torch.Generator().manual_seed(0)
    for shape in ((0, 5), (1, 128), (31, 129), (3, 11, 7), (200, 260), (9,)):
        z = torch.randn(*shape[:-1], shape[-1] * (2 if activation == "swiglu" else 1), generator=generator).bfloat16()
        grad = torch.randn(shape, generator=generator).bfloat16()
        for g in (grad, grad[..., :1].expand(shape)):
            out, sums = activation_backward.activation_backward(g, z, activation=activation, bias_grad=True)
            assert torch.equal(out, activation_backward.activation_backward(g, z, activation=activation)[0])
            assert torch.equal(sums, column_sums.column_sums(out[None].flatten(0, -2)))


@pytest.mark.parametrize("shape", [(1, 2047), (1, 4096), (3, 2049), (130, 33), (7, 1)])
def test_writes_the_result_and_nothing_else(shape):
    ones = torch.ones(shape)
    for run, more in ((activation_forward._run, ()), (activation_backward._run, (ones,))):
        buffer = torch.full((ones.numel() + 5000,), torch.nan)
        out = buffer[2500:-2500].view(shape)
        run(out, ones.mT.contiguous().mT, *more, "none")
        assert torch.equal(out, ones)
        assert_only_written(buffer, out)


def permuted(g, z):
    if g.ndim < 2:
        return
    yield g.mT.contiguous().mT, z
    yield g, z.mT.contiguous().mT
    yield g.transpose(0, -1).contiguous().transpose(0, -1), torch.stack([z, z], -1)[..., 0]

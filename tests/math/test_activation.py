"""csrc/activation/formula.h against float64, within the bounds that the header states."""

import math

import mpmath
import numpy as np
import pytest
import torch

from amp_kernels import _host

U = 2.0**-24
SMOOTH = ("gelu", "gelu_tanh", "silu")


def tanh_argument(x: torch.Tensor) -> torch.Tensor:
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def sigmoid(z: torch.Tensor) -> torch.Tensor:
    """Without cancellation on either side, which torch.sigmoid does not promise."""
    e = torch.exp(-z.abs())
    return torch.where(z < 0, e, 1.0) / (1 + e)


def expected(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "gelu":
        return x * torch.special.erfc(-x / math.sqrt(2)) / 2
    return x * sigmoid(x if name == "silu" else tanh_argument(x))


def derivative(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "gelu":
        return torch.special.erfc(-x / math.sqrt(2)) / 2 + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    z = x if name == "silu" else tanh_argument(x)
    slope = 1.0 if name == "silu" else 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return sigmoid(z) + x * slope * sigmoid(z) * sigmoid(-z)


#: f is 0 below -END, and there is FLOOR at most.
END = {"gelu": 7.0, "gelu_tanh": 6.0, "silu": 87.0}
FLOOR = {"gelu": 2.0**-36, "gelu_tanh": 2.0**-33, "silu": 2.0**-118}


def relative_bound(name: str, x: torch.Tensor) -> torch.Tensor | float:
    """Relative bound of the result for a negative x."""
    return {"gelu": 2.0**-11, "gelu_tanh": 2.0**-10}.get(name) or (6 + x.abs() / 2) * U


def inputs() -> np.ndarray:
    """All bf16 and fp16 values, and every 1009th fp32 code, up to 1e4 in size (beyond, the limits hold)."""
    codes = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    parts = [_host.to_float(codes, d) for d in ("float16", "bfloat16")]
    parts.append(np.arange(0, 1 << 32, 1009, dtype=np.uint64).astype(np.uint32).view(np.float32))
    x = np.concatenate(parts)
    return x[np.abs(x) < 1e4]


X = inputs()
X64 = torch.from_numpy(X).double()


@pytest.mark.parametrize("name", SMOOTH)
def test_forward_within_the_stated_bound(name):
    reference = expected(name, X64)
    error = (torch.from_numpy(_host.activate(name, X)).double() - reference).abs()
    bound = 4 * U * X64.abs() + 2.0**-150
    tail = relative_bound(name, X64) * reference.abs() + FLOOR[name]
    bound = torch.where(X64 < 0, torch.minimum(bound, tail), bound)
    worst = (error / bound).argmax()
    assert (error <= bound).all(), f"{name}({X[worst]}) is off by {error[worst] / bound[worst]:.2f} bounds"


@pytest.mark.parametrize("name", SMOOTH)
def test_zero_where_the_tail_has_ended(name):
    y = _host.activate(
        name, np.array([-END[name], np.nextafter(-END[name], -1e9, dtype=np.float32), -END[name] + 0.1], np.float32)
    )
    assert y[0] == y[1] == 0
    assert -2 * FLOOR[name] < y[2] < 0


@pytest.mark.parametrize("name", SMOOTH)
def test_derivative_within_the_stated_bound(name):
    got = torch.from_numpy(_host.activate_backward(name, np.ones_like(X), X)).double()
    error = (got - derivative(name, X64)).abs()
    assert error.max() <= 4 * U, f"{name}'({X[error.argmax()]}) is off by {error.max() / U:.2f} u"


@pytest.mark.parametrize("x", [-9.5, -5.0, -1.3, -0.75, -1e-3, 1e-4, 0.5, 3.0, 8.0])
def test_the_float64_oracle_itself(x):
    """The oracle against 50 digits, so that its own rounding cannot hide an error of the kernel."""
    mpmath.mp.dps = 50
    t, x64 = mpmath.mpf(x), torch.tensor([x], dtype=torch.float64)
    z = 2 * mpmath.sqrt(2 / mpmath.pi) * (t + mpmath.mpf("0.044715") * t**3)
    exact = {
        "gelu": lambda v: v * mpmath.erfc(-v / mpmath.sqrt(2)) / 2,
        "gelu_tanh": lambda v: (
            v / (1 + mpmath.exp(-2 * mpmath.sqrt(2 / mpmath.pi) * (v + mpmath.mpf("0.044715") * v**3)))
        ),
        "silu": lambda v: v / (1 + mpmath.exp(-v)),
    }
    assert abs(z) < 200
    for name, f in exact.items():
        assert abs(expected(name, x64).item() - f(t)) <= 1e-13 * abs(f(t))
        assert abs(derivative(name, x64).item() - mpmath.diff(f, t)) <= 1e-13


@pytest.mark.parametrize("name", SMOOTH)
def test_agrees_with_torch(name):
    """The names mean what they mean in torch."""
    x = torch.linspace(-6, 6, 10001, requires_grad=True, dtype=torch.float64)
    function = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }[name]
    y = function(x)
    y.sum().backward()
    x32 = x.detach().float().numpy()
    np.testing.assert_allclose(_host.activate(name, x32), y.detach().numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(_host.activate_backward(name, np.ones_like(x32), x32), x.grad.numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", [*SMOOTH, "relu"])
def test_limits_and_nan(name):
    x = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 0.0], dtype=np.float32)
    y = _host.activate(name, x)
    assert y[0] == np.inf
    assert y[3] == np.float32(3e38)
    assert y[1] == y[4] == y[5] == 0
    assert np.isnan(y[2])
    d = _host.activate_backward(name, np.ones_like(x), x)
    assert d[0] == d[3] == 1
    assert d[1] == d[4] == 0
    assert np.isnan(d[2]) == (name != "relu")


def test_relu_chooses_and_does_not_multiply():
    grad = np.array([np.inf, np.inf, np.nan, 2.0, 2.0], dtype=np.float32)
    x = np.array([-1.0, 1.0, -1.0, 0.0, 1e-45], dtype=np.float32)
    assert _host.activate_backward("relu", grad, x).tolist() == [0.0, np.inf, 0.0, 0.0, 2.0]


def test_none_is_the_identity():
    assert np.array_equal(_host.activate("none", X), X)
    assert np.array_equal(_host.activate_backward("none", X, X), X)


def test_unknown_name():
    with pytest.raises(ValueError, match="activation is 'tanh'; accepted: none, relu, gelu, gelu_tanh, silu"):
        _host.activate("tanh", X[:1])


def test_swiglu_and_its_gradient_are_products_of_silu():
    """Bit by bit: the order of the factors is part of the definition."""
    generator = np.random.default_rng(0)
    gate, up, grad = (generator.standard_normal(1000).astype(np.float32) * 8 for _ in range(3))
    assert np.array_equal(_host.swiglu(gate, up), _host.activate("silu", gate) * up)
    d_gate, d_up = _host.swiglu_backward(grad, gate, up)
    assert np.array_equal(d_gate, _host.activate_backward("silu", grad * up, gate))
    assert np.array_equal(d_up, grad * _host.activate("silu", gate))
    with pytest.raises(ValueError, match="swiglu: arrays of 1000 and 999 elements"):
        _host.swiglu(gate, up[1:])


def test_a_gated_activation_has_no_form_of_one_argument():
    with pytest.raises(ValueError, match="activation is 'swiglu'"):
        _host.activate("swiglu", X[:1])

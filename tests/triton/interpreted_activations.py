"""The Triton activations in the interpreter against csrc/math/activation.h, compiled for the host; run by test_interpreted.py."""

import numpy as np
import pytest
import torch

from amp_kernels import _host
from amp_kernels._library import REGISTRY
from amp_kernels._triton import activation_backward, gemm
from amp_kernels.ops.activation_backward import DERIVATIVES
from amp_kernels.testing.backends import check_backend
from amp_kernels.testing.poison import poisoned_allocations

ACTIVATIONS = ["none", "relu", "gelu", "gelu_tanh", "silu"]

# Every exponent, both signs, eight mantissas; then the range in which the functions bend; then what is special.
CODES = (np.arange(2**9)[:, None] << 23) + np.random.default_rng(0).integers(0, 2**23, (2**9, 8))
X = np.concatenate(
    [
        CODES.astype(np.uint32).view(np.float32).ravel(),
        np.linspace(-16, 16, 8001, dtype=np.float32),
        np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 14.5, -14.5, 11.5, -11.5, 128.0, -128.0], np.float32),
    ]
)
X = X[~(np.isnan(X) & (np.arange(X.size) < CODES.size))]


def distance(got, expected):
    """Units in the last place between two arrays; NaN equals NaN."""
    ordered = [np.where((i := x.view(np.int32)) < 0, np.int64(-(2**31)) - i, i) for x in (got, expected)]
    return np.where(np.isnan(got) & np.isnan(expected), 0, np.abs(ordered[0] - ordered[1]))


def subnormal_scale(x):
    return np.abs(x) < 2.0**-100


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forward_has_the_bits_of_the_host(name):
    nothing = torch.empty(1, 0, dtype=torch.float16), torch.empty(0, X.size, dtype=torch.float16)
    got = gemm.launch(*nothing, torch.from_numpy(X), activation=name, out_dtype=torch.float32).numpy()[0]
    # 0 + bias turns -0 into 0.
    compare(got, _host.activate(name, X + np.float32(0)))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_backward_has_the_bits_of_the_host(name):
    grad = np.random.default_rng(1).standard_normal(X.size).astype(np.float32)
    got = activation_backward.launch(torch.from_numpy(grad), torch.from_numpy(X), activation=name).numpy()
    compare(got, _host.activate_backward(name, grad, X))


def compare(got, expected):
    apart = distance(got, expected)
    # The division by Newton steps is not correctly rounded where its remainder is subnormal.
    assert apart[~subnormal_scale(expected)].max() == 0, (X[apart.argmax()], got[apart.argmax()], expected[apart.argmax()])
    assert np.abs(got - expected)[subnormal_scale(expected)].max(initial=0) <= 2.0**-122


def test_samples_of_the_op():
    assert check_backend(REGISTRY["activation_backward"], "triton", "cpu") > 0


@pytest.mark.parametrize("shape", [(), (1,), (2047,), (2049,), (3, 5), (2, 3, 700), (5, 1), (70, 2100)])
def test_shapes_and_strides(shape):
    generator = torch.Generator().manual_seed(len(shape))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        z = (2 * torch.randn(shape, generator=generator)).to(dtype)
        g = torch.randn(shape, generator=generator)
        for grad, preact in ((g.to(dtype), z), (g, z), (g.flatten()[:1].expand(z.numel()).reshape(shape), z), *permuted(g, z)):
            with poisoned_allocations():
                got = activation_backward.launch(grad, preact, activation="gelu")
            expected = DERIVATIVES["gelu"](grad.double(), preact.double()).to(dtype)
            assert got.dtype == dtype
            assert got.is_contiguous()
            tolerance = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20}[dtype]
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance / 8)


def permuted(g, z):
    if g.ndim < 2:
        return
    yield g.mT.contiguous().mT, z
    yield g, z.mT.contiguous().mT
    yield g.transpose(0, -1).contiguous().transpose(0, -1), torch.stack([z, z], -1)[..., 0]

"""ak.nn.Linear is torch.nn.Linear with other arithmetic: same parameters, initialisation, state_dict, behaviour."""

import copy

import pytest
import torch

from amp_kernels.nn import Linear

from ..helpers.bounds import assert_within, reference_and_bound


def twins(*args, **kwargs):
    torch.manual_seed(0)
    ours = Linear(*args, **kwargs)
    torch.manual_seed(0)
    return ours, torch.nn.Linear(*args, **kwargs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_parity_with_torch(bias, dtype):
    ours, theirs = twins(12, 7, bias=bias, dtype=dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 12).to(dtype)
    out = ours(x)
    if dtype.itemsize > 2:
        assert torch.equal(out, theirs(x))
    else:
        assert_within(out, *reference_and_bound(x, ours.weight.t(), ours.bias, out_dtype=dtype))
    assert isinstance(ours, torch.nn.Linear)


def test_one_step_of_training_under_autocast_follows_torch():
    ours, theirs = twins(32, 16)
    x = torch.randn(64, 32)
    for module in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16):
            module(x).float().pow(2).mean().backward()
    assert ours.weight.grad.dtype == torch.float32
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, rtol=2e-2, atol=1e-3)


def test_fused_activation():
    module = Linear(8, 4, activation="gelu_tanh", dtype=torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, module.weight, module.bias), approximate="tanh")
    assert torch.equal(module(x), expected)
    assert "bias=True, activation='gelu_tanh', amp_kernels.linear in place of" in repr(module)
    with pytest.raises(ValueError, match="Linear: activation is 'tanh'"):
        Linear(8, 4, activation="tanh")


def test_a_gated_activation_needs_an_even_number_of_features():
    assert Linear(4, 6, activation="swiglu")(torch.randn(2, 4, dtype=torch.float32)).shape == (2, 3)
    with pytest.raises(ValueError, match="Linear: out_features is 5; accepted with activation='swiglu': an even"):
        Linear(4, 5, activation="swiglu")
    assert Linear(4, 5, activation="silu").out_features == 5


def test_meta_device_and_deepcopy():
    module = Linear(3, 2, device="meta", dtype=torch.bfloat16, activation="silu")
    assert module(torch.empty(5, 3, device="meta", dtype=torch.bfloat16)).shape == (5, 2)
    assert copy.deepcopy(module).activation == "silu"

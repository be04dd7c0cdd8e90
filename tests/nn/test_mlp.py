"""ak.nn.MLP: torch's initialisation and names, the fused path, and the modules' own calls where they matter."""

import copy

import pytest
import torch

from amp_kernels.nn import MLP, Linear
from amp_kernels.nn import mlp as mlp_module
from amp_kernels.ops.mlp import mlp


@pytest.fixture
def fused(monkeypatch):
    calls = []
    monkeypatch.setattr(mlp_module, "mlp", lambda *a, **k: calls.append(k["activation"]) or mlp(*a, **k))
    return calls


@pytest.mark.parametrize("activation", ["gelu", "swiglu", None])
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_and_initialisation_are_those_of_two_linears(activation, bias, fused):
    torch.manual_seed(0)
    module = MLP(6, 10, 4, bias=bias, activation=activation)
    torch.manual_seed(0)
    first = torch.nn.Linear(6, 20 if activation == "swiglu" else 10, bias=bias)
    second = torch.nn.Linear(10, 4, bias=bias)
    theirs = [*first.parameters(), *second.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), theirs, strict=True))
    names = [f"fc{i}.{name}" for i in (1, 2) for name in (["weight", "bias"] if bias else ["weight"])]
    assert list(module.state_dict()) == names
    x = torch.randn(2, 3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
        assert torch.equal(out, module.fc2(module.fc1(x)))
    assert out.shape == (2, 3, 4)
    assert fused == [activation]
    assert MLP(6, 10).fc2.out_features == 6


@pytest.mark.parametrize(
    "what", ["forward hook", "pre-hook", "backward hook", "replaced", "own forward", "parametrised"]
)
def test_a_layer_that_is_more_than_a_linear_is_called(what, fused):
    module = MLP(6, 10, dtype=torch.bfloat16)
    x = torch.randn(3, 6).bfloat16().requires_grad_()
    expected = module(x)
    assert len(fused) == 1
    called = []
    if what == "forward hook":
        module.fc1.register_forward_hook(lambda *_: called.append(1))
    elif what == "pre-hook":
        module.fc2.register_forward_pre_hook(lambda *_: called.append(1))
    elif what == "backward hook":
        module.fc1.register_full_backward_hook(lambda *_: called.append(1))
    elif what == "replaced":
        module.fc2 = torch.nn.Sequential(module.fc2)
        called.append(1)
    elif what == "own forward":
        forward = module.fc2.forward
        module.fc2.forward = lambda y: called.append(1) or forward(y)
    else:
        torch.nn.utils.parametrizations.weight_norm(module.fc1)
        called.append(1)
    out = module(x)
    out.sum().backward()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert called
    assert len(fused) == 1


def test_deepcopy_meta_compile_and_bad_activation(fused):
    module = MLP(6, 10, activation="swiglu", dtype=torch.bfloat16)
    x = torch.randn(3, 6).bfloat16()
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    meta = MLP(6, 10, activation="swiglu", device="meta")
    assert meta(torch.empty(5, 6, device="meta")).shape == (5, 6)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))
    with pytest.raises(ValueError, match="MLP: activation is 'mish'"):
        MLP(6, 10, activation="mish")
    assert isinstance(module.fc1, Linear)
    assert "activation='swiglu'" in repr(module)

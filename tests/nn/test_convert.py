"""convert changes what a model computes with, and nothing else about it."""

import copy
import logging

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from amp_kernels.nn import Linear, convert


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.blocks = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)]
        )
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.shared = self.blocks[0][0]

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.shared(x))


def test_nothing_but_the_arithmetic_changes():
    torch.manual_seed(0)
    model = Net()
    model.blocks[1].eval()
    before = copy.deepcopy(model)
    names = [name for name, _ in model.named_modules()]
    parameters = dict(model.named_parameters())
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append("forward"))
    model.head.register_full_backward_hook(lambda *_: calls.append("backward"))
    tokens = torch.arange(11)

    assert convert(model) is model

    assert [name for name, _ in model.named_modules()] == names
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert model.head.weight is model.embed.weight
    assert model.shared is model.blocks[0][0]
    assert [type(m) for m in (model.head, model.shared, model.blocks[1][0])] == [Linear] * 3
    assert (model.blocks[1][0].training, model.blocks[0][0].training) == (False, True)
    assert model.head.activation is None
    model(tokens).sum().backward()
    assert calls == ["forward", "backward"]
    assert torch.equal(model(tokens), before(tokens))  # fp32 outside autocast is torch's own
    before.load_state_dict(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = model(tokens), before(tokens)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)


def test_a_lone_linear_and_twice():
    module = torch.nn.Linear(3, 2)
    assert convert(convert(module)) is module
    assert type(module) is Linear


def test_an_activation_of_ours_survives():
    model = convert(torch.nn.Sequential(Linear(3, 2, activation="relu"), torch.nn.Linear(2, 2)))
    assert [m.activation for m in model] == ["relu", None]


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _replaced_forward(module):
    module.forward = torch.relu
    return module


def _non_parameter(module):
    weight = module.weight.detach()
    del module.weight
    module.weight = weight
    return module


class Wrapped(torch.nn.Parameter):
    """Stands for a quantised or sharded weight, which is a subclass of its own."""


def _wrapped(module):
    module.weight = Wrapped(module.weight.detach())
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Scaled(3, 3), "it is a subclass of Linear and may override forward"),
        (lambda: parametrizations.weight_norm(torch.nn.Linear(3, 3)), "it is a subclass of Linear"),
        (lambda: prune.l1_unstructured(torch.nn.Linear(3, 3), "weight", 2), "its weight is not a parameter of its own"),
        (lambda: prune.l1_unstructured(torch.nn.Linear(3, 3), "bias", 1), "its bias is not a parameter of its own"),
        (lambda: _replaced_forward(torch.nn.Linear(3, 3)), "its forward was replaced on the instance"),
        (lambda: _non_parameter(torch.nn.Linear(3, 3)), "its weight is not a parameter of its own"),
        (lambda: _wrapped(torch.nn.Linear(3, 3)), "its weight is a Wrapped"),
        (lambda: torch.nn.LazyLinear(3), "it is a subclass of Linear"),
    ],
)
def test_left_alone_with_a_reason(caplog, make, reason):
    module = make()
    kind = type(module)
    with caplog.at_level(logging.DEBUG, logger="amp_kernels"):
        convert(torch.nn.Sequential(module))
    assert type(module) is kind
    assert f"convert: 0 ({kind.__name__}) is left alone: {reason}" in caplog.text


def test_what_is_replaced_is_logged(caplog):
    with caplog.at_level(logging.DEBUG, logger="amp_kernels"):
        convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    assert caplog.messages == ["convert: 0 is now amp_kernels.nn.linear.Linear"]


def test_bad_input():
    with pytest.raises(TypeError, match=r"convert: model is a list; accepted: a torch.nn.Module"):
        convert([torch.nn.Linear(2, 2)])

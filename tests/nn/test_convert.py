"""convert changes what a model computes with, and nothing else about it."""

import copy
import io
import logging
import pickle
import sys
import types

import pytest
import torch
from torch.nn.utils import parametrizations, prune

import amp_kernels as ak
from amp_kernels.nn import Linear, convert, revert


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
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Conv1d(2, 2, 1))
    with caplog.at_level(logging.DEBUG, logger="amp_kernels"):
        convert(model)
    assert caplog.messages == [
        "convert: 0 is now amp_kernels.nn.linear.Linear",
        "convert: 2 (Conv1d) is left alone: nothing here takes its place",
        "convert: replaced 1 Linear; left alone 1 Conv1d",
    ]
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG", "INFO"]


def test_a_report_on_request(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), Scaled(3, 3))
    convert(copy.deepcopy(model))
    assert capsys.readouterr().out == ""
    convert(model, report=True)
    assert capsys.readouterr().out.splitlines() == [
        "0 is now amp_kernels.nn.linear.Linear",
        "2 (Scaled) is left alone: it is a subclass of Linear and may override forward",
    ]


def test_skip():
    def kinds(skip):
        model = convert(Net(), skip=skip)
        return [type(m) is Linear for m in (model.blocks[0][0], model.blocks[1][0], model.head)]

    assert kinds(()) == [True, True, True]
    assert kinds("blocks.1") == [True, False, True]
    assert kinds(["blocks", "head"]) == [False, False, False]
    assert kinds([torch.nn.Linear]) == [False, False, False]
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "ab": torch.nn.Linear(2, 2)})
    assert type(convert(model, skip=["a"])["ab"]) is Linear, "a name is no prefix of letters"
    model = Net()
    for skip, error in ((["blocks.7"], ValueError), ([3], TypeError)):
        with pytest.raises(error, match=r"convert: skip holds"):
            convert(model, skip=skip)
        assert type(model.head) is torch.nn.Linear


def test_revert():
    model = Net()
    model.norm = torch.nn.LayerNorm(3)
    model.rms = torch.nn.RMSNorm(3)
    model.loss = torch.nn.CrossEntropyLoss()
    kinds = [type(m) for m in model.modules()]
    assert revert(convert(model)) is model
    assert [type(m) for m in model.modules()] == kinds
    model(torch.arange(3)).sum().backward()


def test_revert_leaves_what_torch_cannot_do():
    model = torch.nn.Sequential(Linear(2, 2, activation="relu"), ak.nn.CrossEntropyLoss(z_loss=0.1), Linear(2, 2))
    revert(model)
    assert [type(m) for m in model] == [Linear, ak.nn.CrossEntropyLoss, torch.nn.Linear]
    with pytest.raises(TypeError, match=r"revert: model is a int; accepted: a torch.nn.Module"):
        revert(3)


CONV1D = """
import torch

class Conv1D(torch.nn.Module):  # attributes and formula of Hugging Face's, which is not installed here
    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = torch.nn.Parameter(torch.randn(nx, nf))
        self.bias = torch.nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)
"""


@pytest.fixture
def conv1d(monkeypatch):
    module = types.ModuleType("transformers.pytorch_utils")
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", module)
    exec(CONV1D, vars(module))
    return module.Conv1D


def test_the_transposed_linear_of_gpt2(conv1d):
    torch.manual_seed(0)
    model = torch.nn.Sequential(conv1d(6, 8), conv1d(5, 6))
    ours = convert(copy.deepcopy(model))
    assert all(isinstance(m, conv1d) and type(m) is not conv1d for m in ours)
    x = torch.randn(2, 3, 8)
    assert torch.equal(ours(x), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = ours(x), model(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.1)
    out.float().sum().backward()
    expected.float().sum().backward()
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=0.1)
    again = pickle.loads(pickle.dumps(ours))
    assert type(again[0]) is type(ours[0])
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), ours(x))
    assert [type(m) for m in revert(ours)] == [conv1d, conv1d]
    assert convert(ours) is ours
    with pytest.raises(AttributeError, match="no attribute 'Conv2D'"):
        _ = ak.nn.conv1d.Conv2D


def test_bad_input():
    with pytest.raises(TypeError, match=r"convert: model is a list; accepted: a torch.nn.Module"):
        convert([torch.nn.Linear(2, 2)])

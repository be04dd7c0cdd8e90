"""convert changes what a model computes with, and nothing else about it."""

import copy
import logging
from functools import partial

import pytest
import torch
from torch.nn.utils import parametrizations, prune

import amp_kernels as ak
from amp_kernels.nn import Linear, convert, fused, revert


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


SPARSE = torch.sparse_csr, torch.sparse_csc, torch.sparse_coo


@pytest.mark.filterwarnings("ignore:Sparse")
def _sparse(layout):
    module = torch.nn.Linear(3, 3)
    module.weight = torch.nn.Parameter(module.weight.detach().to_sparse(layout=layout))
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
        (lambda: _wrapped(torch.nn.Linear(3, 3)), "its weight has type "),
        (lambda: torch.nn.LazyLinear(3), "it is a subclass of Linear"),
        *((partial(_sparse, layout), f"its weight has layout {layout}") for layout in SPARSE),
    ],
)
def test_left_alone_with_a_reason(caplog, make, reason):
    module = make()
    kind = type(module)
    with caplog.at_level(logging.DEBUG, logger="amp_kernels"):
        convert(torch.nn.Sequential(module))
    assert type(module) is kind
    assert f"convert: 0 ({kind.__name__}) is left alone: {reason}" in caplog.text


@pytest.mark.parametrize("option", ["fuse_loss", "fuse_residuals", "fuse_rotary"])
def test_an_option_that_changes_nothing_warns(caplog, option):
    convert(torch.nn.Linear(2, 2), **{option: True})
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    message = f"convert: {option}=True changes nothing: the model (Linear) has no module for it"
    hints = {"fuse_residuals": "; amp_kernels.nn.register_block names a block's class"}
    assert record.message == message + hints.get(option, "")


def test_a_model_without_anything_to_replace_warns(caplog):
    convert(torch.nn.Sequential(torch.nn.Conv2d(2, 2, 1), torch.nn.ReLU()))
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.message == "convert: nothing in the model (Sequential) is replaced; left alone: 1 Conv2d"
    caplog.clear()
    for model in (torch.nn.Sequential(ak.nn.Linear(2, 2)), type("Own", (ak.nn.MLP,), {})(2, 4)):
        convert(convert(model))
    assert not caplog.records


def test_an_option_that_changed_the_model_before_does_not_warn(caplog):
    model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(8, 2, 16), torch.nn.LayerNorm(8))
    for _ in range(2):
        convert(model, fuse_residuals=True)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_replacements_are_logged(caplog):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Conv1d(2, 2, 1))
    with caplog.at_level(logging.DEBUG, logger="amp_kernels"):
        convert(model)
    assert caplog.messages == [
        "convert: 0 is now amp_kernels.nn.linear.Linear",
        "convert: 2 (Conv1d) is left alone: there is no replacement for it",
        "convert: the model is now amp_kernels.nn.fused.Sequential",
        "convert: replaced 1 Linear, 1 Sequential; left alone 1 Conv1d",
    ]
    assert [record.levelname for record in caplog.records] == ["DEBUG"] * 3 + ["INFO"]


def test_a_report_on_request(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), Scaled(3, 3))
    convert(copy.deepcopy(model))
    assert capsys.readouterr().out == ""
    told = []
    convert(copy.deepcopy(model), report=lambda *parts: told.append(" ".join(parts)))
    convert(model, report=True)
    assert (
        capsys.readouterr().out.splitlines()
        == told
        == [
            "0 is now amp_kernels.nn.linear.Linear",
            "2 (Scaled) is left alone: it is a subclass of Linear and may override forward",
            "the model is now amp_kernels.nn.fused.Sequential",
        ]
    )


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


def test_skip_reaches_shared_modules_by_each_of_their_names():
    def kinds(skip):
        enc = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model = torch.nn.ModuleDict({"enc": enc, "dec": torch.nn.ModuleList([enc[0], torch.nn.Linear(2, 2)])})
        convert(model, skip=skip)
        return [type(m) is Linear for m in (enc[0], enc[1], model["dec"][1])]

    assert kinds(["dec"]) == [False, True, False]
    assert kinds(["dec.0"]) == kinds(["enc.0"]) == [False, True, True]
    assert kinds([""]) == [False, False, False]


def test_an_error_in_the_middle_leaves_the_model_as_it_was(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.nn.LayerNorm(2))
    kinds, fusible = [type(m) for m in model.modules()], fused.fusible

    def fails_at_last(module, skipped):
        if module is model[1]:
            raise AttributeError("its own")
        return fusible(module, skipped)

    monkeypatch.setattr(fused, "fusible", fails_at_last)
    with pytest.raises(AttributeError, match="its own"):
        convert(model)
    assert [type(m) for m in model.modules()] == kinds
    monkeypatch.undo()
    assert type(convert(model)[1]) is ak.nn.LayerNorm


def test_revert():
    model = Net()
    model.norm = torch.nn.LayerNorm(3)
    model.rms = torch.nn.RMSNorm(3)
    model.loss = torch.nn.CrossEntropyLoss()
    kinds = [type(m) for m in model.modules()]
    assert revert(convert(model)) is model
    assert [type(m) for m in model.modules()] == kinds
    model(torch.arange(3)).sum().backward()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantization_finds_torchs_classes_after_revert():
    """Dynamic quantization passes over a converted model without a word."""
    from torch.ao.quantization import quantize_dynamic

    def quantized(model):
        return [type(m).__module__.startswith("torch.ao") for m in quantize_dynamic(model, {torch.nn.Linear})]

    model = convert(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
    assert quantized(model) == [False, False, False]
    assert quantized(revert(model)) == [True, False, True]


def test_revert_leaves_what_torch_cannot_do():
    model = torch.nn.Sequential(Linear(2, 2, activation="relu"), ak.nn.CrossEntropyLoss(z_loss=0.1), Linear(2, 2))
    revert(model)
    assert [type(m) for m in model] == [Linear, ak.nn.CrossEntropyLoss, torch.nn.Linear]
    with pytest.raises(TypeError, match=r"revert: model has type int; accepted: a torch.nn.Module"):
        revert(3)


def test_revert_names_the_subclasses_that_it_leaves(caplog):
    """torch derives a class from that of a converted module when it is parametrised."""
    model = convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    parametrizations.weight_norm(model[0])
    with caplog.at_level(logging.DEBUG, logger="amp_kernels"):
        revert(model)
    assert caplog.messages == ["revert: 0 (ParametrizedLinear) is left alone: it is a subclass"]
    assert type(model[1]) is torch.nn.Linear
    torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert type(revert(model)[0]) is torch.nn.Linear


def test_a_traced_graph_may_be_converted():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    expected = model(torch.ones(2, 4))
    with pytest.raises(TypeError, match=r"linear: x has type torch.fx.proxy.Proxy; accepted: a tensor"):
        torch.fx.symbolic_trace(convert(copy.deepcopy(model)))
    traced = torch.fx.symbolic_trace(revert(convert(model)))
    assert type(convert(traced).get_submodule("0")) is Linear
    torch.testing.assert_close(traced(torch.ones(2, 4)), expected)


def test_bad_input():
    with pytest.raises(TypeError, match=r"convert: model has type list; accepted: a torch.nn.Module"):
        convert([torch.nn.Linear(2, 2)])

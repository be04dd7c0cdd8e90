"""Layers that model files bring along are converted by what they compute: classes with the attributes and formulas of
Hugging Face's, which is not installed here (tests/examples/test_model_families.py takes its own)."""

import copy
import io
import math
import pickle
import sys
import types

import pytest
import torch
import torch.nn.utils.prune
from torch.nn.utils import parametrizations

import amp_kernels as ak
from amp_kernels.nn import convert, revert
from amp_kernels.ops._shadows import fresh_shadow

SOURCES = {
    "transformers.pytorch_utils": """
import torch

class Conv1D(torch.nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = torch.nn.Parameter(torch.randn(nx, nf))
        self.bias = torch.nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)
""",
    "transformers.activations": """
import math
import torch

class NewGELUActivation(torch.nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

class ClippedGELUActivation(torch.nn.Module):
    def forward(self, x):
        return torch.clip(torch.nn.functional.gelu(x), -10, 10)

class QuickGELUActivation(torch.nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)
""",
}


@pytest.fixture
def transformers(monkeypatch):
    """Modules that have the names of Hugging Face's."""
    found = types.ModuleType("transformers")
    monkeypatch.setitem(sys.modules, "transformers", found)
    for name, source in SOURCES.items():
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(source, vars(module))
        setattr(found, name.partition(".")[2], module)
    return found


class T5LayerNorm(torch.nn.Module):
    def __init__(self, columns, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))
        self.variance_epsilon = eps

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * (x.to(self.weight.dtype) if self.weight.dtype != torch.float32 else x)


class GemmaRMSNorm(T5LayerNorm):
    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)).to(
            x
        )


class CohereLayerNorm(T5LayerNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class OutsideRMSNorm(T5LayerNorm):
    """The epsilon after the root."""

    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class GatedRMSNorm(T5LayerNorm):
    def forward(self, x, gate):
        return super().forward(x) * torch.nn.functional.silu(gate)


def test_an_rms_norm_of_a_model_file():
    torch.manual_seed(0)
    model = torch.nn.ModuleList([T5LayerNorm(7, 1e-5)])
    model[0].weight.data.uniform_(-2, 2)
    ours = convert(copy.deepcopy(model))
    assert isinstance(ours[0], T5LayerNorm)
    assert type(ours[0]).__name__ == "T5LayerNorm"
    x = torch.randn(3, 7) * torch.tensor([[1e-3], [1.0], [1e3]])  # the first row feels the epsilon
    torch.testing.assert_close(ours[0](x), model[0](x), rtol=2e-6, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours[0](x)
    assert y.dtype == torch.bfloat16, "the rule of ak.rms_norm"
    torch.testing.assert_close(y.float(), model[0](x), rtol=2**-8, atol=0)
    for weight_dtype, x_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        mixed = copy.deepcopy(ours[0]).to(weight_dtype)
        assert torch.equal(mixed(x.to(x_dtype)), T5LayerNorm.forward(mixed, x.to(x_dtype))), "a mix is the model's own"
    assert type(revert(ours)[0]) is T5LayerNorm


@pytest.mark.parametrize("columns", [6, 4096])
@pytest.mark.parametrize("kind", [GemmaRMSNorm, CohereLayerNorm, OutsideRMSNorm, GatedRMSNorm])
def test_a_norm_of_another_formula_is_left_alone(kind, columns, capsys):
    module = kind(columns, 1e-6)
    assert type(convert(module, report=True)) is kind
    assert "is left alone: it does not compute RMSNorm's formula" in capsys.readouterr().out


def test_more_norms_that_are_left_alone():
    parametrised = parametrizations.weight_norm(T5LayerNorm(4), dim=None)
    replaced = T5LayerNorm(4)
    replaced.forward = torch.relu
    biased = T5LayerNorm(4)
    biased.register_parameter("bias", torch.nn.Parameter(torch.zeros(4)))
    for module in (parametrised, replaced, biased):
        kind = type(module)
        assert type(convert(module)) is kind


def test_looking_at_a_model_touches_no_state():
    model = torch.nn.Sequential(T5LayerNorm(4), GemmaRMSNorm(4))
    before, state = copy.deepcopy(vars(model[1])), torch.get_rng_state()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        convert(model)
    assert type(model[0]) is not T5LayerNorm
    assert torch.equal(torch.get_rng_state(), state)
    assert list(vars(model[1])) == list(before)
    assert model[1].weight.grad is None


def test_the_transposed_linear_of_gpt2(transformers):
    conv1d = transformers.pytorch_utils.Conv1D
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
    assert [type(m) for m in revert(ours)] == [conv1d, conv1d]
    assert convert(ours) is ours


def test_the_transposed_linear_reads_the_shadow_of_its_weight(transformers, op_calls):
    torch.manual_seed(0)
    layer = convert(transformers.pytorch_utils.Conv1D(8, 8))
    optimizer = ak.optim.AdamW(layer.parameters(), shadow_dtype=torch.bfloat16)
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    x = torch.randn(2, 8)

    def operand():
        op_calls.clear()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x).detach()
        expected = torch.addmm(layer.bias, x.bfloat16().float(), layer.weight.bfloat16().float())
        assert torch.equal(y, expected.bfloat16())
        (((_, weight, *_), _),) = op_calls["gemm"]
        return weight.data_ptr()

    kept = fresh_shadow(layer.weight, torch.bfloat16)
    assert operand() == kept.data_ptr()
    assert fresh_shadow(layer.weight[:4], torch.bfloat16) is None, "another view is no transposed weight"
    layer.weight.data = layer.weight.data * 2
    assert operand() != kept.data_ptr(), "out of date"


def test_activations_of_transformers(transformers):
    theirs = transformers.activations
    modules = [theirs.NewGELUActivation(), theirs.ClippedGELUActivation(), theirs.QuickGELUActivation()]
    model = convert(torch.nn.ModuleList(modules))
    assert [type(m) in vars(theirs).values() for m in model] == [False, True, True]
    x = torch.linspace(-6, 6, 101)
    expected = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(model[0](x), expected, rtol=1e-5, atol=1e-6)
    assert model[0](x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy, lambda m: saved(m)])
def test_copies_of_a_converted_model(transformers, copied):
    conv1d, gelu = transformers.pytorch_utils.Conv1D, transformers.activations.NewGELUActivation
    model = convert(torch.nn.Sequential(T5LayerNorm(8), conv1d(6, 8), gelu(), torch.nn.Linear(6, 3)))
    again = copied(model)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert again[1].weight is not model[1].weight
    x = torch.randn(2, 8)
    assert torch.equal(again(x), model(x))
    revert(again)
    assert [type(m) for m in again] == [T5LayerNorm, conv1d, gelu, torch.nn.Linear]
    assert type(again) is torch.nn.Sequential


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_converted_norm_may_be_parametrised_or_pruned_later():
    norm = convert(T5LayerNorm(4))
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.ReLU())
    x = torch.randn(2, 4)
    assert torch.equal(copy.deepcopy(norm)(x), norm(x))
    torch.nn.utils.parametrize.remove_parametrizations(norm, "weight")
    assert type(norm) is type(convert(T5LayerNorm(4)))
    subclass = type("Subclass", (type(norm),), {})
    assert type(copy.deepcopy(subclass(4))) is subclass
    torch.nn.utils.prune.l1_unstructured(norm, "weight", 2)
    assert norm(x).eq(0).sum() == 4

"""Attention as transformers' model files write it: their function of the rotary embedding is replaced for converted modules alone."""

import copy
import itertools
import pickle
import sys
import threading
import types

import pytest
import torch

import amp_kernels as ak
from amp_kernels.nn import rotary as module

from ..helpers.generators import normal

WIDTH, HEADS = 8, 3
SOURCE = """
import functools
import torch
from torch import nn


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def deprecated(forward):
    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        if "old" in kwargs:
            kwargs["scale"] = kwargs.pop("old")
        return forward(self, *args, **kwargs)

    return call


class LlamaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 24), nn.Linear(16, 8)
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)

    @deprecated
    def forward(self, x, angles, *, scale=1.0, fail=False):
        shape = (*x.shape[:-1], -1, 8)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *angles)
        if fail:
            raise RuntimeError("its own")
        return (q * scale) @ k.mT
"""
INTERLEAVED = SOURCE.replace(
    "first, second = x.chunk(2, dim=-1)\n    return torch.cat((-second, first), dim=-1)",
    "return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)",
)
ANGLES = normal(1, 5, WIDTH, seed=3), normal(1, 5, WIDTH, seed=4)
X = normal(2, 5, 16, seed=5)


@pytest.fixture
def calls(monkeypatch):
    """The options of each call of the op."""
    found, own = [], module.rotary

    def noting(*args, **options):
        found.append(options)
        return own(*args, **options)

    monkeypatch.setattr(module, "rotary", noting)
    return found


@pytest.fixture
def file(monkeypatch):
    """Makes a model file of transformers."""

    def make(family="llama", source=SOURCE, name="transformers.models.{0}.modeling_{0}"):
        made = types.ModuleType(name.format(family))
        for package in itertools.accumulate(made.__name__.split("."), "{}.{}".format):  # which pickle imports
            monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        monkeypatch.setitem(sys.modules, made.__name__, made)
        exec(source, vars(made))
        return made

    return make


def pair(file):
    torch.manual_seed(0)
    plain = ak.convert(file.LlamaAttention())
    return plain, ak.convert(copy.deepcopy(plain), fuse_rotary=True)


def assert_same(plain, ours, **options):
    results = [model(X, ANGLES, **options) for model in (plain, ours)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    grads = [
        torch.autograd.grad(r.square().sum(), list(m.parameters())) for r, m in zip(results, (plain, ours), strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "source"), [("llama", SOURCE), ("phi", SOURCE), ("cohere", INTERLEAVED)])
def test_one_op_in_place_of_many(family, source, file, calls):
    plain, ours = pair(file(family, source))
    assert_same(plain, ours)
    assert calls == [{"interleaved": family == "cohere"}]
    torch.testing.assert_close(ours(X, ANGLES, old=2.0), 2 * ours(X, ANGLES))  # through the decorator
    assert len(calls) == 3


def test_an_unconverted_attention_of_the_file_stays(file, calls):
    plain, ours = pair(file())
    expected = plain(X, ANGLES)
    assert not calls

    def beside(*_):
        thread = threading.Thread(target=lambda: found.append(plain(X, ANGLES)))
        thread.start()
        thread.join()

    found = []
    ours.k_norm.register_forward_hook(beside)
    with pytest.raises(RuntimeError, match="its own"):
        ours(X, ANGLES, fail=True)
    assert torch.equal(plain(X, ANGLES), expected)
    assert torch.equal(found[0], expected)
    assert len(calls) == 1


def test_revert_restores_the_function(file, calls):
    llama = file()
    own = llama.apply_rotary_pos_emb
    plain, ours = pair(llama)
    other = copy.deepcopy(ours)
    assert llama.apply_rotary_pos_emb is not own
    assert type(ak.revert(ours)) is llama.LlamaAttention
    assert llama.apply_rotary_pos_emb is own
    assert_same(plain, other)  # a model that is still converted
    assert len(calls) == 1
    ak.revert(other)
    ak.revert(plain)
    assert llama.apply_rotary_pos_emb is own


def test_copies_pickles_and_a_second_call(file, calls):
    plain, ours = pair(file())
    for each in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), ak.convert(ours, fuse_rotary=True)):
        assert_same(plain, each)
    assert len(calls) == 3
    assert "amp_kernels.convert(fuse_rotary=True) in place of transformers.LlamaAttention" in repr(ours)
    kind = sys.modules[plain.__module__].LlamaAttention
    assert type(ak.convert(kind(), skip=[kind], fuse_rotary=True)) is kind


def test_a_dtype_that_the_op_would_not_return_is_left_to_the_model(file, calls):
    """A 16-bit model with fp32 angles gets fp32 queries, unless autocast decides."""
    half = [model.bfloat16() for model in pair(file())]
    for model in half:
        model.q_norm, model.k_norm = torch.nn.Identity(), torch.nn.Identity()
    results = [model(X.bfloat16(), ANGLES) for model in half]
    assert results[0].dtype == torch.float32
    assert torch.equal(*results)
    assert not calls
    with torch.autocast("cpu", torch.bfloat16):
        half[1](X, ANGLES)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"family": "unheard_of"},
        {"source": SOURCE.replace("* sin,", "* cos.square(),")},
        {"name": "transformers_modules.modeling_{0}"},
    ],
)
def test_a_file_that_the_table_has_not_is_named(options, file, caplog):
    found = file(**options)
    own = found.apply_rotary_pos_emb
    assert type(ak.convert(found.LlamaAttention(), fuse_rotary=True)) is found.LlamaAttention
    assert "fuse_rotary=True leaves LlamaAttention" in caplog.text
    assert found.apply_rotary_pos_emb is own


def test_a_compiled_model_runs_its_own_forward(file, calls):
    plain, ours = pair(file())
    for model in (plain, ours):
        torch._dynamo.reset()
        result = torch.compile(model, backend="eager", fullgraph=True)(X, ANGLES)
        assert not calls
        torch.testing.assert_close(result, ours(X, ANGLES), rtol=1e-5, atol=1e-5)
        calls.clear()

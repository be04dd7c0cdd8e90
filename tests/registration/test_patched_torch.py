"""A program may put this package's functions in the places of torch's: no formula here calls itself then."""

import ast

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY

from ..ops.composites import samples
from .test_layers import PACKAGE, sources

NAMES = {name: getattr(ak.nn.functional, name) for name in ak.nn.functional.__all__} | vars(ak)
PLACES = [(room, name) for room in (torch, F) for name in NAMES if callable(NAMES[name]) and hasattr(room, name)]
#: torch's functions of these names have other arguments, and torch's Python functions call them.
OTHERS = {(torch, name) for name in ("embedding", "layer_norm", "rms_norm")}
CONVERTED = ak.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU()))
COMPOSITE = [name for name, op in REGISTRY.items() if op.composite]


def outcome(function, *args, **kwargs):
    """The result of a call, its gradients and theirs; in place of what is not differentiable the type of the error."""
    found = []
    try:
        found.append(function(*args, **kwargs))
        leaves = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
        for _ in range(2):
            last = found[-1] if isinstance(found[-1], (list, tuple)) else [found[-1]]
            wide = [t.double().square().sum() for t in last if t is not None and t.requires_grad]
            found.append(torch.autograd.grad(sum(wide), leaves, create_graph=True, allow_unused=True))
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        found.append(type(error))
    return found


def everything():
    torch.manual_seed(0)
    for name in COMPOSITE:
        for args, kwargs in samples(REGISTRY[name], "cpu"):
            yield name, outcome(REGISTRY[name].overload, *args, **kwargs)
    nested = torch.nested.as_nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.strided)
    sparse, ids = torch.eye(4).to_sparse(), torch.arange(3)
    x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    yield "layer_norm", outcome(lambda: ak.layer_norm(nested, 4).to_padded_tensor(0))
    yield "rms_norm", outcome(ak.rms_norm, x.double(), 4)
    yield "gelu", outcome(lambda: ak.gelu(nested).to_padded_tensor(0))
    yield "silu", outcome(lambda: ak.silu(nested).to_padded_tensor(0))
    yield "silu_", outcome(ak.nn.functional.silu, torch.ones(3), inplace=True)
    yield "linear", outcome(ak.linear, x, sparse.to_sparse_csr())
    yield "embedding", outcome(lambda w: ak.embedding(ids, w, sparse=True).sum(), weight)
    yield "an activation", outcome(CONVERTED[1], x)
    with ak.backend("reference"):
        yield "reference", outcome(ak.linear, x.bfloat16(), weight.bfloat16(), activation="swiglu")


def same(one, other):
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if not isinstance(one, torch.Tensor):
        return one is other
    one, other = (t.to_dense() if t.layout is torch.sparse_coo else t for t in (one, other))
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("torchs_signatures", [False, True], ids=["amp_kernels", "amp_kernels.nn.functional"])
def test_formulas_do_not_call_themselves(torchs_signatures, monkeypatch):
    expected = list(everything())
    ours = ak.nn.functional if torchs_signatures else ak
    for room, name in set(PLACES) - OTHERS:
        monkeypatch.setattr(room, name, getattr(ours, name, NAMES[name]))
    for (name, before), (_, after) in zip(expected, everything(), strict=True):
        assert same(before, after), name


def called_by_name(path):
    """torch's functions that a module looks up in torch's namespaces when it runs."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.startswith("torch.nn.functional.") or text in {
                f"torch.{name}" for room, name in PLACES if room is torch
            }:
                yield text
        elif isinstance(node, ast.alias) and node.name == "torch.nn.functional":
            yield node.name


def test_no_module_looks_up_a_function_that_may_be_replaced():
    found = {name: {*called_by_name(path)} for name, path in sources(PACKAGE)}
    assert {name: texts for name, texts in found.items() if texts} == {}

"""Peers that are not installed here, played by modules that compute with torch what theirs document."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from bench import peers
from bench.ops.activation import _torch_swiglu


def function(call):
    return type("Played", (), {"apply": staticmethod(call)})


PLAYED = {
    "liger_kernel": {},
    "liger_kernel.ops": {},
    "liger_kernel.ops.fused_linear_cross_entropy": {
        "LigerFusedLinearCrossEntropyFunction": function(
            lambda x, w, y: (F.cross_entropy(x @ w.t(), y), None, None, None)
        )
    },
    "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": function(lambda gate, up: F.silu(gate) * up)},
    "quack": {},
    "quack.linear_cross_entropy": {
        "chunked_linear_cross_entropy": lambda x, w, y, chunk_size=4096: F.cross_entropy(x @ w.t(), y)
    },
    "quack.layernorm": {
        "layernorm": lambda x, weight, eps: F.layer_norm(x, weight.shape, weight.to(x.dtype), None, eps)
    },
}


@pytest.fixture
def installed(monkeypatch):
    for name, members in PLAYED.items():
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = types.SimpleNamespace(), []
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def test_peers_compute_what_they_are_timed_for(installed):
    x, w, y = torch.randn(6, 8), torch.randn(5, 8), torch.arange(6) % 5
    losses = peers.linear_cross_entropy()
    assert {"liger", "quack"} <= losses.keys()
    for loss in losses.values():
        torch.testing.assert_close(loss(x, w, y), F.cross_entropy(F.linear(x, w), y))
    torch.testing.assert_close(peers.swiglu()["liger"](x), _torch_swiglu(x))
    weight = torch.rand(8)
    torch.testing.assert_close(peers.norms("layer_norm", 1e-5)["quack"](x, weight), F.layer_norm(x, (8,), weight))


def test_a_version_that_lacks_an_op_is_no_peer_of_it(installed):
    assert peers.embedding() == {}  # no such module there
    assert peers.softmax() == {}

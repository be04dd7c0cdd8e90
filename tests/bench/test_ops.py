"""A timed call must not change the work of the next one; torch's and the peers' sides must be right."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from bench.harness.case import Scope
from bench.harness.check import worst_error
from bench.ops import gradients, linear, peers, update
from bench.ops.activation import torch_swiglu

SCOPE = Scope(torch.device("cpu"), quick=True)


def test_unscale_and_update_scale_repeat_the_same_work():
    case = next(gradients.unscale(SCOPE))
    for provider in case.providers.values():
        grads = case.inputs(torch.Generator().manual_seed(0))
        want = [grad * gradients.INVERSE for grad in grads]
        call = provider(grads)
        for _ in range(4):
            call()
        assert all(torch.equal(grad, expected) for grad, expected in zip(grads, want, strict=True))
    case = next(gradients.update_scale(SCOPE))
    for provider in case.providers.values():
        call = provider(case.inputs(torch.Generator()))
        assert [call()["scale"].item() for _ in range(3)] == [1024.0] * 3


@pytest.mark.parametrize("name", ["lamb", "lion"])
def test_the_optimizers_that_torch_lacks_are_written_right(name):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator) for shape in ((7, 5), (64,), (3, 2, 2))]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    exact = getattr(update, f"exact_{name}")
    want = [exact(param.double(), update.gradients(param.grad.double())) for param in params]
    step = getattr(update, f"torch_{name}")(params)
    step()
    torch._foreach_mul_([param.grad for param in params], update.SECOND)
    step()
    assert worst_error({"params": params}, {"params": (want, 1e-6)}) <= 1e-6


def test_a_forward_without_backward_records_nothing_and_a_backward_has_all_gradients():
    for case in linear.linear(SCOPE):
        backward = case.shape.endswith("backward")
        for provider in case.providers.values():
            got = provider(case.inputs(torch.Generator().manual_seed(0)))()
            assert not got["out"].requires_grad
            assert list(got) == ["out", "grad 0", "grad 1", "grad 2"][: 4 if backward else 1]


def test_host_rows_are_layers_under_autocast_with_fp32_weights_whose_forward_a_backward_can_follow(monkeypatch):
    recorded = []
    forward = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda *args: recorded.append(torch.is_grad_enabled()) or forward(*args)
    )
    cases = [case for case in linear.linear(SCOPE) if case.host_time]
    assert [case.shape.split(maxsplit=1)[1] for case in cases] == ["autocast forward", "autocast forward + backward"]
    for case in cases:
        for provider in case.providers.values():
            got = provider(case.inputs(torch.Generator().manual_seed(0)))()
            assert got["out"].dtype == torch.bfloat16
            assert got.get("grad 1", torch.empty(0)).dtype == torch.float32
    assert recorded
    assert all(recorded)


def function(call):
    return type("Played", (), {"apply": staticmethod(call)})


# Peers that are not installed here, played by modules that compute with torch what theirs document.
PLAYED = {
    "liger_kernel": {},
    "liger_kernel.ops": {},
    "liger_kernel.ops.fused_linear_cross_entropy": {
        "LigerFusedLinearCrossEntropyFunction": function(lambda x, w, y: (F.cross_entropy(x @ w.t(), y), None, None))
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


GPU = torch.device("cuda")


def test_peers_compute_what_they_are_timed_for_and_lack_what_their_version_lacks(monkeypatch):
    for name, members in PLAYED.items():
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = types.SimpleNamespace(), []
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    x, w, y = torch.randn(6, 8), torch.randn(5, 8), torch.arange(6) % 5
    losses = peers.functions("linear_cross_entropy", GPU)
    assert losses.keys() == {"liger", "quack"}
    for loss in [*losses.values(), *peers.torch_linear_cross_entropy().values()]:
        torch.testing.assert_close(loss(x, w, y), F.cross_entropy(F.linear(x, w), y))
    torch.testing.assert_close(peers.functions("swiglu", GPU)["liger"](x), torch_swiglu(x))
    weight = torch.rand(8)
    torch.testing.assert_close(peers.functions("layer_norm", GPU)["quack"](x, weight), F.layer_norm(x, (8,), weight))
    assert peers.functions("embedding", GPU) == peers.functions("rms_norm", GPU) == {}  # no such modules there


def test_a_peer_that_does_not_import_is_absent(tmp_path, monkeypatch):
    (tmp_path / "brokenpeer.py").write_text("raise OSError('libcudart.so.11: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.version("brokenpeer") is None
    assert peers.version("no_such_peer") is None
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    sys.modules["apex"].__spec__ = types.SimpleNamespace()
    assert peers.version("apex") == "unknown"

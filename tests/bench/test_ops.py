"""A timed call must not change the work of the next one; torch's and the peers' sides must be right."""

import sys
import types

import torch

from bench.harness.case import Scope
from bench.ops import gradients, linear, peers

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


def test_a_peer_that_does_not_import_is_absent(tmp_path, monkeypatch):
    (tmp_path / "brokenpeer.py").write_text("raise OSError('libcudart.so.11: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.version("brokenpeer") is None
    assert peers.version("no_such_peer") is None
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    sys.modules["apex"].__spec__ = types.SimpleNamespace()
    assert peers.version("apex") == "unknown"

"""Calls through torch's dispatcher, as compiled programs make them, reach the backend that the policy picks."""

import pytest
import torch

from amp_kernels._dispatch import library, policy


@pytest.fixture
def triton_only(monkeypatch):
    """An op without C++ kernels, on an install where the policy picks Triton; the backend names itself in the result."""
    op = library.define("dispatch_probe(Tensor x) -> Tensor", lambda x: x * 0, samples=lambda device: ())
    monkeypatch.setattr(policy, "_select", lambda *_: "triton")
    op.triton = lambda x: x * 0 + 1
    yield op
    del library.REGISTRY["dispatch_probe"]


def test_a_backend_without_a_dispatch_key_is_reached(triton_only):
    x = torch.zeros(3)
    assert triton_only(x).tolist() == [1, 1, 1]
    assert triton_only.overload(x).tolist() == [1, 1, 1]
    compiled = torch.compile(lambda x: triton_only(x) + 1, backend="aot_eager", fullgraph=True)
    assert compiled(x).tolist() == [2, 2, 2]
    assert triton_only.overload(x.to("meta")).is_meta

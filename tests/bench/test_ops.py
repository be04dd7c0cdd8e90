"""A timed call must not change the work of the next one, and is timed with what its row says."""

import torch

from bench.harness.case import Scope
from bench.ops import gradients, linear

from ..helpers.ops import Ops

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


def test_fp32_products_of_a_cpu_are_torchs_own():
    """So a ratio other than 1 is noise and a few microseconds of Python (docs/cpu.md)."""
    case, names = linear.plain((64, 32, 16), "fp32", torch.device("cpu")), {}
    for name in ("torch", "amp_kernels"):
        call = case.providers[name](case.inputs(torch.Generator().manual_seed(0)))
        with Ops() as ops:
            call()
        names[name] = ops.names
    assert names["torch"] == names["amp_kernels"]
    assert "aten::mm" in names["torch"]

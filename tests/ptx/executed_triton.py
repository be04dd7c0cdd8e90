"""The Triton kernels as the PTX that Triton makes of them: every op on its samples, against the reference."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw.unscale import unscale_
from amp_kernels.cli.check import check_backend

from .preloaded import set_chip

OPS = [name for name, op in sorted(REGISTRY.items()) if op.built.triton]
EVERY_RUN = {(80, "unscale_"), (80, "lion_"), (90, "update_scale_"), (90, "norm_forward"), (90, "gemm_accumulate_")}


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        pytest.param(*case, marks=[] if case in EVERY_RUN else pytest.mark.exhaustive)
        for case in ((capability, name) for capability in (80, 90) for name in OPS)
    ],
)
def test_samples(capability, name, seeds):
    for seed in seeds:
        it = set_chip(capability, 2)
        it.seed = seed
        it.launched.clear()
        assert check_backend(REGISTRY[name], "triton", "cuda") > 0
        assert it.launched


def test_a_captured_kernel_runs_at_each_replay():
    """With the table of tensors that the graph has copied to the device in front of it."""
    it = set_chip(80, 2)
    it.seed = 0
    grads = [torch.ones(300).cuda(), torch.ones(70).half().cuda()]
    found, inverse = torch.zeros(()).cuda(), torch.tensor(0.5).cuda()
    graph = torch.cuda.CUDAGraph()
    it.launched.clear()
    with ak.backend("triton"), torch.cuda.graph(graph):
        unscale_(grads, found, inverse)
    assert not it.launched, "a captured launch has run"
    for _ in range(2):
        graph.replay()
    assert it.launched == ["unscale_kernel"] * 2
    assert all(grad.cpu().eq(0.25).all() for grad in grads)
    assert found.item() == 0

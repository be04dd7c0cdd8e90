"""tests/gpu/test_rows.py: here the runtime and torch's ops refuse to wait, in torch.cuda.set_sync_debug_mode's name, and a graph is
the fake runtime's. Rows that the blocks of a cluster share, which need more SMs than samples have."""

import pytest
import torch

import amp_kernels as ak

from ..gpu.test_rows import (  # noqa: F401
    test_a_graph_replays_the_call,
    test_a_wait_is_noticed,
    test_no_call_waits,
)
from .preloaded import set_chip
from .shared_rows import COLUMNS, shared_rows


@pytest.fixture
def backend():
    set_chip(90, 2).seed = 0
    with ak.backend("cuda"):
        yield "cuda"


@pytest.mark.parametrize(("columns", "cluster"), COLUMNS.items())
def test_rows_that_a_cluster_shares(columns, cluster, seeds):
    for seed in seeds:
        it = set_chip(90, 8)
        it.seed = seed
        it.prepared.clear()  # of other tests
        arguments, exact = shared_rows(columns, torch.bfloat16 if seed % 2 else torch.float32)
        rows, sums, _ = ak.backend("cuda")(ak._raw.norm_backward.op)(*arguments, parameters=1)
        first = next(launch for launch in it.prepared if "norm_backward_ring_kernel" in launch.kernel.name)
        assert first.cluster == (cluster, 1, 1)
        assert torch.equal(sums[0].double(), exact[1])
        torch.testing.assert_close(rows.double(), exact[0], rtol=2.0**-8 if seed % 2 else 1e-5, atol=1e-2)

"""tests/gpu/test_rows.py: here the runtime and torch's ops refuse to wait, in torch.cuda.set_sync_debug_mode's name, and a graph is
the fake runtime's."""

import pytest

import amp_kernels as ak

from ..gpu.test_rows import (  # noqa: F401
    test_a_graph_replays_the_call,
    test_a_replayed_gradient_has_the_mask_of_its_forward,
    test_a_wait_is_noticed,
    test_each_replay_draws_a_mask,
    test_no_call_waits,
)
from .preloaded import set_chip


@pytest.fixture
def backend():
    set_chip(90, 2).seed = 0
    with ak.backend("cuda"):
        yield "cuda"

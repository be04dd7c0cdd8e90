"""The ops between the products of a training step: no call waits for the device, and a graph replays each."""

import pytest
import torch

import amp_kernels as ak

from . import launches
from .row_calls import CALLS

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["cuda", "triton"])
def backend(request):
    with ak.backend(request.param):
        yield request.param


def captured(call):
    """A graph of the call, and what its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles, and makes what is made once
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


@pytest.mark.parametrize("name", CALLS)
def test_no_call_waits(name, backend):
    call = CALLS[name]()
    call()
    with launches.no_waits():
        call()


def test_a_wait_is_noticed(backend):
    """Else the test above sees nothing."""
    t = torch.ones(3, device="cuda")
    with launches.no_waits():
        for wait in (t.sum().item, t.cpu, t.nonzero, lambda: t[t > 0], torch.cuda.current_stream().synchronize):
            with pytest.raises(RuntimeError):
                wait()


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_replays_the_call(name, backend):
    want = [t.clone() for t in CALLS[name]()()]
    call = CALLS[name]()  # whose tensors the graph reads
    graph, results = captured(call)
    for _ in range(2):
        for t in results:
            t.zero_()
        graph.replay()
        assert all(map(torch.equal, results, want))

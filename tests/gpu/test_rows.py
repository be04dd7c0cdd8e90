"""The ops between the products of a training step: no call waits for the device, and a graph replays each."""

import pytest
import torch

import amp_kernels as ak

from . import launches
from .row_calls import CALLS

pytestmark = pytest.mark.gpu

DROPOUTS = [name for name in CALLS if "dropout" in name]


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


@pytest.mark.parametrize("name", [name for name in CALLS if name not in DROPOUTS])
def test_a_graph_replays_the_call(name, backend):
    want = [t.clone() for t in CALLS[name]()()]
    call = CALLS[name]()  # whose tensors the graph reads
    graph, results = captured(call)
    for _ in range(2):
        for t in results:
            t.zero_()
        graph.replay()
        assert all(map(torch.equal, results, want))


@pytest.mark.parametrize("name", DROPOUTS)
def test_each_replay_draws_a_mask(name, backend):
    """The seed alone decides the mask; the gradient in the graph uses the same one."""
    torch.manual_seed(1)  # an earlier test may have left one of the seeds below
    call = CALLS[name]()
    graph, results = captured(call)
    found = []
    for seed in (None, None, 7, 8, 7):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        found.append([t.clone() for t in results])
    for i, one in enumerate(found):
        for j, other in enumerate(found):
            assert torch.equal(one[0], other[0]) == (i == j or {i, j} == {2, 4})
    assert all(map(torch.equal, found[2], found[4]))


def test_a_replayed_gradient_has_the_mask_of_its_forward(backend):
    x, stream = torch.ones(1000, device="cuda", requires_grad=True), torch.zeros(1000, device="cuda")

    def call():
        out = ak.dropout_add(x, stream, 0.5)
        return [out.detach(), *torch.autograd.grad(out.sum(), x)]

    graph, (out, grad) = captured(call)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, grad)
        assert 300 < (out == 2).sum().item() < 700
        assert ((out == 0) | (out == 2)).all()

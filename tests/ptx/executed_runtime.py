"""The host side around the kernels: streams, graphs, whole training steps, errors of launches."""

import ctypes
import itertools
import re

import pytest
import torch

import amp_kernels as ak
from amp_kernels import _host
from amp_kernels._raw.check_and_norm import check_and_norm
from amp_kernels._raw.exponent_histogram import exponent_histogram
from amp_kernels._raw.unscale import unscale_

from ..helpers.processes import python
from ..ops import raw
from .preloaded import machine, set_chip

machine()
F16, F32 = torch.float16, torch.float32


def model_and_data(device: str, seed: int = 0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(ak.nn.Linear(40, 48, activation="relu"), ak.nn.Linear(48, 8))
    data = [torch.randint(-2, 3, (24, 40)).float() for _ in range(4)]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-4, 5, p.shape) / 16)
    return model.to(device), [d.to(device) for d in data]


def optimizer_of(name: str, model: torch.nn.Module, lr):
    """The optimizer of all parameters; Muon leaves the vectors to AdamW."""
    if name != "Muon":
        return getattr(ak.optim, name)(model.parameters(), lr=lr)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    return ak.optim.Muon([{"params": matrices}, {"params": vectors, "algorithm": "adamw"}], lr=lr)


def train(device: str, name: str, dtype, max_norm):
    model, data = model_and_data(device)
    optimizer = optimizer_of(name, model, 1e-2)
    scaler = ak.GradScaler(device, init_scale=1024.0, growth_interval=2)
    for i, x in enumerate(data):
        with torch.autocast(device, dtype=dtype):
            loss = model(x if i != 2 else x * float("inf")).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()], scaler.get_scale()


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "LAMB", "Muon"])
@pytest.mark.parametrize("capability", [80, 90])
def test_training_is_that_of_the_cpu(name, capability, seeds):
    """Forward, backward, norm, clipping, update, scale; the third step overflows and is skipped."""
    want, scale = train("cpu", name, torch.bfloat16, 0.5)
    for seed in seeds:
        it = set_chip(capability, 2)
        it.seed = seed
        it.launched.clear()
        got, got_scale = train("cuda", name, torch.bfloat16, 0.5)
        assert got_scale == scale
        torch.testing.assert_close([*got], [*want], rtol=2e-2, atol=2e-3)
        kinds = {
            kind
            for kind in ("gemm_sm", "check_and_norm", "update_kernel", "update_scale")
            for n in it.launched
            if kind in n
        }
        assert kinds == {"gemm_sm", "check_and_norm", "update_kernel", "update_scale"}


def test_a_graph_replays_with_what_memory_holds_then():
    it = set_chip(90, 2)
    it.seed = 0
    grads = [torch.randn(300).cuda(), torch.randn(70).half().cuda()]
    scale = torch.tensor(4.0).cuda()
    graph = torch.cuda.CUDAGraph()
    it.launched.clear()
    with torch.cuda.graph(graph):
        norm, found = check_and_norm(grads, scale)
    assert not it.launched, "a captured launch has run"
    for round_ in range(3):
        new = [torch.randn(g.shape).to(g.dtype) for g in grads]
        if round_ == 1:
            new[1][5] = float("inf")
        for g, value in zip(grads, new, strict=True):
            g.copy_(value)
        graph.replay()
        want = check_and_norm(new, torch.tensor(4.0))
        torch.testing.assert_close(norm.cpu(), want[0], rtol=1e-6, atol=0, equal_nan=True)
        assert found.cpu().item() == want[1].item() == float(round_ == 1)
    assert len(it.launched) == 3


@pytest.mark.parametrize(("name", "dtype"), [("AdamW", F32), ("SGD", F16)])
def test_a_step_in_a_graph_launches_what_an_eager_one_does(name, dtype):
    """And computes what the CPU does; the second batch of gradients overflows."""
    it = set_chip(90, 2)
    it.seed = 0
    batches = [[(1.0 + i) * torch.ones(n) for n in (300, 70)] for i in range(3)]
    batches[1][1][5] = torch.inf
    found = []
    for device in ("cpu", "cuda"):
        params = torch.nn.ParameterList([torch.ones(n).to(device, dtype) for n in (300, 70)])
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer = getattr(ak.optim, name)(params, lr=torch.tensor(2.0**-5).to(device))
        scaler = ak.GradScaler(device, init_scale=2.0, growth_interval=2)

        def update(*grads, params=params, optimizer=optimizer, scaler=scaler):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            scaler.step(optimizer, max_norm=0.5)
            scaler.update()

        scaler.scale(torch.ones(()).to(device))
        step = ak.graph_step(update, model=params, optimizer=optimizer, scaler=scaler) if device == "cuda" else update
        launched = []
        for batch in batches:
            it.launched.clear()
            step(*(grad.to(device, dtype) for grad in batch))
            launched.append(list(it.launched))
        found.append([param.detach().cpu() for param in params])
    for kind in ("check_and_norm", "update_kernel", "update_scale"):
        assert any(kind in kernel for kernel in launched[1])
    assert launched[1] == launched[2]
    assert sorted(launched[0]) == sorted(launched[1] * 4)  # three steps to warm up, and the first replay
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_graph_of_muon_has_its_numbers_from_memory():
    """A learning rate or decay that is set between two replays counts, as in the loop without a graph, to the bit; dion's graph
    (microsoft/dion#104) kept those of the capture."""
    it = set_chip(90, 2)
    it.seed = 0
    found = []
    for graphed in (False, True):
        model, data = model_and_data("cuda")
        optimizer = optimizer_of("Muon", model, 2.0**-5)

        def update(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(x.half().float()).square().mean().backward()
            optimizer.step()

        step = ak.graph_step(update, model=model, optimizer=optimizer) if graphed else update
        moved = []
        for x, lr, decay in zip(data, (2.0**-5, 0.0, 2.0**-4, 2.0**-6), (0.5, 0.5, 2.0, 0.0), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr
                group["weight_decay"] = decay
            prepared = len(it.prepared)
            before = [p.detach().cpu() for p in model.parameters()]
            step(x)
            moved.append([p.detach().cpu() for p in model.parameters()])
            assert all(map(torch.equal, moved[-1], before)) == (lr == 0.0)
        if graphed:
            assert step._graph is not None
            assert len(it.prepared) == prepared  # the last call replays
        found.append(moved)
    for plain, replayed in zip(*found, strict=True):
        assert all(map(torch.equal, plain, replayed))


def split_product():
    """The machine, zeros in fp32, and operands whose product its four multiprocessors add to them in parts of k."""
    it = set_chip(90, 4)
    it.seed = 0
    assert _host.plan_gemm(8, 16, 4096, sm_count=4, out_bytes=8)["splits"] > 1
    return it, torch.zeros(8, 16).cuda(), torch.ones(8, 4096).half().cuda(), torch.ones(16, 4096).half().cuda().T


def test_a_second_product_asks_the_runtime_for_nothing():
    """Device, shared memory and tensor maps are known by then; the counters of a split product are 0 as the first one left them."""
    it, c, a, b = split_product()
    names = ("cudaDeviceGetAttribute", "cudaFuncSetAttribute", "cuTensorMapEncodeTiled", "cudaMemsetAsync")
    counts = []
    for i in range(1, 4):
        raw.gemm_accumulate_(c, a, b)
        assert c.cpu().eq(4096 * i).all()
        counts.append([it.calls(name) for name in names])
    assert counts[0] == counts[1] == counts[2]
    assert all(counts[0])


def test_a_split_product_in_a_graph_has_counters_of_its_own():
    """A graph may run beside what its stream does later, so it zeroes them itself."""
    it, c, a, b = split_product()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # has counters from here on
        raw.gemm_accumulate_(c, a, b)
    before = it.calls("cudaMemsetAsync")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        raw.gemm_accumulate_(c, a, b)
    assert it.calls("cudaMemsetAsync") == before + 1
    for i in range(2, 4):
        graph.replay()
        assert c.cpu().eq(4096 * i).all()


def test_a_kernel_does_not_overlap_the_memset_in_front_of_it():
    """A programmatic dependency of a graph begins at a kernel."""
    it, c, a, b = split_product()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for op in (lambda: raw.gemm_accumulate_(c, a, b), lambda: check_and_norm([a]), lambda: exponent_histogram([a])):
            op()
            assert not it.prepared[-1].may_overlap
            unscale_([a], c[0, 1], c[0, 0])
            assert it.prepared[-1].may_overlap


def test_a_streams_counters_are_not_of_torchs_allocator():
    """They stay for good; what warms up a graph's memory (torch.compile's graphs) has all that torch allocates given back to it."""
    it, c, a, b = split_product()
    modes = [it.calls("cudaThreadExchangeStreamCaptureMode")]
    with torch.cuda.stream(torch.cuda.Stream()):
        for i in range(1, 3):
            raw.gemm_accumulate_(c, a, b)
            assert c.cpu().eq(4096 * i).all()
            modes.append(it.calls("cudaThreadExchangeStreamCaptureMode"))
    # Around the one allocation of the runtime's: another thread may capture.
    assert modes == [modes[0], modes[0] + 2, modes[0] + 2]


def external_stream(it) -> torch.cuda.ExternalStream:
    handle = ctypes.c_void_p()
    assert it.runtime.cudaStreamCreate(ctypes.byref(handle)) == 0
    return torch.cuda.ExternalStream(handle.value)


def test_a_stream_with_the_handle_of_a_destroyed_one_has_counters_of_its_own():
    """Work of the destroyed stream may still be running, and counts there."""
    it, c, a, b = split_product()
    handles, memsets = [], [it.calls("cudaMemsetAsync")]
    for i in range(1, 4):
        stream = external_stream(it)
        handles.append(stream.cuda_stream)
        for half in range(2):
            with torch.cuda.stream(stream):
                raw.gemm_accumulate_(c, a, b)
            assert c.cpu().eq(4096 * (2 * i - 1 + half)).all()
        memsets.append(it.calls("cudaMemsetAsync"))
        it.runtime.cudaStreamDestroy(ctypes.c_void_p(stream.cuda_stream))
    assert len(set(handles)) == 1
    assert [after - before for before, after in itertools.pairwise(memsets)] == [1, 1, 1]


MANY_STREAMS = """
from tests.ptx.preloaded import machine, set_chip
machine()
import torch
from tests.ptx.executed_runtime import check_and_norm, external_stream
it, grads = set_chip(90, 2), [torch.ones(3).cuda()]
it.seed = 0
streams = [external_stream(it) for _ in range(257)]
for stream in [*streams, streams[0], streams[-1]]:
    before = it.calls("cudaMemsetAsync")
    with torch.cuda.stream(stream):
        assert check_and_norm(grads, None)[0].cpu().item() == 3.0
    print(it.calls("cudaMemsetAsync") - before)
"""


def test_counters_are_kept_for_a_limited_number_of_streams():
    """Else a program that makes a stream for each step would never stop to take memory. A process of its own: they are kept for good."""
    memsets = list(map(int, python("-c", MANY_STREAMS).stdout.split()))
    assert memsets[:257] == [1] * 257
    assert memsets[257:] == [0, 1]  # the first stream has its counters; the last zeroes memory at each call


def test_work_follows_the_stream_that_is_current():
    it = set_chip(90, 2)
    it.seed = 0
    grads = [torch.randn(100).cuda()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        norm, _ = check_and_norm(grads, None)
        event = stream.record_event()
    torch.cuda.current_stream().wait_event(event)
    torch.testing.assert_close(norm.cpu(), grads[0].cpu().double().square().sum().float(), rtol=1e-6, atol=0)


def test_a_list_longer_than_a_launch():
    """More tensors than fit the arguments: several launches that share their scratch."""
    it = set_chip(80, 2)
    it.seed = 0
    values = [torch.full((3,), float(i % 7)) for i in range(1600)]
    it.launched.clear()
    norm, found = check_and_norm([v.cuda() for v in values], None)
    assert len(it.launched) == 2
    assert norm.cpu().item() == sum(3.0 * (i % 7) ** 2 for i in range(1600))
    assert found.cpu().item() == 0


def test_an_error_of_a_kernel_says_what_was_wrong():
    it = set_chip(90, 2)
    it.seed = 0
    it.rewrite = lambda name, text: re.sub(r"bar\.sync\s+0;", "bar.sync 0, 33;", text)
    try:
        with pytest.raises(RuntimeError, match=r"barrier 0 for 33 threads.*bar\.sync 0, 33"):
            check_and_norm([torch.ones(10).cuda()], None)
    finally:
        it.rewrite = None

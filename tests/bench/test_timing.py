"""The timer's CUDA side against a stand-in for torch.cuda with a clock of its own: a mistake in it would only show on a GPU."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent

from amp_kernels._dispatch.library import REGISTRY
from bench.harness import timer as timing
from bench.harness.case import Scope
from bench.harness.timer import Effort, Timer
from bench.ops import OPS, gemm, providers

GPU = torch.device("cuda", 0)
EFFORT = Effort(settle=0.0, warmup=0.1, sample=0.02, rounds=5)


class Machine:
    """A call keeps the host busy for 3 ms and the device for 1 ms, unless told otherwise, and after a wait the host for
    2 ms more; a replayed graph costs the host nothing."""

    def __init__(self, monkeypatch, capturable=True, seconds=(3e-3, 1e-3)):
        self.host = self.device = 0.0
        self.of_host, self.of_device = seconds
        self.cold = False
        self.capturable, self.capturing = capturable, False
        self.eager_calls = 0
        self.stuck = False  # in a capture whose end has raised
        self.pools = []  # that the allocator takes for those of a capture
        self.own = SimpleNamespace(wait_stream=lambda other: None, device=torch.device("cpu"))
        self.stream = self.own
        machine = self

        class Graph:
            calls = 0

            def replay(self):
                machine.device = max(machine.device, machine.host) + 1e-3 * self.calls

        @contextlib.contextmanager
        def graph(captured, pool=(0, 0), *, stream):
            assert stream is machine.own
            machine.capturing, machine.stream, machine.stuck = captured, "torch's own", True
            machine.pools.append(pool)
            try:
                yield
            finally:
                machine.capturing = False
            machine.stream, machine.stuck = machine.own, False
            machine.pools.remove(pool)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.time = max(machine.device, machine.host)

            def synchronize(self):
                machine.synchronize()

            def elapsed_time(self, end):
                return 1e3 * (end.time - self.time)

        fakes = {
            "CUDAGraph": Graph,
            "graph": graph,
            "Event": Event,
            "Stream": lambda device: self.own,
            "stream": lambda other: contextlib.nullcontext(),
            "current_stream": lambda device=None: self.stream,
            "graph_pool_handle": lambda: (0, 1),
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "synchronize": lambda device=None: self.synchronize(),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: self.pools.remove(pool))
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.host)

    def synchronize(self):
        self.host = max(self.host, self.device)
        self.cold = True

    def call(self):
        if self.capturing:
            if not self.capturable:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.capturing.calls += 1
            return
        self.eager_calls += 1
        self.host += self.of_host + (2e-3 if self.cold else 0.0)
        self.cold = False
        self.device = max(self.device, self.host) + self.of_device


def test_short_calls_are_replayed_without_their_launches(monkeypatch):
    machine = Machine(monkeypatch)
    timer = Timer([machine.call, machine.call], GPU, EFFORT, graph=True)
    assert timer.kind == "graph"
    assert timer.sample() == pytest.approx(1e-3)
    assert timer.repeats in (9, 10)  # of two calls each: the sample's 20 ms
    assert machine.eager_calls == 4  # first calls and those before the capture


def test_calls_that_cannot_be_captured_are_timed_with_their_launches(monkeypatch):
    machine = Machine(monkeypatch, capturable=False)
    timer = Timer([machine.call], GPU, EFFORT, graph=True)
    assert timer.kind == "eager"
    assert timer.sample() == pytest.approx(3e-3)
    assert timer.apart(EFFORT) == {"host_us": pytest.approx(3000)}
    assert not machine.stuck
    assert not machine.pools
    assert machine.stream is machine.own


def test_host_and_device_come_apart_and_the_timing_stays_what_it_was(monkeypatch):
    machine = Machine(monkeypatch)
    timer = Timer([machine.call, machine.call], GPU, EFFORT, graph=False)
    before = timer.sample()
    assert timer.apart(EFFORT) == {"host_us": pytest.approx(3000), "device_us": pytest.approx(1000)}
    assert timer.kind == "eager"
    assert timer.sample() == pytest.approx(before)


def test_a_long_call_is_timed_with_the_host_ahead_of_the_device(monkeypatch):
    """Once a sample, the host's part before the first kernel must not count: in training the device is busy then."""
    machine = Machine(monkeypatch, seconds=(3e-3, 30e-3))
    timer = Timer([machine.call], GPU, EFFORT, graph=False)
    assert timer.repeats == 1
    assert timer.sample() == pytest.approx(30e-3)


def test_input_sets_exceed_the_l2_cache_together(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=60 << 20))
    for size in (1 << 10, 3 << 19, 1 << 24, 1 << 30):
        assert timing.rotation(size, GPU) * size >= min(2 * (60 << 20), 128 * size)
        assert 1 <= timing.rotation(size, GPU) <= 128
    assert timing.rotation(1 << 10, torch.device("cpu")) == 1


def test_the_cases_of_an_h200_have_names_of_their_own_and_fit_into_it(monkeypatch):
    monkeypatch.setattr(providers, "backends", lambda op, device: {"amp_kernels": "cuda"})
    monkeypatch.setattr(gemm, "rotation", lambda size, device: max(1, (240 << 20) // size))
    memory = 0.95 * 139 * 2**30
    found = []
    for cases in OPS.values():
        found += cases(Scope(GPU, memory=memory))
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert max(case.memory for case in found) < memory
    for case in found:
        by_triton = REGISTRY["adamw_"].built.triton and case.op not in ("grouped_mm", "syrk", "newton_schulz")
        assert ("amp_kernels:triton" in case.providers) == by_triton, case.name
    step = {(case.shape, case.dtype) for case in found if case.op == "step"}
    assert {("llama-1b", "bf16 + split, bf16 moments"), ("resnet-50", "fp32 + bf16 shadow")} <= step
    assert sum(case.op == "step" and case.shape == "10000 x 64" for case in found) == 2


def test_a_kernel_counts_from_the_end_of_those_before_it():
    """The second starts early and waits; the third runs beside it to the end, and the last one begins after a gap."""
    spans = [("b", 2.0, 15.0), ("a", 0.0, 10.0), ("c", 12.0, 14.0), ("a", 20.0, 21.0)]
    assert {name: (count, time) for name, count, time in timing.behind_each_other(spans)} == {
        "a": (2, 11.0),
        "b": (1, 5.0),
        "c": (1, 0.0),
    }


def test_the_kernels_of_a_profile_are_those_of_the_device(monkeypatch):
    place = torch.autograd.DeviceType
    spans = [("a", 0.0, 4.0, place.CUDA), ("b", 2.0, 9.0, place.CUDA), ("aten::mm", 0.0, 50.0, place.CPU)]
    events = [FunctionEvent(0, name, 0, *span, device_type=where) for name, *span, where in spans]
    replaced = {name: lambda self: None for name in ("start", "stop")} | {"events": lambda self: events}
    monkeypatch.setattr(torch.profiler, "profile", type("profile", (torch.profiler.profile,), replaced))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert timing.kernel_times(lambda: None, GPU) == [("b", 1, 5.0), ("a", 1, 4.0)]


def test_a_call_that_others_delay_does_not_count_on_a_cpu(monkeypatch):
    clock, delays = [0.0], iter([1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.25] + 60 * [0.0])

    def call():
        clock[0] += 4e-3 + next(delays)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    timer = Timer([call], torch.device("cpu"), Effort(settle=0.0, warmup=0.008, sample=0.022, rounds=1), graph=False)
    assert timer.repeats == 5
    assert timer.sample() == pytest.approx(4e-3)

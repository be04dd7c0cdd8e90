"""Times one provider of a case: repeated calls, CUDA graphs, rotating inputs, the host's share."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from amp_kernels._dispatch.capture import capture


@dataclass
class Effort:
    """Seconds and rounds of a measurement. `settle` is for each ceiling, `warmup` for each provider of a case."""

    settle: float
    warmup: float
    sample: float
    rounds: int

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> "Effort":
        if device.type == "cuda":
            return cls(0.5, 0.1, 0.002, rounds=9) if quick else cls(2.0, 0.2, 0.008, rounds=11)
        return cls(0.3, 0.1, 0.02, rounds=9) if quick else cls(0.5, 0.1, 0.03, rounds=15)


def kernel_times(call: Callable[[], Any], device: torch.device) -> list[tuple[str, int, float]]:
    """Name, number and microseconds of the kernels that a call launches, the longest first; on the CPU torch's operators."""
    cuda = device.type == "cuda"
    activity = getattr(torch.profiler.ProfilerActivity, "CUDA" if cuda else "CPU")
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        call()
        if cuda:
            torch.cuda.synchronize(device)
    if cuda:
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        found = behind_each_other((event.name, event.time_range.start, event.time_range.end) for event in events)
    else:
        found = [(event.key, event.count, event.self_cpu_time_total) for event in profile.key_averages()]
    return sorted((entry for entry in found if entry[2]), key=lambda entry: entry[2], reverse=True)


def behind_each_other(spans: Iterable[tuple[str, float, float]]) -> list[tuple[str, int, float]]:
    """Name, number and time of kernels (name, start, end), each counted from the end of those before it: with programmatic dependent
    launch a kernel starts early and waits."""
    found: dict[str, tuple[int, float]] = {}
    latest = float("-inf")
    for name, start, end in sorted(spans, key=lambda span: span[1:]):
        count, time = found.get(name, (0, 0.0))
        found[name] = count + 1, time + max(0.0, end - max(start, latest))
        latest = max(latest, end)
    return [(name, count, time) for name, (count, time) in found.items()]


def kernels_of(call: Callable[[], Any], device: torch.device) -> list[str]:
    """Names of the kernels that a call launches, the longest running first; on the CPU those of torch's operators."""
    return [name[:240] for name, _, _ in kernel_times(call, device)]


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile, linearly interpolated."""
    ordered = sorted(values)

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    return at(0.2), at(0.5), at(0.8)


class Timer:
    """Repeats calls, one for each set of inputs; `sample()` is the seconds of a call: on a GPU the mean over one batch of them, on a
    CPU, where others delay single calls, the median."""

    def __init__(self, calls: list[Callable[[], Any]], device: torch.device, effort: Effort, graph: bool):
        self.calls, self.device = calls, device
        self.replay = self._run_all
        self.kind = "eager"
        for call in self.calls:  # run-time compilation, handles, optimizer state
            call()
        if device.type == "cuda" and graph:
            self.replay, self.kind = self._captured()
        once = self._time(1)
        count = max(1, int(effort.warmup / once))
        self.repeats = max(1, int(effort.sample / min(once, self._time(count) / count)))

    def sample(self) -> float:
        if self.device.type != "cuda":
            return statistics.median(self._time(1) for _ in range(self.repeats)) / len(self.calls)
        return self._time(self.repeats) / (self.repeats * len(self.calls))

    def _run_all(self) -> None:
        for call in self.calls:
            call()

    def apart(self, effort: Effort) -> dict[str, float]:
        """Microseconds of a call that the host is busy, and, where it can be captured, those of the device alone. The host's
        are of calls that follow others: what a wait for the device adds, to wake up with cold caches, is not the call's."""
        host = []
        for _ in range(effort.rounds):
            self._synchronize()
            self._run_all()
            begin = time.perf_counter()
            self._run_all()
            host.append((time.perf_counter() - begin) / len(self.calls))
        found = {"host_us": statistics.median(host) * 1e6}
        if self.device.type == "cuda":
            eager = self.replay
            self.replay, kind = self._captured()
            if kind == "graph":
                self._time(self.repeats)
                found["device_us"] = statistics.median(self.sample() for _ in range(effort.rounds)) * 1e6
            self.replay = eager
        return found

    def _captured(self) -> tuple[Callable[[], None], str]:
        """The calls as a CUDA graph. Calls that wait for the device cannot be captured and stay eager."""
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._run_all()
        torch.cuda.current_stream(self.device).wait_stream(side)
        replay, kind = self._run_all, "eager"
        with contextlib.suppress(RuntimeError):
            with capture(graph):
                self._run_all()
            replay, kind = graph.replay, "graph"
        self._synchronize()
        return replay, kind

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _time(self, repeats: int) -> float:
        """Seconds of `repeats` rotations through all input sets."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(repeats):
                self.replay()
            return time.perf_counter() - begin
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._synchronize()
        if self.kind == "eager":
            self.replay()  # while the device is busy with it the host gets ahead: no start of the host's is timed
        begin.record()
        for _ in range(repeats):
            self.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def rotation(bytes_per_call: int, device: torch.device) -> int:
    """Number of input sets that together have four times the size of a GPU's L2; one on the CPU, or for a GPU that is not here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(128, -(-4 * l2 // max(bytes_per_call, 1))))

"""Times the providers of a case against each other, after checking that each one is right.

A *case* is one op at one shape and dtype; a *provider* is one implementation of it (torch, amp_kernels, a peer). The
method:

- A provider is first checked on fresh inputs against a float64 reference. A wrong result is reported and never timed.
- Providers are timed in turns (A B A B) in one process, so that clocks, power and neighbours hit all alike; after a
  warm-up that lasts seconds on a GPU, whose clock only then falls to what it sustains. Figures are quantiles over the
  rounds; the speed-up is the median of the ratios within a round.
- On a GPU the inputs rotate among several sets, together larger than the L2 cache, and short kernels are replayed
  from a CUDA graph, so that launches do not hide them. A case that asks for it (`host_time`) is timed with its
  launches.
- Data is random: zeros draw less power, run faster and hide unwritten outputs.
- The roofline is measured in the same run (`roofline.py`). A row's share of it is the least time the counted bytes
  and flops could take, over the median time.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], dict[str, Any]]


@dataclass
class Case:
    """One op at one shape and dtype.

    `inputs(generator)` draws fresh inputs. `providers[name](inputs)` prepares a call without arguments that returns
    its results by name, each a tensor or a list (an in-place op returns what it changed); speed-ups refer to the
    first provider. `reference(inputs)`, computed before the call, gives for each name the values in float64 and the
    largest accepted relative error. A provider may leave out a result that it keeps in another form, but not the
    first. `bytes` and `flops` count the least that must be moved and computed.
    """

    op: str
    shape: str
    dtype: str
    bytes: int
    flops: int
    inputs: Callable[[torch.Generator], Any]
    providers: dict[str, Callable[[Any], Call]]
    reference: Callable[[Any], dict[str, tuple[Any, float]]]
    host_time: bool = False
    check_calls: int = 1  # the check runs the call so often; state that only a second step reads needs two
    backends: dict[str, str] = field(default_factory=dict)


class Mismatch(Exception):
    """A provider's result is not the reference's."""


def worst_error(got: dict[str, Any], want: dict[str, tuple[Any, float]]) -> float:
    """The largest relative error of the results. Raises Mismatch where one is above its bound, as NaN is, or misshapen.

    The error of a tensor is that of its worst row, in units of the norm of an average row: the norm of the whole
    would hide a wrong tile of a large matrix.
    """
    if next(iter(want)) not in got:
        raise Mismatch(f"no result {next(iter(want))!r}")
    worst = 0.0
    for name, result in got.items():
        expected, bound = want[name]
        result, expected = _as_list(result), _as_list(expected)
        if len(result) != len(expected):
            raise Mismatch(f"{name}: {len(result)} tensors instead of {len(expected)}")
        for i, (g, w) in enumerate(zip(result, expected, strict=True)):
            if g.shape != w.shape:
                raise Mismatch(f"{name}[{i}] has shape {list(g.shape)} instead of {list(w.shape)}")
            error = _row_error(g, w)
            if not error <= bound:
                raise Mismatch(f"{name}[{i}]: relative error {error:.2e}, accepted {bound:.2e}")
            worst = max(worst, error)
    return worst


def _row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    row = want.shape[-1] if want.dim() > 1 else want.numel()
    want = want.double().reshape(-1, row)
    difference = (got.double().reshape(-1, row) - want).norm(dim=1).max().item()
    average = want.norm().item() / want.shape[0] ** 0.5
    return difference / average if average else difference


def _as_list(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


@dataclass
class Effort:
    """How long to look, in seconds and rounds."""

    warmup: float
    sample: float
    rounds: int

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> "Effort":
        if device.type == "cuda":
            return cls(warmup=0.1, sample=0.002, rounds=9) if quick else cls(warmup=0.4, sample=0.01, rounds=25)
        return cls(warmup=0.02, sample=0.005, rounds=5) if quick else cls(warmup=0.1, sample=0.03, rounds=15)


def measure(case: Case, device: torch.device, effort: Effort, chosen: set[str] | None = None) -> list[dict]:
    """One row for each provider of the case (those in `chosen`): its error and times, or why there are none."""
    rows, timers = [], {}
    for name in case.providers:
        if chosen is not None and name.split(":")[0] not in chosen:
            continue
        row: dict[str, Any] = {"provider": name, "status": "ok"}
        rows.append(row)
        try:
            row["error"] = _check(case, name, device)
            timers[name] = Timer(case, name, device, effort)
        except Mismatch as error:
            row.update(status="wrong", reason=str(error))
        except Exception as error:  # a peer that cannot run here must not end the run
            row.update(status="failed", reason=f"{type(error).__name__}: {error}".splitlines()[0])
    samples = _interleave(timers, effort)
    baseline = next(iter(case.providers))
    for row in rows:
        seconds = samples.get(row["provider"])
        if seconds is None:
            continue
        p20, p50, p80 = quantiles(seconds)
        row.update(p20_us=p20 * 1e6, p50_us=p50 * 1e6, p80_us=p80 * 1e6, timing=timers[row["provider"]].kind)
        if baseline in samples:
            row["baseline"] = baseline
            row["speedup"] = statistics.median(b / s for b, s in zip(samples[baseline], seconds, strict=True))
    for row in rows:
        row.update(op=case.op, shape=case.shape, dtype=case.dtype, bytes=case.bytes, flops=case.flops)
        if row["provider"] in case.backends:
            row["backend"] = case.backends[row["provider"]]
    return rows


def _check(case: Case, name: str, device: torch.device) -> float:
    inputs = case.inputs(torch.Generator(device).manual_seed(1))
    want = case.reference(inputs)
    call = case.providers[name](inputs)
    for _ in range(case.check_calls):
        got = call()
    return worst_error(got, want)


def _interleave(timers: dict[str, "Timer"], effort: Effort) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(effort.rounds):
        for name, timer in timers.items():
            samples[name].append(timer.sample())
    return samples


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
    """Repeats one provider over rotating inputs; `sample()` is the mean seconds of a call over one batch of them."""

    def __init__(self, case: Case, name: str, device: torch.device, effort: Effort):
        self.device = device
        generator = torch.Generator(device).manual_seed(2)
        sets = rotation(case.bytes, device)
        self.calls = [case.providers[name](case.inputs(generator)) for _ in range(sets)]
        self.replay = self._run_all
        self.kind = "eager"
        for call in self.calls:  # run-time compilation, handles, optimizer state
            call()
        if device.type == "cuda" and not case.host_time:
            self._capture()
        once = self._time(1)
        self._time(max(1, int(effort.warmup / once)))
        self.repeats = max(1, int(effort.sample / self._time(1)))

    def sample(self) -> float:
        return self._time(self.repeats) / (self.repeats * len(self.calls))

    def _run_all(self) -> None:
        for call in self.calls:
            call()

    def _capture(self) -> None:
        """Replays the calls from a CUDA graph. What waits for the device cannot be captured and stays eager."""
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._run_all()
        torch.cuda.current_stream(self.device).wait_stream(side)
        with contextlib.suppress(RuntimeError):
            with torch.cuda.graph(graph):
                self._run_all()
            self.replay, self.kind = graph.replay, "graph"
        torch.cuda.synchronize(self.device)

    def _time(self, repeats: int) -> float:
        """Seconds of `repeats` rotations through all input sets."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(repeats):
                self.replay()
            return time.perf_counter() - begin
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        begin.record()
        for _ in range(repeats):
            self.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def rotation(bytes_per_call: int, device: torch.device) -> int:
    """How many input sets make a GPU's L2 useless: together four times its size; on the CPU, one."""
    if device.type != "cuda":
        return 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(64, -(-4 * l2 // max(bytes_per_call, 1))))

"""Times the providers of a case against each other, after checking that each one is right.

A *case* is one op at one shape and dtype; a *provider* is one implementation of it (torch, amp_kernels, a peer). The
method:

- A provider is first checked on fresh inputs against a float64 reference. A wrong result is reported and never timed.
- Providers are timed in turns (A B A B) in one process, so that clocks, power and neighbours hit all alike; after a
  warm-up that lasts seconds on a GPU, whose clock only then falls to what it sustains. Figures are quantiles over the
  rounds; the speed-up is the median of the ratios within a round.
- On a GPU the inputs rotate among several sets, together larger than the L2 cache, and short kernels are replayed
  from a CUDA graph, so that launches do not hide them. A case that asks for it (`host_time`) is timed with its
  launches; its rows also say how long the host alone is busy and, from a graph, the device alone.
- Data is random: zeros draw less power, run faster and hide unwritten outputs.
- The roofline is measured in the same run (`roofline.py`). A row's share of it is the least time the counted bytes
  and flops could take, over the median time.
"""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .timing import Effort, Timer, kernels_of, quantiles, rotation

Call = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Scope:
    """What a run may use. `cases(scope)` of each benchmark fits its cases to it; `memory` is in bytes."""

    device: torch.device
    quick: bool = False
    memory: float = float("inf")


class WithFacts:
    """A call, and what its row says beside the times: `facts()` is asked after the call has run."""

    def __init__(self, call: Call, facts: Callable[[], dict[str, Any]]):
        self.call, self.facts = call, facts

    def __call__(self) -> dict[str, Any]:
        return self.call()


@dataclass
class Case:
    """One op at one shape and dtype.

    `inputs(generator)` draws fresh inputs. `providers[name](inputs)` prepares a call without arguments that returns
    its results by name, each a tensor or a list (an in-place op returns what it changed); speed-ups refer to the
    first provider. `reference(inputs)`, computed before the call, gives for each name the values in float64 and the
    largest accepted relative error. A provider may leave out a result that it keeps in another form, but not the
    first. `bytes` and `flops` count the least that must be moved and computed. `families` are the groups whose
    geometric means the tables show; `memory` is what the case needs on the device, where that is much.
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
    families: tuple[str, ...] = ()
    memory: int = 0
    sets: int | None = None  # input sets to rotate among; None: as many as defeat the L2 cache
    goal: float | None = None  # the speed-up that this package is to reach
    kernels: bool = False  # record the names of the kernels that each provider runs

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {self.dtype}"


class Mismatch(Exception):
    """A provider's result is not the reference's."""


def worst_error(got: dict[str, Any], want: dict[str, tuple[Any, float]]) -> float:
    """The largest relative error of the results. Raises Mismatch where one is above its bound, as NaN is, or misshapen.

    The error of a tensor is that of its worst row, in units of that row's norm or of an average row's, whichever is
    larger: the norm of the whole would hide a wrong tile of a large matrix, and rounding is relative to what is
    rounded. A row is the last dimension, with those before it until it has 16 elements.
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
        for i, g, w in _stacked(result, expected):
            error = _row_error(g, w)
            if not error <= bound:
                raise Mismatch(f"{name}[{i}]: relative error {error:.2e}, accepted {bound:.2e}")
            worst = max(worst, error)
    return worst


def _stacked(got: list[torch.Tensor], want: list[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The pairs; vectors of one length that follow each other become the rows of one matrix, or a list of 10,000 takes
    the check longer than the timing. With them the number of the first."""
    i = 0
    while i < len(want):
        end = i + 1
        while want[i].dim() == 1 and end < len(want) and want[end].shape == want[i].shape:
            end += 1
        yield (i, got[i], want[i]) if end == i + 1 else (i, torch.stack(got[i:end]), torch.stack(want[i:end]))
        i = end


def _row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    row = want.numel()
    if want.dim() > 1:
        row = next((n for n in itertools.accumulate(reversed(want.shape), operator.mul) if n >= 16), row)
    want = want.double().reshape(-1, row)
    differences = (got.double().reshape(-1, row) - want).norm(dim=1)
    norms = want.norm(dim=1)
    return (differences / norms.clamp(min=norms.square().mean().sqrt() or 1.0)).max().item()


def _as_list(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def measure(
    case: Case,
    device: torch.device,
    effort: Effort,
    chosen: set[str] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[dict]:
    """One row for each provider of the case (those in `chosen`): its error and times, or why there are none.

    `note` hears what is about to run, so that whoever watches can name a kernel that never returns.
    """
    timers: dict[str, Timer] = {}
    generator = torch.Generator(device)
    names = [name for name in case.providers if chosen is None or name.split(":")[0] in chosen]
    rows: list[dict[str, Any]] = [{"provider": name, "status": "ok"} for name in names]
    note("reference")
    prepared = {"status": "ok"}
    with _reported(prepared):  # it may not fit into memory
        want = case.reference(case.inputs(generator.manual_seed(1)))
    for row in rows:
        row.update(prepared)
        if row["status"] != "ok":
            continue
        name = row["provider"]
        note(f"{name}, check")
        with _reported(row):
            call = case.providers[name](case.inputs(generator.manual_seed(1)))
            for _ in range(case.check_calls):
                got = call()
            row["error"] = worst_error(got, want)
            if isinstance(call, WithFacts):
                row.update(call.facts())
            if case.kernels:
                with _reported({}):  # where the profiler may not look, the times still count
                    row["kernels"] = kernels_of(call, device)
        call = got = None  # large: not kept beside the next one's
    want = None
    for row in rows:
        if row["status"] == "ok":
            note(f"{row['provider']}, warm-up")
            with _reported(row):
                timers[row["provider"]] = _timer(case, row["provider"], device, effort)
    note("timing in turns")
    samples = _interleave(timers, effort)
    for row in rows if case.host_time else ():
        if row["provider"] in timers:
            note(f"{row['provider']}, host and device apart")
            row.update(timers[row["provider"]].apart(effort))
    baseline = next(iter(case.providers))
    for row in rows:
        seconds = samples.get(row["provider"])
        if seconds is None:
            continue
        p20, p50, p80 = quantiles(seconds)
        row.update(p20_us=p20 * 1e6, p50_us=p50 * 1e6, p80_us=p80 * 1e6, timing=timers[row["provider"]].kind)
        if baseline in samples:
            row["baseline"] = baseline
            ratios = [b / s for b, s in zip(samples[baseline], seconds, strict=True)]
            row["speedup_p20"], row["speedup"], row["speedup_p80"] = quantiles(ratios)
    for row in rows:
        row.update(op=case.op, shape=case.shape, dtype=case.dtype, bytes=case.bytes, flops=case.flops)
        if case.goal is not None:
            row["goal"] = case.goal
        if case.families:
            row["families"] = list(case.families)
        if row["provider"] in case.backends:
            row["backend"] = case.backends[row["provider"]]
    return rows


@contextlib.contextmanager
def _reported(row: dict) -> Iterator[None]:
    """What goes wrong with a provider goes into its row: a peer that cannot run here must not end the run."""
    try:
        yield
    except Mismatch as error:
        row.update(status="wrong", reason=str(error))
    except Exception as error:
        row.update(status="failed", reason=f"{type(error).__name__}: {error}".splitlines()[0])


def _timer(case: Case, name: str, device: torch.device, effort: Effort) -> Timer:
    generator = torch.Generator(device).manual_seed(2)
    sets = case.sets or rotation(case.bytes, device)
    calls = [case.providers[name](case.inputs(generator)) for _ in range(sets)]
    return Timer(calls, device, effort, graph=not case.host_time)


def _interleave(timers: dict[str, Timer], effort: Effort) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(effort.rounds):
        for name, timer in timers.items():
            samples[name].append(timer.sample())
    return samples

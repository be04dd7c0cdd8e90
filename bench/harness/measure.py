"""Times the providers of a case against each other, after checking that each one is right.

- A provider is first checked on fresh inputs against a float64 reference. A wrong result is reported and never timed.
- Providers are timed in turns (A B A B) in one process, so that clocks, power and neighbours hit all alike; after a
  warm-up that lasts seconds on a GPU, whose clock only then falls to what it sustains. Figures are quantiles over the
  rounds; the speed-up is the median of the ratios within a round.
- On a GPU the inputs rotate among several sets, together larger than the L2 cache, and short kernels are replayed
  from a CUDA graph, so that launches do not hide them. A case with `host_time` is timed with its launches; its rows
  also have the time of the host alone and, from a graph, of the device alone.
- Data is random: zeros draw less power, run faster and hide unwritten outputs.
- The roofline is measured in the same run (`roofline.py`). A row's share of it is the least time the counted bytes
  and flops could take, over the median time.
"""

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from .case import Case, WithFacts
from .check import Mismatch, worst_error
from .timer import Effort, Timer, kernels_of, quantiles, rotation


def measure(
    case: Case,
    device: torch.device,
    effort: Effort,
    chosen: Container[str] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[dict]:
    """One row for each provider of the case (those in `chosen`): its error and times, or why there are none.

    `note` is told what is about to run, so that a kernel that never returns can be named.
    """
    names = [name for name in case.providers if chosen is None or name.split(":")[0] in chosen]
    rows: list[dict[str, Any]] = [{"provider": name, "status": "ok"} for name in names]
    _check(case, device, rows, note)
    timers: dict[str, Timer] = {}
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
        if case.written is not None:
            row["written"] = case.written
        if case.goal is not None:
            row["goal"] = case.goal
        if case.families:
            row["families"] = list(case.families)
        if row["provider"] in case.backends:
            row["backend"] = case.backends[row["provider"]]
    return rows


def _check(case: Case, device: torch.device, rows: list[dict], note: Callable[[str], None]) -> None:
    """Runs every provider of the rows once and adds its error and facts, or why it is not to be timed."""
    generator = torch.Generator(device)
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
        call = got = None  # large: not kept with the next one's


@contextlib.contextmanager
def _reported(row: dict) -> Iterator[None]:
    """Puts an error into the provider's row: a peer that cannot run here must not end the run."""
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

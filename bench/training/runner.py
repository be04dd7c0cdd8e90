"""Runs the trials of the training benchmark one after the other, on one process or many, until a signal asks it to stop."""

import gc
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from .trial import Trial


class Interrupts:
    """The first SIGINT or SIGTERM asks the run to stop after its step and save; a second ends the process."""

    def __init__(self):
        self.signal: int | None = None
        self.previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def _note(self, number: int, frame) -> None:
        self.signal = number
        self.restore()
        print("\nstopping after this step, then saving (again: stop at once)", file=sys.stderr, flush=True)

    def __call__(self) -> bool:
        return self.signal is not None

    def restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def run_all(
    plan: Iterable[tuple[str, str]],
    finished: list[dict],
    running: Path | None,
    start: Callable[[str, str, Path | None], Trial],
    save: Callable[[Trial], object],
    interrupts: Callable[[], bool],
    save_every: int,
) -> Trial | None:
    """Trains what is not finished, the first trial from the checkpoint `running` if there is one.

    `plan` has providers and dtypes; results join `finished`. Returns the trial that was interrupted, if any.
    """
    for provider, dtype in list(plan)[len(finished) :]:
        trial = start(provider, dtype, running)
        if not trial.train(interrupts, lambda trial=trial: save(trial), save_every):
            return trial
        finished.append(trial.result())
        running = trial = None
        gc.collect()  # the model of this run must not count in the next one's memory
    return None

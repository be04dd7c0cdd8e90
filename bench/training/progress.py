"""One line of progress: a tqdm bar where a person watches a terminal, plain lines in a log."""

import sys
import time

LINE_SECONDS = 5.0  # how often a log gets a line


class Progress:
    """Progress of one run of `total` steps, from `start` on."""

    def __init__(self, name: str, total: int, start: int = 0, silent: bool = False):
        self.name, self.total, self.step, self.silent = name, total, start, silent
        self.bar = None
        self.last_line = 0.0
        if sys.stderr.isatty() and not silent:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar = tqdm(total=total, initial=start, desc=f"{name:<18}", unit="step", dynamic_ncols=True)

    def update(self, step: int, **figures: str) -> None:
        """Shows that `step` steps are done, with figures such as loss="2.31"."""
        if self.silent:
            return
        if self.bar is not None:
            self.bar.set_postfix(figures, refresh=False)
            self.bar.update(step - self.step)
        elif step == self.total or time.monotonic() - self.last_line > LINE_SECONDS:
            self.last_line = time.monotonic()
            shown = "  ".join(f"{key} {value}" for key, value in figures.items())
            print(f"{self.name:<18} step {step:>5}/{self.total}  {shown}", flush=True)
        self.step = step

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

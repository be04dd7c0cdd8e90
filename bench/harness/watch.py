"""Ends a process whose case never returns, and names that case in a file for another process."""

import contextlib
import faulthandler
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

HANG_SECONDS = 60  # for one case on a GPU: checks, run-time compilation and warm-up included
# A CPU's kernels do return, however long its neighbours delay them.
PATIENCE = {"cuda": HANG_SECONDS, "cpu": 10 * HANG_SECONDS}
CEILINGS = "the machine's ceilings"  # what is noted before the first case


@contextlib.contextmanager
def watched(path: Path | None, seconds: float) -> Iterator[Callable[..., None]]:
    """`note(case, doing)` writes both to `path` and gives the case so many seconds of its own.

    A kernel that never returns cannot be interrupted: the process then ends, and the file says in which case. It is
    removed when all went well.
    """
    current = None

    def note(case: str, doing: str = "") -> None:
        nonlocal current
        if path:
            path.write_text(f"{case}\n{doing}\n")
        if case != current:
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
        current = case

    try:
        yield note
    finally:
        faulthandler.cancel_dump_traceback_later()
    if path:
        path.unlink(missing_ok=True)

"""The line of the user's program that a warning points at."""

import sys

#: Packages of the hooks, profilers, schedulers and decorators around a call.
_WRAPPERS = ("amp_kernels", "torch", "contextlib", "functools")


def users_line() -> int:
    """``stacklevel`` for ``warnings.warn`` in the function that calls this: the first line outside of this package and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _WRAPPERS:
        frame, level = frame.f_back, level + 1
    return level

"""The oldest torch that the package runs with. pip checks it too, but not with ``--no-deps``."""

import re

import torch

OLDEST_TORCH = (2, 10)


def check_torch(version: str) -> None:
    """Raise unless torch ``version`` is new enough.

    Raises:
        ImportError: it is older.
    """
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if found < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"amp_kernels: torch is {version}; accepted: {oldest} or newer (pip install -U 'torch>={oldest}')"
        )


check_torch(torch.__version__)

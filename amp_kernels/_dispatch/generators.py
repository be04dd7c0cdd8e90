"""The states of all global random generators: of torch, Python and NumPy."""

import random
import sys
from typing import Any

import torch


def states() -> dict[str, Any]:
    """As tensors, numbers, lists and tuples. Those of CUDA devices and of NumPy only if the program uses them."""
    found: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, key, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = [kind, key.tolist(), *rest]
    return found


def check(found: dict[str, Any]) -> None:
    """Raise a ValueError, whose message is only the reason, unless these states can be restored here."""
    devices, here = len(found.get("cuda", ())), torch.cuda.device_count()
    if devices not in (0, here):
        raise ValueError(
            f"it has random states of {devices} CUDA devices, and there are {here} here; accepted: as many, or rng=False"
        )


def restore(found: dict[str, Any]) -> None:
    torch.set_rng_state(found["cpu"])
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words), gauss))  # a list in checkpoints of format 1
    if "cuda" in found:
        torch.cuda.set_rng_state_all(found["cuda"])
    if "numpy" in found and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(found["numpy"]))

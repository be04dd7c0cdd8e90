"""update_scale_: the next loss scale from the flags of a step. Nothing but latency, in one launch."""

from collections.abc import Iterator

import torch

from amp_kernels._raw.update_scale import update_scale_

from .. import ours
from ..harness import Call, Case, Scope

GROWTH, BACKOFF, NEVER = 2.0, 0.5, 10**9  # growth interval: the scale stays what it is however often this runs


def cases(scope: Scope) -> Iterator[Case]:
    for flags in (1,) if scope.quick else (1, 8):
        yield Case(
            op="update_scale_",
            shape=f"{flags} flag" + "s" * (flags > 1),
            dtype="fp32",
            bytes=4 * flags + 24,  # reads the flags; reads and writes the scale and both trackers
            flops=0,
            inputs=lambda generator, flags=flags: [torch.zeros((), device=scope.device) for _ in range(flags)],
            providers={"torch": _torch, **ours.providers("update_scale_", scope.device, _ours)},
            reference=_reference,
            check_calls=2,
            backends=ours.backends("update_scale_", scope.device),
        )


def _state(flags: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    device = flags[0].device
    trackers = (torch.full((), 1, dtype=torch.int32, device=device) for _ in range(2))
    return torch.full((), 1024.0, device=device), *trackers


def _torch(flags: list[torch.Tensor]) -> Call:
    """GradScaler.update adds up the flags of several devices first, as here those of several optimizers."""
    scale, tracker, _ = _state(flags)

    def call():
        found_inf = flags[0]
        for flag in flags[1:]:
            found_inf = found_inf + flag
        torch._amp_update_scale_(scale, tracker, found_inf, GROWTH, BACKOFF, NEVER)
        return {"scale": scale, "tracker": tracker}

    return call


def _ours(flags: list[torch.Tensor]) -> Call:
    scale, tracker, hysteresis = _state(flags)

    def call():
        update_scale_(scale, tracker, hysteresis, flags, GROWTH, BACKOFF, NEVER)
        return {"scale": scale, "tracker": tracker}

    return call


def _reference(flags: list[torch.Tensor]) -> dict:
    def number(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64, device=flags[0].device)

    return {"scale": (number(1024.0), 0.0), "tracker": (number(3.0), 0.0)}

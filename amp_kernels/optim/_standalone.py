"""Optimizers that torch does not have: the group keys that torch's share, and checkpoints of others that lack them."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT

from ._base import FusedOptimizer


class StandaloneOptimizer(FusedOptimizer):
    """Base of those; ``defaults`` are the hyper-parameters of the groups without the hints."""

    _absent: tuple[tuple[str, Any], ...] = ()  # what a key means that a loaded group lacks

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        super().__init__(params, {**defaults, "foreach": None, "differentiable": False, "fused": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            for key, value in (("maximize", False), ("capturable", False), ("differentiable", False), *self._absent):
                group.setdefault(key, value)
        super().__setstate__(state)

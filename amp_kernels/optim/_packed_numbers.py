"""The numbers of the param groups as the update ops take them: from the host, or from where a replayed graph reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._dispatch.devices import at
from .._updates.state import MAXIMIZE, STOCHASTIC
from ._hyper_parameters import HyperParameters
from ._measure import MeasuredStep


class PackedNumbers(MeasuredStep):
    """The part of :class:`~amp_kernels.optim._base.FusedOptimizer` that packs the numbers of the groups."""

    _decays: Sequence[Tensor] = ()

    @contextmanager
    def _decays_from(self, decays: Sequence[Tensor]) -> Iterator[None]:
        """Within the block steps read the weight decays here, one float64 scalar on a device per group."""
        self._decays = decays
        try:
            yield
        finally:
            del self._decays

    def _numbers_on(self, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Learning rates and weight decays on the device: of every group if any learning rate is a tensor, else none."""
        rates = [group["lr"] for group in self.param_groups]
        decays = [at(decay, device) for decay in self._decays]
        if not any(isinstance(rate, Tensor) for rate in rates):
            return [], decays
        return [
            at(rate, device).float().reshape(())
            if isinstance(rate, Tensor)
            else torch.full((), rate, dtype=torch.float32, device=device)
            for rate in rates
        ], decays

    def _packed_options(self, hyper: HyperParameters) -> list[float]:
        """The numbers of the groups as the op takes them, with the learning rates of now."""
        rates = [group["lr"] for group in self.param_groups]
        rates = [0.0 if isinstance(rate, Tensor) else rate for rate in rates]
        if not all(type(rate) is float and rate == rate for rate in rates):
            self._check_numbers()
        hyper.options[:: len(self._op.declared.options)] = map(float, rates)
        return hyper.options

    def _option(self, group: dict[str, Any], name: str) -> float:
        """What the op's declaration calls ``name``."""
        if name == "lr":
            return 0.0  # of each step anew
        return float(group["betas"][int(name[4:]) - 1] if name in ("beta1", "beta2") else group[name])

    def _flags(self, group: dict[str, Any]) -> int:
        """The op's flags for a group."""
        return (STOCHASTIC if self.master_weights == "none" else 0) | (MAXIMIZE if group["maximize"] else 0)

    def _current_hyper_parameters(self) -> HyperParameters:
        """The numbers of the groups, checked."""
        hyper = self._hyper_parameters
        if hyper is None or not hyper.unchanged(self.param_groups, self.master_weights):
            self._check_numbers()
            hyper = HyperParameters(self.param_groups, self.master_weights)
            names = self._op.declared.options
            hyper.options = [self._option(group, name) for group in self.param_groups for name in names]
            hyper.flags = list(map(self._flags, self.param_groups))
            hyper.decays = [float(group.get("ema_decay") or 0.0) for group in self.param_groups]
            hyper.used = [self._moment_names(group, {}) for group in self.param_groups]
            hyper.averaged = [group.get("ema_decay") is not None for group in self.param_groups]
            self._hyper_parameters = hyper
        return hyper

"""A learning rate scheduler that stands still where a gradient scaler skipped the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._readback import AsyncReader
from .grad_scaler import GradScaler


class SkipAwareScheduler:
    """Advances a scheduler of torch by as many steps as its optimizer took, without a host sync.

    Call :meth:`step` after :meth:`amp_kernels.GradScaler.update`, as often as you would call the scheduler's own: after
    each iteration, or once an epoch. The scheduler advances if the optimizer took at least one step since the call
    before; what other optimizers under the same scaler did does not matter. So torch's warning that a scheduler was
    stepped before the optimizer does not come up where only the first steps were skipped.

    On the CPU the scheduler advances at once. On a GPU whether a step was skipped is known there first; the host does
    not wait for it, and a later call makes up for it, usually the next: learning rates change an iteration later than
    they would without this class, and :meth:`drain` and :meth:`state_dict` catch up, so that the total is exact.

    Any attribute that is not listed here is the scheduler's: ``get_last_lr``, ``last_epoch``, ``base_lrs``, ...

    Args:
        scheduler: any scheduler of torch, ``ReduceLROnPlateau``, ``SequentialLR`` and ``ChainedScheduler`` included, or
            one with their interface. Wrap several one by one.
        scaler: the scaler which steps the optimizer. Disabled, it skips nothing.
        optimizer: the optimizer as ``scaler.step`` gets it; default: ``scheduler.optimizer``.

    Raises:
        TypeError: ``scaler`` is not of this package, or there is no optimizer.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer, scaler = ak.optim.SGD([weight], lr=0.5), ak.GradScaler("cpu")
        >>> halving = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        >>> scheduler = ak.amp.SkipAwareScheduler(halving, scaler)
        >>> for slope in (torch.inf, 1.0):  # the first one overflows
        ...     optimizer.zero_grad()
        ...     scaler.scale(weight[0] * slope).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     scheduler.step()
        ...     print(scheduler.get_last_lr())
        [0.5]
        [0.25]
    """

    def __init__(self, scheduler: Any, scaler: GradScaler, optimizer: Optimizer | None = None) -> None:
        if not isinstance(scaler, GradScaler):
            raise TypeError(
                f"SkipAwareScheduler: scaler is a {type(scaler).__name__}; accepted: amp_kernels.GradScaler, which counts "
                "the steps taken"
            )
        optimizer = getattr(scheduler, "optimizer", None) if optimizer is None else optimizer
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"SkipAwareScheduler: the scheduler's optimizer is a {type(optimizer).__name__}; pass optimizer=, the "
                "one that scaler.step gets"
            )
        self.scheduler, self._scaler, self._optimizer = scheduler, scaler, optimizer
        self._reader = AsyncReader()
        self._start()

    def _taken(self) -> Tensor | None:
        return self._scaler.skips.steps_taken(self._optimizer) if self._scaler.is_enabled() else None

    def _start(self) -> None:
        """Only steps from now on count."""
        self._reader.clear()
        taken = self._taken()
        if taken is not None:
            self._reader.push(taken)
        self._seen = 0.0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler with these arguments, now or later, unless all steps since the last call were skipped.

        Args:
            args, kwargs: for the scheduler's ``step``: the metric of ``ReduceLROnPlateau``.

        Raises:
            RuntimeError: no ``scaler.step(optimizer)`` and ``scaler.update()`` came before.
        """
        if not self._scaler.is_enabled():
            self.scheduler.step(*args, **kwargs)
            return
        taken = self._taken()
        if taken is None and self._seen < 0:  # in a copy, made between update and this call
            taken = torch.zeros(1, device="cpu")
        if taken is None:
            raise RuntimeError(
                "SkipAwareScheduler.step: the scaler has not stepped this scheduler's optimizer yet; call "
                "scaler.step(optimizer) and scaler.update() before, and pass optimizer= if scaler.step gets another object"
            )
        self._reader.push(taken, (args, kwargs))
        self._advance()

    def _advance(self) -> None:
        for (taken,), call in self._reader.arrived():
            moved, self._seen = taken > self._seen, taken
            if moved and call is not None:
                self.scheduler.step(*call[0], **call[1])

    def drain(self) -> None:
        """Wait for the device and make all steps that are due: at the end of training, or before looking at the
        learning rate."""
        self._reader.wait()
        self._advance()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own, after :meth:`drain`; a scheduler without this wrapper loads it."""
        self.drain()
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scheduler's state. Steps that were still due belong to what is replaced, and are dropped."""
        self._start()
        self.scheduler.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """For a copy. A copied scaler counts from 0: counts are relative to that of now, calls that were not answered yet
        included."""
        self._reader.wait()
        now, due = self._count(), list(self._reader.arrived())
        for values, call in due:
            self._reader.put(values, call)
        return {**self.__dict__, "_reader": [(taken - now, call) for (taken,), call in due], "_seen": self._seen - now}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        due, self._reader, now = self._reader, AsyncReader(), self._count()
        self._seen += now
        for taken, call in due:
            self._reader.put([taken + now], call)

    def _count(self) -> float:
        """Of the scaler, waiting for the device."""
        taken = self._taken()
        return 0.0 if taken is None else taken.item()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # not there yet, while a copy is made
        return getattr(self.scheduler, name)

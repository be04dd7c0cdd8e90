"""A learning rate scheduler that does not advance on skipped steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._checks.types import type_name
from ._readback import AsyncReader
from .grad_scaler import GradScaler


class SkipAwareScheduler:
    """Advances a torch scheduler only for steps that its optimizer took, without a host sync.

    Call :meth:`step` after :meth:`amp_kernels.GradScaler.update`, as often as the scheduler's own: after each iteration or once
    per epoch. The scheduler advances if its optimizer took at least one step since the previous call; other optimizers under the
    same scaler do not matter. If the first steps were skipped, torch's warning about the order of scheduler and optimizer does
    not appear.

    On the CPU the scheduler advances immediately. On a GPU the device decides whether to skip, and the host does not wait: a later
    call, usually the next, catches up. So learning rates change one iteration later than without this class. :meth:`drain` and
    :meth:`state_dict` catch up completely, so the total is exact.

    Other attributes are those of the scheduler: ``get_last_lr``, ``last_epoch``, ``base_lrs``, ...

    Args:
        scheduler: any torch scheduler, including ``ReduceLROnPlateau``, ``SequentialLR`` and ``ChainedScheduler``, or one with
            the same interface. Wrap several schedulers one by one.
        scaler: the scaler that steps the optimizer. A disabled scaler skips nothing.
        optimizer: the object passed to ``scaler.step``; default: ``scheduler.optimizer``.

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
                f"SkipAwareScheduler: scaler has type {type_name(scaler)}; accepted: amp_kernels.GradScaler, which counts "
                "the steps taken"
            )
        optimizer = getattr(scheduler, "optimizer", None) if optimizer is None else optimizer
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"SkipAwareScheduler: the scheduler's optimizer has type {type_name(optimizer)}; pass optimizer=, the "
                "one that scaler.step gets"
            )
        self.scheduler, self._scaler, self._optimizer = scheduler, scaler, optimizer
        self._reader = AsyncReader()
        self._start()

    def _taken(self) -> Tensor | None:
        return self._scaler._skips.steps_taken(self._optimizer) if self._scaler.is_enabled() else None

    def _start(self) -> None:
        """Count only steps from now on."""
        self._reader.clear()
        taken = self._taken()
        if taken is not None:
            self._reader.push(taken)
        self._seen = 0.0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler with these arguments, now or later, unless all steps since the last call were skipped.

        Args:
            args, kwargs: arguments of the scheduler's ``step``, such as the metric of ``ReduceLROnPlateau``.

        Raises:
            RuntimeError: ``scaler.step(optimizer)`` and ``scaler.update()`` were not called before.
        """
        if not self._scaler.is_enabled():
            self.scheduler.step(*args, **kwargs)
            return
        taken = self._taken()
        if taken is None and self._seen < 0:  # this is a copy that was made between update and this call
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
        """Wait for the device and take all pending steps. Call it at the end of training or before reading the learning rate."""
        self._reader.wait()
        self._advance()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state after :meth:`drain`; the scheduler loads it without this wrapper."""
        self.drain()
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scheduler's state. Pending steps belong to the replaced state and are dropped."""
        self._start()
        self.scheduler.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy. A copied scaler counts from 0, so all counts, including those of pending calls, are stored relative to
        the current one."""
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
        """The scaler's count. Waits for the device."""
        taken = self._taken()
        return 0.0 if taken is None else taken.item()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # not set yet while copying
        return getattr(self.scheduler, name)

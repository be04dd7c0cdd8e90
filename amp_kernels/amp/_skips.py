"""Skipped steps of a gradient scaler: device counters, read back asynchronously, and the tensors with non-finite gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._checks import lists
from .._dispatch.capture import is_capturing
from .._dispatch.compiled import OneOpEach, Traced
from .._dispatch.devices import at, largest_flag
from .._raw.check_and_norm import check_and_norm
from .._sharding.agreement import Agreement
from .._sharding.local import local
from ._readback import AsyncReader

Flags = list[tuple[Optimizer, list[Tensor], Tensor]]  # parameters, and a flag for each non-finite gradient


class SkipTracking(OneOpEach):
    """Mixin of :class:`amp_kernels.GradScaler`. Everything is asynchronous except raising the error."""

    def _init_skips(self, max_consecutive_skips: int | None) -> None:
        if max_consecutive_skips is not None:
            lists.check_number("GradScaler", "max_consecutive_skips", max_consecutive_skips, 1)
        self._max_consecutive_skips = max_consecutive_skips
        self._init_skip_counts = (0, 0)
        self._start_tracking()

    def _start_tracking(self) -> None:
        self._skip_counters: tuple[Tensor, ...] = ()
        self._skips: Tensor | None = None  # int64 [2]: all skipped iterations, and the current consecutive ones
        self._taken: weakref.WeakKeyDictionary[Optimizer, Tensor | None] = weakref.WeakKeyDictionary()
        self._agreements: weakref.WeakKeyDictionary[Optimizer, tuple[list[Tensor], Agreement]]
        self._agreements = weakref.WeakKeyDictionary()  # with their parameters
        self._traced = Traced(self)
        self._forget()

    def _forget(self) -> None:
        self._together: Agreement | None = None  # the ranks that skipped with this one
        self._nonfinite: Flags = []
        self._reader = AsyncReader()
        self._last_skipped: bool | None = None
        self._too_many: tuple[int, Flags] | None = None

    def _create_skip_counters(self, device: torch.device) -> None:
        self._skips = torch.empty(2, dtype=torch.int64, device=device)
        self._skip_counters = self._skips.unbind()
        self._fill_skip_counters()

    def _fill_skip_counters(self) -> None:
        for counter, value in zip(self._skip_counters, self._init_skip_counts, strict=True):
            counter.fill_(value)  # a kernel; a copy from the host would synchronise

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self.is_enabled():
            state["_init_skip_counts"] = self._skip_counts()
        for key in (
            "_skips",
            "_skip_counters",
            "_taken",
            "_reader",
            "_nonfinite",
            "_last_skipped",
            "_too_many",
            "_agreements",
            "_traced",
        ):
            del state[key]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_tracking()

    def _written(self) -> list[Tensor]:
        tensors = self._scale, self._growth_tracker, self._hysteresis_tracker, self._skips
        return [tensor for tensor in tensors if tensor is not None]

    # ---- what users see ----

    @property
    @torch._disable_dynamo  # a compiled graph would read it before it ran the step
    def last_step_skipped(self) -> bool | None:
        """True if an optimizer's step was skipped in the latest iteration whose flag has arrived on the host.

        Reading it never waits for the device. On the CPU, that is the iteration ended by the last ``update``. On a GPU the host
        runs ahead, and it is an earlier iteration; ``scaler.consecutive_skips > 0`` is the exact answer, as a tensor on the device.
        ``None`` before the first flag arrives. For an ``update`` in a CUDA graph, only :func:`amp_kernels.graph_step` reports it.
        """
        self._poll()
        return self._last_skipped

    @property
    def skipped_steps(self) -> Tensor:
        """Number of iterations with a skipped step: int64, 0-dim, on the scale's device (the CPU before the first use)."""
        return self._skip_counter(0)

    @property
    def consecutive_skips(self) -> Tensor:
        """Number of consecutive skipped iterations up to now: int64, 0-dim, on the same device; 0 after a step was taken."""
        return self._skip_counter(1)

    def _skip_counter(self, which: int) -> Tensor:
        if self._skips is None:
            return torch.tensor(self._init_skip_counts[which], device="cpu")
        return self._skip_counters[which].clone()

    def _skip_counts(self) -> tuple[int, int]:
        return self._init_skip_counts if self._skips is None else tuple(int(n) for n in self._skips.tolist())

    # ---- counting ----

    def _steps_taken(self, optimizer: Optimizer) -> Tensor | None:
        """The number of steps taken by ``optimizer`` under this scaler since the first call of this method: float64 [1] on the
        device, ``None`` until its first iteration has ended."""
        return self._taken.setdefault(optimizer, None)

    def _end_iteration(self, flags: list[Tensor], stepped: dict[int, Tensor], counted: bool) -> None:
        """Record an iteration. ``flags``: one is above 0 if a step was skipped; ``stepped``: the flag for each optimizer's id;
        ``counted``: ``update_scale_`` has already updated the counters."""
        if not counted:
            skipped = largest_flag(flags, self._skips.device) > 0
            total, consecutive = self._skip_counters
            total.add_(skipped)
            consecutive.add_(1).mul_(skipped)
        for optimizer, counter in self._taken.items() if self._taken else ():
            if id(optimizer) in stepped:
                if counter is None:
                    counter = torch.zeros(1, dtype=torch.float64, device=self._skips.device)
                    self._taken[optimizer] = counter
                counter.add_(stepped[id(optimizer)] <= 0)
        nonfinite, self._nonfinite = self._nonfinite, []
        if not is_capturing(self._skips):  # a replay would not run this
            self._report(nonfinite)

    def _report(self, nonfinite: Flags) -> None:
        """Start to read the counters back, and raise if earlier ones exceed the limit. ``nonfinite``: this iteration's tensors."""
        self._reader.push(self._skips, nonfinite)
        # All ranks must raise in the same iteration, so each waits for exactly the second-to-last readback.
        self._poll(wait=self._together is not None and self._max_consecutive_skips is not None)
        if self._too_many is not None:
            consecutive, nonfinite = self._too_many
            self._too_many = None
            raise RuntimeError(
                f"GradScaler: {consecutive} steps in a row were skipped (max_consecutive_skips is "
                f"{self._max_consecutive_skips}), and the loss scale is {self.get_scale()}. "
                + _describe(nonfinite, self._together)
            )

    def _poll(self, wait: bool = False) -> None:
        limit = self._max_consecutive_skips
        for (_, consecutive), nonfinite in self._reader.all_but_last() if wait else self._reader.arrived():
            self._last_skipped = consecutive > 0
            if limit is not None and consecutive >= limit:
                self._too_many = (int(consecutive), nonfinite)

    # ---- whose gradients ----

    def _note_nonfinite(self, optimizer: Optimizer, grad_scale: Tensor | None) -> None:
        """Record the gradients that are not finite after division by ``grad_scale``. This reads them once more."""
        if self._max_consecutive_skips is None:
            return
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                grad = local(grad)
                grad = grad._values() if grad.is_sparse else grad
                grad = grad if lists.is_dense(grad) else grad.contiguous()
                by_device.setdefault(grad.device, []).append((param, grad))
        for device, pairs in by_device.items():
            scale = at(grad_scale, device)
            params, grads = zip(*pairs, strict=True)
            self._nonfinite.append((optimizer, list(params), check_and_norm(grads, scale, per_tensor=True)[1]))


def _describe(nonfinite: Flags, together: Agreement | None) -> str:
    """The names of the tensors, over all ranks. Waits for the device, since training stops here."""
    names, total = [], 0
    for optimizer, params, flags in nonfinite:
        total += len(params)
        name_of = dict(_names(optimizer))
        bad = [param for param, flag in zip(params, flags.tolist(), strict=True) if flag > 0]
        names += [name_of.get(id(param), f"a parameter of shape {list(param.shape)}") for param in bad]
    number = f"{len(names)} of {total}"
    if together is not None:
        ranks_of: dict[str, list[str]] = {}
        for rank, there in together.gather(names):
            for name in there:
                ranks_of.setdefault(name, []).append(str(rank))
        names = [f"{name} (on rank {', '.join(ranks)})" for name, ranks in ranks_of.items()]
        number = str(len(names))
    if not names:
        return "No gradient here was infinite or NaN in the last of them: the flag came from elsewhere."
    return f"In the last of them {number} gradients were infinite or NaN: " + lists.some(names, "; ")


def _names(optimizer: Optimizer) -> Iterable[tuple[int, str]]:
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")  # present if it was built from named_parameters()
        for j, param in enumerate(group["params"]):
            yield id(param), names[j] if names else f"group {i}, parameter {j}, shape {list(param.shape)}"


def stepped_flags(states: dict, device: torch.device, stepped: object) -> dict[int, Tensor]:
    """The combined flag of each optimizer (by id) in the stage ``stepped``."""
    return {
        key: largest_flag(state["found_inf_per_device"].values(), device)
        for key, state in states.items()
        if state["stage"] is stepped and state["found_inf_per_device"]
    }

"""Skipped steps of a gradient scaler: device counters, read back asynchronously, and the tensors with non-finite gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._checks import lists
from .._dispatch.capture import is_capturing
from .._dispatch.devices import at, largest_flag, restorer
from .._raw.check_and_norm import check_and_norm
from .._sharding.agreement import Agreement
from .._sharding.local import local
from ._readback import AsyncReader

#: An optimizer, some of its parameters, and a flag for each whose gradient was not finite.
NonFinite = tuple[Optimizer, list[Tensor], Tensor]


class SkipRecord:
    """The skipped steps of one scaler. Everything is asynchronous, except for raising the error.

    Args:
        limit: raise after so many skipped steps in a row.
        start: the counts to begin with, of all skipped iterations and of the last ones in a row.
    """

    def __init__(self, limit: int | None, start: tuple[int, int] = (0, 0)):
        if limit is not None:
            lists.check_count("GradScaler", "max_consecutive_skips", limit, 1)
        self.limit = limit
        self.pair: Tensor | None = None  # int64 [2] on the device: skipped iterations in all, and in a row
        self.counters: tuple[Tensor, ...] = ()  # views of it
        self.taken: weakref.WeakKeyDictionary[Optimizer, Tensor | None] = weakref.WeakKeyDictionary()
        self.restart(start)

    def restart(self, start: tuple[int, int]) -> None:
        """Set the counts and forget everything else but the optimizers whose steps are counted."""
        self._start = start
        self._ranks: Agreement | None = None
        self._nonfinite: list[NonFinite] = []
        self._reader = AsyncReader()
        self._last: bool | None = None
        self._too_many: tuple[int, list[NonFinite]] | None = None
        self._fill_counters()

    def _fill_counters(self) -> None:
        for counter, value in zip(self.counters, self._start, strict=False):  # there are none before the first use
            counter.fill_(value)  # a kernel; a copy from the host would synchronise

    def create_counters(self, device: torch.device) -> None:
        self.pair = torch.empty(2, dtype=torch.int64, device=device)
        self.counters = self.pair.unbind()
        self._fill_counters()

    def __reduce__(self) -> tuple:
        return SkipRecord, (self.limit, self.counts())

    # ---- reading ----

    def last_skipped(self) -> bool | None:
        """True if a step was skipped in the last iteration that was read back."""
        self._poll()
        return self._last

    def counter(self, which: int) -> Tensor:
        """The count of all skipped iterations (0) or of the last ones in a row (1)."""
        if self.pair is None:
            return torch.tensor(self._start[which], device="cpu")
        return self.counters[which].clone()

    def counts(self) -> tuple[int, int]:
        """Both counts; waits for the device."""
        return self._start if self.pair is None else tuple(int(n) for n in self.pair.tolist())

    def steps_taken(self, optimizer: Optimizer) -> Tensor | None:
        """The steps that ``optimizer`` has taken since the first call: float64 [1] on the device, ``None`` until its first
        iteration has ended."""
        return self.taken.setdefault(optimizer, None)

    # ---- an iteration ----

    def joined_by(self, agreement: Agreement | None) -> None:
        """Steps of this iteration are skipped together with these ranks, if there are any."""
        self._ranks = agreement or self._ranks

    def add_nonfinite(self, found: Iterable[NonFinite]) -> None:
        self._nonfinite += found

    def find_nonfinite(self, optimizer: Optimizer, grad_scale: Tensor | None) -> None:
        """Note which gradients are not finite once divided by ``grad_scale``, for the error. One more read of them."""
        if self.limit is None:
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
            params, grads = zip(*pairs, strict=True)
            flags = check_and_norm(grads, at(grad_scale, device), per_tensor=True)[1]
            self._nonfinite.append((optimizer, list(params), flags))

    def end_iteration(self, flags: list[Tensor], stepped: dict[int, Tensor], counted: bool, scale: Tensor) -> None:
        """Count an iteration and report it. ``flags``: one is above 0 if a step was skipped; ``stepped``: the same by the id of
        each optimizer that was stepped; ``counted``: ``update_scale_`` has updated the counters.

        Raises:
            RuntimeError: too many steps in a row were skipped.
        """
        if not counted:
            skipped = largest_flag(flags, self.pair.device) > 0
            total, consecutive = self.counters
            total.add_(skipped)
            consecutive.add_(1).mul_(skipped)
        for optimizer, counter in self.taken.items() if self.taken else ():
            if id(optimizer) in stepped:
                if counter is None:
                    counter = torch.zeros(1, dtype=torch.float64, device=self.pair.device)
                    self.taken[optimizer] = counter
                counter.add_(stepped[id(optimizer)] <= 0)
        nonfinite, self._nonfinite = self._nonfinite, []
        if not is_capturing(self.pair):  # a replay would not run this
            self.report(scale, nonfinite)

    def report(self, scale: Tensor, nonfinite: list[NonFinite]) -> None:
        """Send the counters to the host and raise if too many steps in a row were skipped. ``nonfinite``: the gradients of this
        iteration."""
        self._reader.push(self.pair, nonfinite)
        # Ranks must raise in the same iteration: all of them wait for the answer before the last one, and for no later one.
        self._poll(wait=self._ranks is not None and self.limit is not None)
        if self._too_many is not None:
            consecutive, nonfinite = self._too_many
            self._too_many = None
            raise RuntimeError(
                f"GradScaler: {consecutive} steps in a row were skipped (max_consecutive_skips is {self.limit}), and the loss "
                f"scale is {scale.item()}. " + _describe(nonfinite, self._ranks)
            )

    def _poll(self, wait: bool = False) -> None:
        for (_, consecutive), nonfinite in self._reader.all_but_last() if wait else self._reader.arrived():
            self._last = consecutive > 0
            if self.limit is not None and consecutive >= self.limit:
                self._too_many = (int(consecutive), nonfinite)

    def snapshot(self) -> Callable[[], None]:
        """Copy all counters. Returns a function that restores them."""
        before = dict(self.taken)
        restore_counters = restorer(counter for counter in (self.pair, *before.values()) if counter is not None)

        def restore() -> None:
            restore_counters()
            for optimizer, counter in self.taken.items() if self.taken else ():
                if counter is not None and before.get(optimizer) is None:
                    counter.zero_()  # made since then

        return restore


def _describe(nonfinite: list[NonFinite], ranks: Agreement | None) -> str:
    """Names the tensors of all ranks. Waits for the device, because training ends here."""
    names, total = [], 0
    for optimizer, params, flags in nonfinite:
        total += len(params)
        name_of = dict(_names(optimizer))
        bad = [param for param, flag in zip(params, flags.tolist(), strict=True) if flag > 0]
        names += [name_of.get(id(param), f"a parameter of shape {list(param.shape)}") for param in bad]
    number = f"{len(names)} of {total}"
    if ranks is not None:
        ranks_of: dict[str, list[str]] = {}
        for rank, there in ranks.gather(names):
            for name in there:
                ranks_of.setdefault(name, []).append(str(rank))
        names = [f"{name} (on rank {', '.join(holders)})" for name, holders in ranks_of.items()]
        number = str(len(names))
    if not names:
        return "No gradient here was infinite or NaN in the last of them: the flag came from elsewhere."
    return f"In the last of them {number} gradients were infinite or NaN: " + lists.some(names, "; ")


def _names(optimizer: Optimizer) -> Iterable[tuple[int, str]]:
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")  # present if it was built from named_parameters()
        for j, param in enumerate(group["params"]):
            yield id(param), names[j] if names else f"group {i}, parameter {j}, shape {list(param.shape)}"

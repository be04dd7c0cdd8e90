"""Units: parameter groups that clip, check, skip and count by themselves, in the launches of one optimizer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks.types import type_name
from .._dispatch.devices import at
from .._dispatch.walks import same_objects
from .._raw.check_and_norm import of_table as check_and_norm_of_table
from .._raw.check_and_norm import op as check_and_norm
from .._raw.judge_units import RULES, STATISTICS
from .._raw.judge_units import op as judge_units_
from .._sharding.agreement import Agreement
from ._gradients import StepAnswer, StepRequest, by_device, home_device
from ._launches import DeviceBatch, Launch
from ._options import UNIT_KEYS, Options, check_unit, check_unit_options

_values_of = operator.itemgetter(*UNIT_KEYS)


class GroupResults(NamedTuple):
    """The last step of an optimizer with ``independent_groups=True``, unit by unit. With ``spike_zscore`` alone there is one unit, 0.
    The tensors are on the device of the parameters.

    Attributes:
        units: the names, in the order of the other entries: ``unit`` of the groups, or a group's index.
        norms: float32 ``[n]``, before clipping; 0 for a unit that was not stepped.
        skipped: bool ``[n]``.
        steps: int64 ``[n]``, the steps taken since the optimizer was made.
        skips: int64 ``[n]``, those asked for and not taken.

    Examples:
        >>> adapters = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        >>> groups = [{"params": adapter.parameters(), "unit": f"user {i}"} for i, adapter in enumerate(adapters)]
        >>> optimizer = ak.optim.AdamW(groups, independent_groups=True, skip_nonfinite=True)
        >>> adapters[0](torch.full((1, 4), torch.inf)).sum().backward()
        >>> adapters[1](torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> results = optimizer.group_results
        >>> results.units, results.skipped.tolist()
        (['user 0', 'user 1'], [True, False])
    """

    units: list[str | int]
    norms: Tensor
    skipped: Tensor
    steps: Tensor
    skips: Tensor


class Units:
    """The units of an optimizer's groups and what they remember."""

    def __init__(self, name: str, options: Options):
        self._name, self._options = name, options
        self._statistics: Tensor | None = None
        self._results: tuple[list[str | int], Tensor] | None = None
        self._read: tuple[list, list] = ([], [])
        self._groups: list[dict[str, Any]] = []  # that were read
        #: The unit of each group, of each unit its name and its values of :data:`UNIT_KEYS`.
        self.of_groups: list[int] = []
        self.names: list[str | int] = []
        self.values: list[tuple] = []
        self.forget()

    def forget(self) -> None:
        """Drop what is cached."""
        self._rules: tuple[Any, Tensor | None] = (None, None)
        self._asked: tuple[Any, Tensor] | None = None
        self._places: tuple[Any, Any] = (None, None)
        self._batches: list[DeviceBatch] = []
        self._agreed: tuple[Any, Any] = (None, None)  # the ranks that have the same units, and these

    def read(self, groups: list[dict[str, Any]], replaced: bool = False) -> None:
        """Note the unit of each group. Without ``independent_groups`` all are one. ``replaced``: by a load, in place of those that were
        read before.

        Raises:
            ValueError: groups of a unit differ in its keys, or one has a value that is not acceptable.
        """
        if not self._options.independent_groups:
            self.of_groups, self.names, self.values = [0] * len(groups), [0], [_values_of(vars(self._options))]
            self._groups = []
            return
        known = groups if replaced and len(groups) == len(self._groups) else self._groups
        names, values = [group.get("unit", i) for i, group in enumerate(groups)], list(map(_values_of, groups))
        if (names, values) == self._read and same_objects(groups, known):
            self._groups = list(groups)
            return
        found: dict[str | int, tuple] = {}
        for name, group, own in zip(names, groups, values, strict=True):
            check_unit(self._name, group, True)
            check_unit_options(self._name, group)
            for key, value, first in zip(UNIT_KEYS, own, found.setdefault(name, own), strict=True):
                if value != first:
                    raise ValueError(
                        f"{self._name}: groups of unit {name!r} have {key} {first!r} and {value!r}; accepted: the same in all groups "
                        "of a unit"
                    )
        self.names, self.values, self._read = list(found), list(found.values()), (names, values)
        number = {name: i for i, name in enumerate(found)}
        of_groups = [number[name] for name in names]
        units = {id(group): unit for group, unit in zip(known, self.of_groups, strict=False)}  # none before the first
        pairs = [(unit, units[id(group)]) for unit, group in zip(of_groups, groups, strict=True) if id(group) in units]
        self._follow(dict(reversed(pairs)))
        self.of_groups, self._groups = of_groups, list(groups)

    def _follow(self, before: dict[int, int]) -> None:
        """Statistics belong to groups, wherever these are now. ``before``: the numbers that units had."""
        kept, known = self._statistics, sorted(before.items())
        if kept is None or (len(known) >= len(kept) and all(new == old for new, old in known)):
            return
        self._statistics, self._results = kept.new_zeros(len(self.names), len(STATISTICS)), None
        for new, old in known:
            if old < len(kept):
                self._statistics[new] = kept[old]

    def of_params(self, groups: list[dict[str, Any]]) -> list[int]:
        """The unit of each parameter."""
        return [unit for unit, group in zip(self.of_groups, groups, strict=True) for _ in group["params"]]

    def numbers(self, groups: list[dict[str, Any]]) -> list[tuple[int, int]]:
        """By parameter, its number in its unit and how many that has: those that an optimizer of the unit's own would give."""
        counts, places, of_params = [0] * len(groups), [], self.of_params(groups)
        for unit in of_params:
            places.append(counts[unit])
            counts[unit] += 1
        return [(place, counts[unit]) for place, unit in zip(places, of_params, strict=True)]

    def asked(self, units: Iterable[str | int] | None) -> frozenset[int] | None:
        """The numbers of the units of that name.

        Raises:
            ValueError: there is no unit of that name.
            TypeError: ``units`` is no list.
        """
        if units is None:
            return None
        if not isinstance(units, Iterable):
            raise TypeError(
                f"{self._name}: units has type {type_name(units)}; accepted: {', '.join(map(repr, self.names))}, in a list"
            )
        wanted = list(units) if not isinstance(units, str) else [units]
        unknown = [unit for unit in wanted if unit not in self.names]
        if unknown:
            raise ValueError(
                f"{self._name}: there is no unit {unknown[0]!r}; accepted: {', '.join(map(repr, self.names))}"
            )
        return frozenset(map(self.names.index, wanted))

    def judge(
        self,
        request: StepRequest,
        launches: list[Launch],
        agreement: Agreement,
        params: list[Tensor],
        groups: list[dict[str, Any]],
    ) -> tuple[StepAnswer, list[Tensor]]:
        """Read the gradients once and decide about every unit. Returns also the factors of each launch's parameters."""
        answer = StepAnswer(agreement=agreement)
        device = launches[0].batch.device if launches else home_device(agreement, params)
        sums, flags = self._measure(request, launches, device, answer)
        rows, ends, units = self._places_of([launch.batch for launch in launches], groups, device)
        if agreement:
            sums, flags = self._of_all_ranks(agreement, sums, flags, rows, ends)
            rows = torch.arange(len(ends), device=device)
            ends = rows + 1
        rules, statistics = self._rules_of(request, device), self._statistics_on(device)
        found_infs = None
        if request.found_inf is not None and not self._options.independent_groups:
            found_infs = at(request.found_inf, device).reshape(1)
        factors, results = judge_units_(sums, flags, rows, ends, rules, statistics, found_infs)
        self._results = list(self.names), results
        norms, _, nonfinite = results.unbind()
        answer.sum_sq = norms.square().sum()
        if request.check or request.found_inf is not None:
            answer.found_infs = {device: nonfinite.amax() if len(nonfinite) else nonfinite.sum()}
        parts = (factors[units] if agreement else factors).split([len(launch.batch.numbers) for launch in launches])
        return answer, [at(part, launch.batch.device) for part, launch in zip(parts, launches, strict=True)]

    def _measure(
        self, request: StepRequest, launches: list[Launch], device: torch.device, answer: StepAnswer
    ) -> tuple[Tensor, Tensor]:
        """Sums and flags of all parameters in the order of the launches."""
        of_launch: dict[int, tuple[Tensor, Tensor]] = {}
        for there, members in by_device(launches).items():
            scale, nothing = at(request.grad_scale, there), members[0].batch.nothing
            tables = [launch.table.tensor for launch in members if launch.table is not None]
            if tables:
                rows = tables[0] if len(tables) == 1 else torch.cat(tables)
                found = check_and_norm_of_table(nothing, rows, scale, True)
            else:
                found = check_and_norm([grad for launch in members for grad in launch.grads], scale, per_tensor=True)
            if request.per_tensor:
                answer.nonfinite.append(([param for launch in members for param in launch.batch.params], found[1]))
            sizes = [len(launch.batch.numbers) for launch in members]
            parts = zip(*(numbers.split(sizes) for numbers in found), strict=True)
            for launch, (sums, flags) in zip(members, parts, strict=True):
                if launch.batch.counted < len(launch.batch.numbers):
                    sums[launch.batch.counted :] *= 0.0
                of_launch[id(launch)] = at(sums, device), at(flags, device)
        found = [of_launch[id(launch)] for launch in launches]
        if len(found) == 1:
            return found[0]
        nothing = torch.zeros(0, device=device)
        return tuple(torch.cat([nothing, *(pair[i] for pair in found)]) for i in (0, 1))

    def _of_all_ranks(
        self, agreement: Agreement, sums: Tensor, flags: Tensor, rows: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sums and flags of all units, with one sum over the ranks. Each rank first adds its tensors of a unit: ranks may have others."""
        if self._agreed != (agreement, self.names):
            if agreement.is_declared:
                self._check_names(agreement)
            self._agreed = agreement, list(self.names)
        own = torch.stack((torch.where(flags < 0, 0.0, sums), flags > 0, flags >= 0)).double()[:, rows]
        offsets = torch.cat((ends.new_zeros(1), ends, ends + len(rows), ends + 2 * len(rows)))
        # In an order that depends on the list alone, unlike index_add on a GPU.
        own = torch.segment_reduce(own.flatten(), "sum", offsets=offsets, initial=0.0, unsafe=True)
        sums, nonfinite, there = agreement.sum(own).view(3, -1)
        return sums.float(), torch.where(there > 0, nonfinite, -1.0).float()

    def _check_names(self, agreement: Agreement) -> None:
        for rank, names in agreement.gather(self.names):
            if names != self.names:
                raise ValueError(
                    f"{self._name}: the units are {self.names} here and {names} on rank {rank}; accepted: the same on all ranks of a "
                    "shard_group, some without parameters"
                )

    def _places_of(
        self, batches: list[DeviceBatch], groups: list[dict[str, Any]], device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``rows`` and ``ends`` of judge_units_ for the parameters of the batches, and their units."""
        key = self.of_groups, device
        if self._places[0] != key or not same_objects(batches, self._batches):
            of_params = self.of_params(groups)
            units = [of_params[number] for batch in batches for number in batch.numbers]
            rows = sorted(range(len(units)), key=units.__getitem__)
            rows, units = (torch.tensor(it, dtype=torch.int64, device="cpu") for it in (rows, units))
            ends = units.bincount(minlength=len(self.names)).cumsum(0)
            self._places, self._batches = (key, (rows.to(device), ends.to(device), units.to(device))), batches
        return self._places[1]

    def _rules_of(self, request: StepRequest, device: torch.device) -> Tensor:
        check = request.check or request.found_inf is not None
        key = self.values, request.max_norm, check
        if self._rules[0] != key:
            rows = []
            for values in self.values:
                own = dict(zip(UNIT_KEYS, values, strict=True))
                limit = own["max_grad_norm"] if request.max_norm is None else request.max_norm
                rule = {
                    "max_norm": -1.0 if limit is None else limit,
                    "check": check or own["skip_nonfinite"],
                    "zscore": own["spike_zscore"] or 0.0,
                    "decay": own["spike_decay"],
                    "warmup": own["spike_warmup"],
                    "skips_spikes": own["spike_action"] == "skip",
                    "asked": True,
                }
                rows.append([float(rule[name]) for name in RULES])
            self._rules = key, torch.tensor(rows, dtype=torch.float64, device="cpu").view(-1, len(RULES))
            self._asked = None
        key = request.units, device
        if self._asked is None or self._asked[0] != key:
            rules = self._rules[1].clone()
            if request.units is not None:
                asked = map(request.units.__contains__, range(len(rules)))
                rules[:, RULES.index("asked")] = torch.tensor([*asked], dtype=torch.float64, device="cpu")
            self._asked = key, rules.to(device)
        return self._asked[1]

    def _statistics_on(self, device: torch.device) -> Tensor:
        """A row for each unit; new units are at the end."""
        kept = self._statistics
        if kept is None or len(kept) != len(self.names) or kept.device != device:
            grown = torch.zeros(len(self.names), len(STATISTICS), dtype=torch.float64, device=device)
            if kept is not None:
                grown[: len(kept)] = kept.to(device)[: len(grown)]
            self._statistics = grown
        return self._statistics

    def statistics_of(self, unit: int) -> Tensor:
        """Columns :data:`STATISTICS` of a unit, a view."""
        device = torch.device("cpu") if self._statistics is None else self._statistics.device
        return self._statistics_on(device)[unit]

    def tensors(self) -> list[Any]:
        """The tensors that the last decision has read and written on the device."""
        return [self._asked and self._asked[1], self._places[1], self._statistics]

    def snapshot(self) -> Callable[[], None]:
        """Copy the statistics. Returns a function that restores them."""
        kept = None if self._statistics is None else self._statistics.clone()

        def restore() -> None:
            if self._statistics is not None:
                self._statistics.zero_()
            if kept is not None:
                self._statistics[: len(kept)] = kept

        return restore

    @torch.no_grad()
    def load_statistics(self, found: dict[int, Tensor | None]) -> None:
        """Set those of some units; ``None``: to zeros."""
        for unit, values in found.items():
            own = self.statistics_of(unit)
            own.zero_() if values is None else own.copy_(values)

    def results(self) -> GroupResults:
        if self._results is None:
            raise RuntimeError(
                f"{self._name}: group_results is read before the first step of these groups; accepted: after step()"
            )
        names, (norms, skipped, _) = self._results
        steps, skips = self._statistics[: len(names), :2].long().unbind(1)
        return GroupResults(names, norms, skipped > 0, steps, skips)

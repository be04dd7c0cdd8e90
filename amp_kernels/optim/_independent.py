"""The methods of an optimizer for its units: groups that step by themselves (``independent_groups=True``)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .._checks.types import check_mapping
from ._checkpoint import CheckpointCodec
from ._groups import GroupChecks
from ._plan import StepPlan
from ._store import StateStore
from ._units import GroupResults


class HasUnits(Optimizer):
    """A part of :class:`FusedOptimizer`."""

    _plan: StepPlan
    _store: StateStore
    _codec: CheckpointCodec
    _checks: GroupChecks

    def _asked(self, units: Iterable[str | int] | None) -> frozenset[int] | None:
        if units is None:
            return None
        if not self.independent_groups:
            raise ValueError(
                f"{type(self).__name__}: units is {units!r} and independent_groups is False; accepted: units with independent_groups=True"
            )
        self._plan.units.read(self.param_groups)
        return self._plan.units.asked(units)

    @property
    def group_results(self) -> GroupResults:
        """The last step, unit by unit; see :class:`GroupResults`. No host sync.

        Raises:
            RuntimeError: before the first step, or with neither ``independent_groups=True`` nor ``spike_zscore``.
        """
        if self._plan.units is None:
            raise RuntimeError(
                f"{type(self).__name__}: independent_groups is False and spike_zscore is None; accepted: one of them, to read group_results"
            )
        return self._plan.units.results()

    def _statistics(self) -> list[Tensor]:
        """The statistics of each group's unit, if norms are judged by units."""
        units = self._plan.units
        if units is None:
            return []
        units.read(self.param_groups)
        return [units.statistics_of(unit) for unit in units.of_groups]

    def _unit(self, unit: str | int) -> tuple[int, list[dict[str, Any]]]:
        """The number of a unit, and its groups."""
        (number,) = self._asked([unit])
        of_groups = self._plan.units.of_groups
        return number, [group for group, own in zip(self.param_groups, of_groups, strict=True) if own == number]

    def unit_state_dict(self, unit: str | int) -> dict[str, Any]:
        """The state of one unit, in the form of ``state_dict`` of an optimizer that has the unit's groups alone: such an optimizer
        loads it, if its options are the values that the groups have, and so does :meth:`load_unit_state_dict`, of any unit with groups of
        these sizes. Tensors are views.

        Args:
            unit: ``unit`` of its groups, or a group's index.

        Raises:
            ValueError: there is no such unit, or ``independent_groups`` is off.
        """
        number, groups = self._unit(unit)
        self._store.adopt_writes()
        return self._codec.exported_unit(groups, self.state, self._plan.units.statistics_of(number))

    def load_unit_state_dict(self, unit: str | int, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`unit_state_dict`, or ``state_dict`` of an optimizer of the unit's own, has returned. Other units keep
        theirs, and this one its name and its parameters. As in ``load_state_dict``, masters that are loaded hold, and masters
        that are not start at the parameters.

        Raises:
            ValueError: as :meth:`unit_state_dict`; or groups, shapes or keys do not fit. Nothing has been changed then.
            TypeError: as ``load_state_dict``.
        """
        check_mapping(type(self).__name__, "state_dict", state_dict, "the state_dict of a unit")
        number, groups = self._unit(unit)
        new, loaded = self._codec.read_unit(groups, state_dict, self.defaults)
        old = [dict(group) for group in groups]
        try:
            for group, values in zip(groups, new, strict=True):
                group.update(values, fused=True, foreach=None)
            self._plan.units.read(self.param_groups)
            self._checks.common("seed", self.param_groups)
            self._replace_state(groups, {param: values for _, param, values in loaded.entries})
        except BaseException:
            for group, values in zip(groups, old, strict=True):
                group.clear()
                group.update(values)
            raise
        self._plan.units.load_statistics({number: loaded.statistics[0]})

    def reset_unit(self, unit: str | int) -> None:
        """Forget the state of one unit: moments, averages, counts and statistics are those of a new optimizer over the parameters as
        they are now, which later writes change as ever. The keys of its groups stay.

        Raises:
            ValueError: as :meth:`unit_state_dict`.
        """
        number, groups = self._unit(unit)
        self._replace_state(groups, {})
        self._plan.units.load_statistics({number: None})

    def _replace_state(self, groups: list[dict[str, Any]], found: dict[Tensor, dict[str, Any]]) -> None:
        """Give the parameters of some groups these states, and new ones to those that have another."""
        params = [(group, param) for group in groups for param in group["params"]]
        has_state = [p in found or id(p) in self._store.places or bool(self.state.get(p)) for _, p in params]
        entries = [(group, p, found.get(p, {})) for group, p in compress(params, has_state)]
        self._store.commit(self._store.pack(entries, load=bool(found)), self.state)

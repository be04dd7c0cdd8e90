"""The parameters of a step: their gradients and states, batches of them by device, and the last step's for the next one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .._dispatch import nodes, policy
from .._dispatch.capture import is_capturing
from .._raw.check_and_norm import op as check_and_norm
from .._sharding.agreement import Agreement, LatestAgreement, declared_in
from .._sharding.local import local
from ._algorithm import Algorithm
from ._gradients import GradientReader
from ._groups import GroupChecks, HyperParameters, PackedGroups
from ._launches import CachedStep, DeviceBatch, Launch, addressable, make_batches
from ._options import Options
from ._state import Place, refuse_other_device, signature
from ._store import Entry, StateStore
from ._units import Units

Groups = list[dict[str, Any]]
_shard_group = operator.methodcaller("get", "shard_group")
Member = tuple[int, int, Tensor]  # the number of a group, the position in it, and the parameter there


@dataclass
class Active:
    """The parameters of a step that have a gradient, in parallel lists."""

    params: list[Tensor] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    places: list[Place | None] = field(default_factory=list)  # None: the state is missing
    pieces: list[int] = field(default_factory=list)  # their ids
    grads: list[Tensor] = field(default_factory=list)  # as the kernels take them
    missing: list[Entry] = field(default_factory=list)
    copied: bool = False  # whether a gradient is not the tensor that its parameter has


class Collector:
    """Finds what a step of one optimizer is about, and caches of it what the next one can use.

    ``groups`` and ``state`` of the methods are the optimizer's ``param_groups`` and ``state``, which users may replace.
    """

    def __init__(
        self, name: str, algorithm: Algorithm, options: Options, checks: GroupChecks, store: StateStore
    ) -> None:
        self._name, self._algorithm, self._options, self._store = name, algorithm, options, store
        self._gradients = GradientReader(name, options)
        self._latest = LatestAgreement()
        self._checks, self.hyper = checks, HyperParameters(algorithm, options, checks)
        self._units = Units(name, options)
        self._members = algorithm.members
        self._staged = any(member.op.stage is not None for member in self._members)
        self.forget()

    @property
    def units(self) -> Units | None:
        """The judge of the norms, if it is not one norm for all by fixed limits."""
        options = self._options
        return self._units if options.independent_groups or options.spike_zscore is not None else None

    def forget(self) -> None:
        """Drop everything that is cached."""
        self._params: list[Tensor] = []  # all of the optimizer's at the last collection,
        self._agreement: Agreement | None = None  # and what their ranks share
        self._batches: tuple[tuple, list[DeviceBatch]] = ((), [])  # with what they were made from
        self.cached: CachedStep | None = None
        self.hyper.forget()
        self._units.forget()

    def agreement(self, groups: Groups) -> Agreement:
        """The ranks to agree with on norms and skips."""
        self._params = list(chain.from_iterable([group["params"] for group in groups]))
        self._agreement = self._latest.over(self._params, self._options.shard_group, declared_in(groups))
        return self._agreement

    def launches(
        self, groups: Groups, state: dict, packed: PackedGroups, asked: frozenset[int] | None = None
    ) -> list[Launch]:
        """The launches of a step: every parameter that has a gradient, with its state, by device. ``packed``: the groups' numbers;
        ``asked``: of independent groups the units to step, ``None``: all."""
        if self.units is not None:
            self.units.read(groups)
        backend = torch._C._len_torch_dispatch_stack() == 0 and policy.requested_backend()
        if self.cached is not None:
            launches = self.cached.lookup(groups, state, self._key(groups, packed, backend), asked)
            if launches is not None:
                return launches
            self.cached = None
        return self._collect(groups, state, packed, backend, asked)

    def _collect(
        self, groups: Groups, state: dict, packed: PackedGroups, backend: Any, asked: frozenset[int] | None
    ) -> list[Launch]:
        """The launches without a cached step. Caches a step whose parameters were there in the last one already, so that a
        new one in each step costs no more than it must."""
        self._store.outgrow()
        self.agreement(groups)
        members = members_of(groups)
        if asked is not None:
            members = (member for member in members if self.units.of_groups[member[0]] in asked)
        active = self._find_active(groups, state, members)
        if active.missing:
            self._make_state(active, state)
        launches = self._of_changing_units(active, groups, state, packed, backend, asked)
        if launches is not None:
            return launches
        batches, new = self._batches_of(active, groups)
        grad_of = {id(param): grad for param, grad in zip(active.params, active.grads, strict=True)}
        grads = [[grad_of[id(param)] for param in batch.params] for batch in batches]
        if batches and not new and self._is_cacheable(batches, grads, active, backend):
            key = self._key(groups, packed, backend)
            of_params = None if self.units is None else self.units.of_params(groups)
            self.cached = CachedStep(groups, state, batches, grads, key, self._takes_tables(batches), of_params, asked)
        return [Launch(batch, found, None) for batch, found in zip(batches, grads, strict=True)]

    def _of_changing_units(
        self,
        active: Active,
        groups: Groups,
        state: dict,
        packed: PackedGroups,
        backend: Any,
        asked: frozenset[int] | None,
    ) -> list[Launch] | None:
        """The launches of all parameters that have a state, of which units without gradients take no part: the cached step then serves
        any set of units. ``None`` with other ranks, and where the step of a unit is not one that a table describes."""
        units = self.units
        if not self._options.independent_groups or self._agreement or not active.params:
            return None
        grad_of = {id(param): grad for param, grad in zip(active.params, active.grads, strict=True)}
        present, whole = {units.of_groups[index] for index in active.groups}, Active(copied=active.copied)
        for index, _, param in members_of(groups):
            place, piece = self._store.places.get(id(param)), local(param)
            if place is None or (id(param) not in grad_of and not place.serves(state)):
                continue
            if id(param) not in grad_of and units.of_groups[index] in present:
                return None
            whole.params.append(param)
            whole.groups.append(index)
            whole.places.append(place)
            whole.pieces.append(id(piece))
        batches, _ = self._batches_of(whole, groups)
        grads = [[grad_of.get(id(param)) for param in batch.params] for batch in batches]
        found = [[grad for grad in of_batch if grad is not None] for of_batch in grads]
        if not (self._is_cacheable(batches, found, active, backend) and self._takes_tables(batches)):
            return None
        key, of_params = self._key(groups, packed, backend), units.of_params(groups)
        self.cached = CachedStep(groups, state, batches, grads, key, True, of_params, masked=True)
        return self.cached.lookup(groups, state, key, asked)

    def _key(self, groups: Groups, packed: PackedGroups, backend: Any) -> tuple:
        """All that a cached step depends on besides tensors."""
        shared = self._options.shard_group, list(map(_shard_group, groups))
        if self.units is not None:
            shared = *shared, self.units.of_groups
        return backend, self._store.version, packed.used, packed.averaged, shared

    def _find_active(self, groups: Groups, state: dict, members: Iterable[Member]) -> Active:
        """Check the gradient of every member and look up the state of its parameter; adopt writes to parameters that have moved."""
        active, read, known = Active(), self._gradients.read, self._store.places
        kept = {} if self.host is None else self.host.kept
        for index, position, param in members:
            shown_grad = kept.get(id(param), param.grad)
            if shown_grad is None:
                continue
            group = groups[index]
            piece = local(param)
            place, shown = known.get(id(param)), state.get(param)
            if place is None or place.state is not shown or place.signature != signature(param):
                # New, thawed, moved or converted, or its state was replaced: adopt the shown state.
                self._checks.check_param(group, position)
                if place is not None and place.signature == signature(param):
                    for name, value in (shown or {}).items():
                        refuse_other_device(name, value, place.piece)
                active.missing.append((group, param, self._store.current(param, state)))
                place = None
            elif place.unloaded is not None or place.address != piece.data_ptr():
                if place.unloaded is not None and is_capturing(param):
                    raise RuntimeError(
                        f"{self._name}: the first step after load_state_dict compares weights on the host, which a CUDA graph "
                        "cannot record; take one step before the capture"
                    )
                place.settle()
            grad = shown_grad if id(param) in kept else read(param, shown_grad, piece)
            if kept:
                grad = grad.to("cpu")  # all in one place for the measurement
            if grad is not shown_grad and grad is not local(shown_grad):
                active.copied = True
            active.params.append(param)
            active.groups.append(index)
            active.places.append(place)
            active.pieces.append(id(piece))
            active.grads.append(grad)
        return active

    def _make_state(self, active: Active, state: dict) -> None:
        if any(is_capturing(param) for _, param, _ in active.missing):
            raise RuntimeError(
                f"{self._name}: state would be created during CUDA graph capture, and each replay would reset it; "
                "take one step with all gradients present before the capture"
            )
        self._store.commit(self._store.pack(active.missing), state)
        active.places = [self._store.places[id(param)] for param in active.params]

    def _batches_of(self, active: Active, groups: Groups) -> tuple[list[DeviceBatch], bool]:
        """The batches of a step, and whether they had to be made. The sizes of the groups decide the parameters' numbers."""
        sizes = [len(group["params"]) for group in groups]
        numbered = None if self.units is None else self.units.numbers(groups)
        key = self._agreement, sizes, active.groups, active.places, active.pieces, numbered
        if key == self._batches[0]:
            return self._batches[1], False
        batches = self._make_batches(active, {id(param): i for i, param in enumerate(self._params)}, numbered)
        self._batches = (key, batches)
        return batches, True

    def _make_batches(
        self, active: Active, number: dict[int, int], numbered: list[tuple[int, int]] | None = None
    ) -> list[DeviceBatch]:
        members = list(zip(active.groups, active.places, strict=True))
        counts, shard_group = self._agreement.counts, self._options.shard_group
        return make_batches(number, members, counts, shard_group, lambda group: self._algorithm.of(group).op, numbered)

    def _is_cacheable(
        self, batches: list[DeviceBatch], grads: list[list[Tensor]], active: Active, backend: Any
    ) -> bool:
        """True if the addresses of the parameters' own gradients describe the next step."""
        own = not active.copied and backend is not False and nodes.step_walk() is not None and self.host is None
        return own and all(map(addressable, batches, grads))

    def _takes_tables(self, batches: list[DeviceBatch]) -> bool:
        """True if the ops run in C++, which takes addresses instead of tensors."""
        chosen = {policy.select(op, b.nothing) for b in batches for op in (b.op.op, check_and_norm)}
        return chosen <= {"cpu", "cuda", "emulate"}


def members_of(groups: Groups) -> Iterator[Member]:
    return ((i, j, param) for i, group in enumerate(groups) for j, param in enumerate(group["params"]))

"""The host's part of a step: collect gradients, make missing state, batch by device, measure, launch."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._checks.stack import users_line
from .._dispatch import nodes, policy
from .._dispatch.capture import is_capturing
from .._dispatch.devices import at, largest_flag
from .._raw.check_and_norm import op as check_and_norm
from .._sharding.agreement import Agreement, LatestAgreement, declared_in
from .._sharding.local import is_dtensor, local
from .._updates.arguments import UpdateArguments
from .._updates.op import UpdateCall, take_together
from .._updates.state import Column
from ._algorithm import Algorithm, Update
from ._gradients import GradientReader, StepAnswer, StepRequest, measure
from ._groups import GroupChecks, HyperParameters, PackedGroups
from ._host import HostUpdates
from ._launches import CachedStep, DeviceBatch, Launch, LoneStep, addressable, make_batches
from ._options import Options, check_state_device
from ._state import Place, refuse_other_device, signature
from ._store import Entry, StateStore
from ._units import Units

Groups = list[dict[str, Any]]
_shard_group = operator.methodcaller("get", "shard_group")
_Member = tuple[int, int, Tensor]  # the number of a group, the position in it, and the parameter there


@dataclass
class _Active:
    """The parameters of a step that have a gradient, in parallel lists."""

    params: list[Tensor] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    places: list[Place | None] = field(default_factory=list)  # None: the state is missing
    pieces: list[int] = field(default_factory=list)  # their ids
    grads: list[Tensor] = field(default_factory=list)  # as the kernels take them
    missing: list[Entry] = field(default_factory=list)
    copied: bool = False  # whether a gradient is not the tensor that its parameter has


class StepPlan:
    """Plans and takes the steps of one optimizer, and caches of a step what the next one can use.

    ``groups`` and ``state`` of the methods are the optimizer's ``param_groups`` and ``state``, which users may replace.
    """

    def __init__(
        self, name: str, algorithm: Algorithm, options: Options, checks: GroupChecks, store: StateStore
    ) -> None:
        self._name, self._algorithm, self._options, self._store = name, algorithm, options, store
        self._gradients = GradientReader(name, options)
        self._latest = LatestAgreement()
        self._warned = False
        self._checks, self.hyper = checks, HyperParameters(algorithm, options, checks)
        self._units = Units(name, options)
        self._members = algorithm.members
        self.host = None if options.state_device is None else HostUpdates(algorithm, options, self._host_batch)
        if self.host is not None:
            store.complete = self.host.finish
        self._staged = any(member.op.stage is not None for member in self._members)
        self._maskable = all(type(member).prepared is Algorithm.prepared for member in self._members)
        self.forget()

    @property
    def units(self) -> Units | None:
        """What judges the norms, if it is not one norm for all by fixed limits."""
        options = self._options
        return self._units if options.independent_groups or options.spike_zscore is not None else None

    def forget(self) -> None:
        """Drop everything that is cached."""
        self._params: list[Tensor] = []  # all of the optimizer's at the last collection,
        self._agreement: Agreement | None = None  # and what their ranks share
        self._needs_norm: bool | None = None  # the last step; None: it has none
        self._batches: tuple[tuple, list[DeviceBatch]] = ((), [])  # with what they were made from
        self.cached: CachedStep | None = None
        self._alone: tuple = ()  # what the steps of single parameters share, besides groups and state,
        self._lone: dict[int, LoneStep] = {}  # and these steps
        self._host_key: tuple[dict[int, int], int] = ({}, -1)  # numbers of parameters, and the store's version
        self.hyper.forget()
        self._units.forget()
        if self.host is not None:
            self.host.forget()

    def agreement(self, groups: Groups) -> Agreement:
        """The ranks to agree with on norms and skips."""
        self._params = list(chain.from_iterable([group["params"] for group in groups]))
        self._agreement = self._latest.over(self._params, self._options.shard_group, declared_in(groups))
        return self._agreement

    # ---- the step ----

    def step(self, groups: Groups, state: dict, request: StepRequest) -> StepAnswer:
        """Take a step. Nothing has been changed if it raises."""
        options = self._options
        self._store.check_home()
        if self.host is not None:
            check_state_device(self._name, vars(options))  # they can be set late
        packed = self.hyper.packed(groups)
        launches = self.launches(groups, state, packed, request.units)
        if self.cached is not None and self.cached.present is not None:
            request = request._replace(units=self.cached.present)
        self._store.marks.clear()
        if not (launches or self._agreement or self._warned):
            self._warned = True
            warnings.warn(
                f"{self._name}: no parameter has a gradient, so the step changes nothing; accepted: a step after backward(), and "
                "the parameters of the model that was trained",
                stacklevel=users_line(),
            )
        max_norm = request.max_norm
        independent = self.units is not None
        if request.check or max_norm is not None or self._staged or independent:
            self._agreement.check(self._name)
        self._needs_norm = (
            independent or max_norm is not None if request.check or max_norm is not None or independent else None
        )
        if self.host is not None:
            self.host.wait_for_kept()
        is_norm_known = self._settle()
        factors: list[Tensor | None] = [None] * len(launches)
        if independent:
            answer, factors = self.units.judge(request, launches, self._agreement, self._params, groups)
        else:
            answer = measure(request, launches, self._agreement, self._params, norm=max_norm is not None)
        if not is_norm_known:
            answer.sum_sq = None
        if self.host is not None:
            self._step_on_host(launches, groups, packed, request, answer)
        else:
            updates = [
                self._update(launch, groups, packed, request, answer, of_launch)
                for launch, of_launch in zip(launches, factors, strict=True)
            ]
            calls: list[UpdateCall] = []
            for member in self._members:
                own = [update for update in updates if update.launch.batch.op is member.op]
                # The first call may lack memory: not one after others whose memory has been used before.
                calls = member.prepared(own, self._agreement, groups) + calls
            take_together(calls)
        for launch in launches:
            if self.host is None:
                launch.note_written()
            if options.zero_grads:
                batch, _, table = launch
                params = [param for param in batch.params if param.grad is not None]  # not kept in host memory
                grads = table.grads() if table is not None else [local(param.grad) for param in params]
                if request.units is not None:
                    rows = zip(grads, batch.layout[:, 3].tolist(), strict=True)
                    grads = [grad for grad, group in rows if self.units.of_groups[group] in request.units]
                if grads:  # of units that were asked for, or kept in host memory, there may be none
                    torch._foreach_zero_(grads)
        return answer

    def _step_on_host(
        self,
        launches: list[Launch],
        groups: Groups,
        packed: PackedGroups,
        request: StepRequest,
        answer: StepAnswer,
    ) -> None:
        """Nothing of a step that is skipped."""
        flag = largest_flag([request.found_inf, *answer.found_infs.values()], torch.device("cpu"))
        if flag is None or not flag.item() > 0:
            self._begin_on_host(groups, packed, request, answer)
            for batch, grads, _ in launches:
                of_rows = batch.layout[:, Column.GROUP - Column.BLOCK].tolist()
                for param, grad, group in zip(batch.params, grads, of_rows, strict=True):
                    self.host.add(group, self._store.places[id(param)], grad)
            self.host.finish()

    def _begin_on_host(self, groups: Groups, packed: PackedGroups, request: StepRequest, answer: StepAnswer) -> None:
        number = {id(param): i for i, param in enumerate(self._params)}
        if (number, self._store.version) != self._host_key:
            self._host_key = number, self._store.version
            self.host.forget()
        self.host.begin(groups, lambda launch: self._arguments(launch, groups, packed, request, answer, None))

    def _host_batch(self, groups: list[int], places: list[Place]) -> DeviceBatch:
        active = _Active(groups=groups, places=places)
        (batch,) = self._make_batches(active, self._host_key[0])
        return batch

    def _settle(self) -> bool:
        """Exchange evidence about the squares of the last step's norm, if it has one; ``False``: some are left out."""
        name = self._name if self._needs_norm else None
        return self._needs_norm is None or self._agreement is None or self._agreement.settle(name)

    def _update(
        self,
        launch: Launch,
        groups: Groups,
        packed: PackedGroups,
        request: StepRequest,
        answer: StepAnswer,
        factors: Tensor | None,
    ) -> Update:
        """The arguments of the update op, with masters and shadows brought up to date."""
        launch.batch.shadows.renew()
        launch.batch.written.adopt()
        return Update(launch, self._arguments(launch, groups, packed, request, answer, factors))

    def _arguments(
        self,
        launch: Launch,
        groups: Groups,
        packed: PackedGroups,
        request: StepRequest,
        answer: StepAnswer,
        factors: Tensor | None,
    ) -> UpdateArguments:
        batch, max_norm = launch.batch, request.max_norm if factors is None else None
        flags = [request.found_inf, *answer.found_infs.values()] if factors is None else []
        return UpdateArguments(
            batch.pieces,
            launch.grads,
            *batch.state(packed.used, packed.averaged),
            batch.layout,
            *self.hyper.on_device(groups, batch.device),
            grad_scale=at(request.grad_scale, batch.device),
            found_inf=largest_flag(flags, batch.device),
            sum_sq=None if max_norm is None else at(answer.sum_sq, batch.device),
            options=packed.options[batch.op.declared.name],
            ema_decay=packed.ema_decays,
            flags=packed.flags,
            max_norm=0.0 if max_norm is None else float(max_norm),
            seed=self._options.seed,
            factors=factors,
        )

    # ---- collection ----

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
        members = _members(groups)
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
        active: _Active,
        groups: Groups,
        state: dict,
        packed: PackedGroups,
        backend: Any,
        asked: frozenset[int] | None,
    ) -> list[Launch] | None:
        """The launches of all parameters that have a state, of which units without gradients take no part: the cached step then serves
        any set of units. ``None`` where kernels of several passes, or other ranks, would read those, too."""
        units = self.units
        if not (self._options.independent_groups and self._maskable) or self._agreement or not active.params:
            return None
        grad_of = {id(param): grad for param, grad in zip(active.params, active.grads, strict=True)}
        present, whole = {units.of_groups[index] for index in active.groups}, _Active(copied=active.copied)
        for index, _, param in _members(groups):
            place, piece = self._store.places.get(id(param)), local(param)
            if place is None or (id(param) not in grad_of and not place.serves(state)):
                continue
            if id(param) not in grad_of and units.of_groups[index] in present:
                return None
            whole.params.append(param)
            whole.groups.append(index)
            whole.places.append(place)
            whole.pieces.append(id(piece))
            whole.grads.append(grad_of.get(id(param)))
        batches, _ = self._batches_of(whole, groups)
        grad_of = {id(param): grad for param, grad in zip(whole.params, whole.grads, strict=True)}
        grads = [[grad_of[id(param)] for param in batch.params] for batch in batches]
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

    def _find_active(self, groups: Groups, state: dict, members: Iterable[_Member]) -> _Active:
        """Check the gradient of every member and look up the state of its parameter; adopt writes to parameters that have moved."""
        active, read, known = _Active(), self._gradients.read, self._store.places
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

    def _make_state(self, active: _Active, state: dict) -> None:
        if any(is_capturing(param) for _, param, _ in active.missing):
            raise RuntimeError(
                f"{self._name}: state would be created during CUDA graph capture, and each replay would reset it; "
                "take one step with all gradients present before the capture"
            )
        self._store.commit(self._store.pack(active.missing), state)
        active.places = [self._store.places[id(param)] for param in active.params]

    def _batches_of(self, active: _Active, groups: Groups) -> tuple[list[DeviceBatch], bool]:
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
        self, active: _Active, number: dict[int, int], numbered: list[tuple[int, int]] | None = None
    ) -> list[DeviceBatch]:
        members = list(zip(active.groups, active.places, strict=True))
        counts, shard_group = self._agreement.counts, self._options.shard_group
        return make_batches(number, members, counts, shard_group, lambda group: self._algorithm.of(group).op, numbered)

    def _is_cacheable(
        self, batches: list[DeviceBatch], grads: list[list[Tensor]], active: _Active, backend: Any
    ) -> bool:
        """True if the addresses of the parameters' own gradients describe the next step."""
        own = not active.copied and backend is not False and nodes.step_walk() is not None and self.host is None
        return own and all(map(addressable, batches, grads))

    def _takes_tables(self, batches: list[DeviceBatch]) -> bool:
        """True if the ops run in C++, which takes addresses instead of tensors."""
        chosen = {policy.select(op, b.nothing) for b in batches for op in (b.op.op, check_and_norm)}
        return chosen <= {"cpu", "cuda", "emulate"}

    # ---- the step of one parameter ----

    def begin_alone(self, groups: Groups) -> None:
        """Before :meth:`step_alone`: read the groups, as a step of all parameters does."""
        self._store.check_home()
        self._store.outgrow()
        self._store.marks.clear()
        backend = torch._C._len_torch_dispatch_stack() == 0 and policy.requested_backend()
        alone = self.hyper.packed(groups), self.hyper.on_host, self.agreement(groups), backend
        if alone != self._alone:
            self._alone, self._lone = alone, {}
            self._member_of = {id(member[2]): member for member in _members(groups)}
            self._number_of = {key: number for number, key in enumerate(self._member_of)}
        if self.host is not None:
            self._begin_on_host(groups, alone[0], StepRequest(), StepAnswer())

    def step_alone(self, param: Tensor, groups: Groups, state: dict) -> bool:
        """Step ``param`` as a step of all would, whatever gradients others have. Nothing has been changed if it raises, or returns
        ``False``: it is not in the groups. With state in host memory the update ends later."""
        if self.host is not None:
            return self._add_alone(param, groups, state)
        lone, place = self._lone.get(id(param)), self._store.places.get(id(param))
        if lone is not None and lone.belongs_to(place) and place.state is state.get(param) and lone.take():
            return True
        member = self._member_of.get(id(param))
        if member is not None:
            with torch.no_grad():
                self._plan_alone(member, groups, state)
        return member is not None

    def _add_alone(self, param: Tensor, groups: Groups, state: dict) -> bool:
        member = self._member_of.get(id(param))
        if member is not None:
            with torch.no_grad():
                active = self._find_active(groups, state, [member])
                if active.missing:
                    self._make_state(active, state)
                self.host.add(member[0], active.places[0], active.grads[0])
        return member is not None

    def keep_alone(self, param: Tensor) -> bool:
        """Take the gradient of ``param`` to host memory for the next step; ``False``: it is not in the groups."""
        if id(param) not in self._member_of:
            return False
        with torch.no_grad():
            self.host.keep(param, self._gradients.read(param, param.grad, local(param)))
        return True

    def _plan_alone(self, member: _Member, groups: Groups, state: dict) -> None:
        index, _, param = member
        packed, *_, backend = self._alone
        active = self._find_active(groups, state, [member])
        if active.missing:
            self._make_state(active, state)
        (place,), grads = active.places, active.grads
        lone = self._lone.get(id(param))
        if lone is None or not lone.belongs_to(place) or lone.batch.pieces[0] is not place.piece:
            (batch,) = self._make_batches(active, self._number_of)
            self._batches, self.cached = ((), []), None  # the new batch has taken the place's version over
            batch.numbers = [0]  # in the groups that the algorithm is given: the other parameters take no part
            lone = self._lone[id(param)] = LoneStep(place, batch, place.versions)
        launch = Launch(lone.batch, grads, None)
        update = self._update(launch, groups, packed, StepRequest(), StepAnswer(), None)
        own = [{**group, "params": [param] if i == index else []} for i, group in enumerate(groups)]
        agreement = lone.agreement.over([param], self._options.shard_group, declared_in(own))
        calls = self._algorithm.of(groups[index]).prepared([update], agreement, own)
        take_together(calls)
        launch.note_written()
        is_plain = len(calls) == 1 and calls[0].arguments is update.arguments and self.hyper.on_host
        if is_plain and self._is_cacheable([lone.batch], [grads], active, backend) and self._takes_tables([lone.batch]):
            lone.cache(update.arguments, grads)

    # ---- captured steps ----

    def conditions(self, groups: Groups, state: dict) -> tuple[list[Any], list[Any]]:
        """The conditions of a captured step: objects, to be compared by identity, and numbers."""
        params = list(chain.from_iterable([group["params"] for group in groups]))
        places = [(_address(param), param.requires_grad) for param in params]
        shared = [group.get("shard_group") for group in groups]
        numbers = [*self.hyper.packed(groups).fixed_numbers(), self._options.seed]
        if self.units is not None:
            self.units.read(groups)
            numbers += [self.units.of_groups, self.units.values, self.cached and self.cached.present]
        return [self._batches, *state.values(), *params], [numbers, places, shared]

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Around a replay of the last step: the host's part of it, which a graph does not record."""
        self._store.check_home()
        batches = self._batches[1]
        for batch in batches:
            batch.shadows.renew()
            batch.written.adopt()
        yield
        for batch in batches:
            torch.autograd.graph.increment_version([p for p in batch.params if not p.is_inference()])
            batch.shadows.stamp()
            batch.written.stamp()
        self._settle()


def _members(groups: Groups) -> Iterator[_Member]:
    return ((i, j, param) for i, group in enumerate(groups) for j, param in enumerate(group["params"]))


def _address(param: Tensor) -> int:
    """Where it is in memory; 0 for a frozen parameter of a class that has no memory of its own."""
    return 0 if is_traceable_wrapper_subclass(param) and not is_dtensor(param) else param.data_ptr()

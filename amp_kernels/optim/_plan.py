"""The host's part of a step: measure the gradients, launch the updates."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._checks.stack import users_line
from .._dispatch import policy, walks
from .._dispatch.devices import at, largest_flag
from .._sharding.agreement import declared_in
from .._sharding.local import is_dtensor, local
from .._updates.arguments import UpdateArguments
from .._updates.op import UpdateCall, take_together
from ._algorithm import Algorithm, Update
from ._collect import Active, Collector, Groups, Member, members_of
from ._gradients import StepAnswer, StepRequest, measure
from ._groups import GroupChecks, PackedGroups
from ._host import HostUpdates
from ._launches import DeviceBatch, Launch, LoneStep
from ._options import Options
from ._state import Place
from ._store import StateStore


class StepPlan(Collector):
    """Takes the steps of one optimizer.

    ``groups`` and ``state`` of the methods are the optimizer's ``param_groups`` and ``state``, which users may replace.
    """

    def __init__(
        self, name: str, algorithm: Algorithm, options: Options, checks: GroupChecks, store: StateStore
    ) -> None:
        self.host = None if options.state_device is None else HostUpdates(algorithm, options, self._host_batch)
        if self.host is not None:
            store.complete = self.host.finish
        self._warned = False
        super().__init__(name, algorithm, options, checks, store)

    def forget(self) -> None:
        """Drop everything that is cached."""
        if self.host is not None:
            self.host.finish()  # which needs it
        super().forget()
        self._needs_norm: bool | None = None  # the last step; None: it has none
        self._alone: tuple = ()  # what the steps of single parameters share, besides groups and state,
        self._lone: dict[int, LoneStep] = {}  # and these steps
        self._host_key: tuple[dict[int, int], int] = ({}, -1)  # numbers of parameters, and the store's version
        if self.host is not None:
            self.host.forget()

    # ---- the step ----

    def step(self, groups: Groups, state: dict, request: StepRequest) -> StepAnswer:
        """Take a step. Nothing has been changed if it raises."""
        options = self._options
        self._store.check_home()
        packed = self.hyper.packed(groups)
        launches = self.launches(groups, state, packed, request.units)
        if self.cached is not None and self.cached.present is not None:
            request = request._replace(units=self.cached.present)
        self._store.marks.clear()
        if not (launches or self._agreement or self._warned or request.units == frozenset()):
            self._warned = True
            warnings.warn(
                f"{self._name}: no parameter has a gradient, so the step changes nothing; accepted: a step after backward(), and "
                "the parameters of the model that was trained",
                stacklevel=users_line(),
            )
        units = self.units
        needs_norm = units is not None or request.max_norm is not None
        if request.check or needs_norm or self._staged:
            self._agreement.check(self._name)
        self._needs_norm = needs_norm if request.check or needs_norm else None
        if self.host is not None:
            self.host.wait_for_kept()
        is_norm_known = self._settle()
        factors: list[Tensor | None] = [None] * len(launches)
        if units is not None:
            answer, factors = units.judge(request, launches, self._agreement, self._params, groups)
        else:
            measured = {} if self.host is None else self.host.measured
            answer = measure(request, launches, self._agreement, self._params, needs_norm, measured)
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
                    rows = zip(grads, batch.groups_of_params, strict=True)
                    grads = [grad for grad, group in rows if units.of_groups[group] in request.units]
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
            try:
                for batch, grads, _ in launches:
                    for param, grad, group in zip(batch.params, grads, batch.groups_of_params, strict=True):
                        self.host.add(group, self._store.places[id(param)], grad)
            finally:  # an interrupt leaves no part of a bucket for the next step
                self.host.finish()

    def _begin_on_host(self, groups: Groups, packed: PackedGroups, request: StepRequest, answer: StepAnswer) -> None:
        number = {id(param): i for i, param in enumerate(self._params)}
        if (number, self._store.version) != self._host_key:
            self._host_key = number, self._store.version
            self.host.forget()
        self.host.begin(groups, lambda launch: self._arguments(launch, groups, packed, request, answer, None))

    def _host_batch(self, groups: list[int], places: list[Place]) -> DeviceBatch:
        active = Active(groups=groups, places=places)
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
            self._member_of = {id(member[2]): member for member in members_of(groups)}
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

    def keep_alone(self, param: Tensor, scale: Tensor | None) -> bool:
        """Take the gradient of ``param``, which carries a ``scale``, to host memory for the next step; ``False``: it is not in the
        groups."""
        if id(param) not in self._member_of:
            return False
        with torch.no_grad():
            self.host.keep(param, self._gradients.read(param, param.grad, local(param)), scale)
        return True

    def _plan_alone(self, member: Member, groups: Groups, state: dict) -> None:
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
        numbers, read = [*self.hyper.packed(groups).fixed_numbers(), self._options.seed], []
        if self.units is not None:
            self.units.read(groups)
            numbers += [self.units.of_groups, self.units.values]
            read = self.units.tensors()
        return [self._batches, *state.values(), *params, *read], [numbers, places, shared]

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
            walks.bump_versions(batch.params)
            batch.shadows.stamp()
            batch.written.stamp()
        self._settle()


def _address(param: Tensor) -> int:
    """The address of its memory; 0 for a frozen parameter of a class that has none of its own."""
    return 0 if is_traceable_wrapper_subclass(param) and not is_dtensor(param) else param.data_ptr()

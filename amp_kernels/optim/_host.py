"""Updates in host memory: gradients leave the device in buckets, the CPU updates state and weights, and the weights return.

A bucket is copied into a slot of pinned memory, updated there by one thread, and its weights return through the same slot from another
thread. Several buckets are under way at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from .._dispatch import walks
from .._sharding.agreement import LatestAgreement, declared_in
from .._sharding.local import is_dtensor, like, local
from .._sharding.pieces import most_elements
from .._updates.arguments import UpdateArguments
from .._updates.op import take_together
from ..ops._shadows import refresh_shadow
from ._algorithm import Algorithm, Update
from ._gradients import Measured, measure_one
from ._launches import DeviceBatch, Launch
from ._options import Options
from ._state import Place

BUCKET_BYTES = 2**25  # or one parameter that has more
SLOTS = 3  # one in each stage


class Pipeline:
    """Takes jobs through two threads, ``update`` and ``back``, in order. Each job has one of the ``slots``, which its owner takes and
    fills before."""

    def __init__(self, slots: Iterable[Any], threads: int) -> None:
        self._free: SimpleQueue[Any] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._updates = ThreadPoolExecutor(1, "amp_kernels_update", _start_with, (threads,))
        self._backs = ThreadPoolExecutor(1, "amp_kernels_back")
        self._updates.submit(int).result()
        torch.set_num_threads(torch.get_num_threads())  # threads that start later have the program's number again
        self._pending: list[Future] = []

    def take(self) -> Any:
        """A free slot; waits for one."""
        return self._free.get()

    def put(self, slot: Any, update: Callable[[Any], None], back: Callable[[Any], None]) -> None:
        """Call ``update(slot)`` and then, if it does not raise, ``back(slot)``, and free the slot."""
        updated = self._updates.submit(update, slot)
        self._pending.append(self._backs.submit(self._finish, updated, slot, back))

    def _finish(self, updated: Future, slot: Any, back: Callable[[Any], None]) -> None:
        try:
            updated.result()
            back(slot)
        finally:
            self._free.put(slot)

    def give(self, slot: Any) -> None:
        """Free a slot that was taken and not put."""
        self._free.put(slot)

    def wait(self) -> None:
        """Wait for all jobs, whose errors :meth:`drain` raises."""
        for job in list(self._pending):
            job.exception()

    def drain(self) -> None:
        """Wait for all jobs; raises the first error."""
        errors = []
        while self._pending:  # an interrupt leaves the rest for the next call
            errors.append(self._pending[0].exception())
            self._pending.pop(0)
        for error in filter(None, errors):
            raise error


def _start_with(threads: int) -> None:
    """In a thread that just began: the number of threads that its ops have. torch reads the number of all new threads once more."""
    torch.set_num_threads(threads)
    torch.get_num_threads()


class Lanes:
    """Copies between a device and host memory: on a GPU a stream in each direction. ``None`` stands for a CPU, which copies at once."""

    def __init__(self, device: torch.device) -> None:
        self._down, self._up = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))

    def down(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Begin to copy from the device, after what the current stream has done. Returns a function that waits for the end."""
        if self._down is None:
            for target, source in pairs:
                target.copy_(source)
            return _nothing
        self._down.wait_stream(torch.cuda.current_stream(self._down.device))
        with torch.cuda.stream(self._down):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._down)
            return self._down.record_event().synchronize

    def up(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy to the device, and wait for the end."""
        with nullcontext() if self._up is None else torch.cuda.stream(self._up):
            for target, source in pairs:
                target.copy_(source, non_blocking=self._up is not None)
            if self._up is not None:
                self._up.record_event().synchronize()


def _nothing() -> None:
    """Wait for nothing."""


@dataclass
class Bucket:
    """Parameters that are updated together. Gradients leave the device into the slot, or are in host memory already."""

    slot: Tensor  # bytes
    places: list[Place] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # parts of the slot, for the way back
    waits: list[Callable[[], None]] = field(default_factory=list)
    used: int = 0  # bytes of the slot


@dataclass
class _Plan:
    """The common part of updates of the same parameters."""

    places: list[Place]
    batch: DeviceBatch
    params: list[Tensor]  # as the algorithm sees them: in host memory
    agreement: LatestAgreement = field(default_factory=LatestAgreement)


class HostUpdates:
    """The updates of one optimizer whose state is in host memory.

    Args:
        algorithm: of the optimizer.
        options: of the optimizer.
        batch_of: ``batch_of(groups, places)`` makes the batch of some parameters, given with the numbers of their groups.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        options: Options,
        batch_of: Callable[[list[int], list[Place]], DeviceBatch],
    ) -> None:
        self._algorithm, self._options, self._batch_of = algorithm, options, batch_of
        self._lines: dict[torch.device, tuple[Pipeline, Lanes]] = {}
        self._open: dict[tuple[torch.device, Algorithm], Bucket] = {}
        self._done: list[Place] = []
        self._groups: list[dict[str, Any]] = []
        self.kept: dict[int, Tensor] = {}  # gradients that wait in host memory for the step, by the parameter's id
        self.measured: dict[int, Measured] = {}  # what is known of them
        self._waits: list[Callable[[], None]] = []  # for these
        self._spare: dict[int, Tensor] = {}  # their memory
        self.forget()

    def forget(self) -> None:
        """Drop what is cached."""
        self._plans: dict[tuple[int, ...], _Plan] = {}

    def prepare(self, params: Iterable[Tensor]) -> None:
        """Pin the memory of the slots, which would stall a step."""
        for device in dict.fromkeys(local(param).device for param in params if param.requires_grad):
            self._line(device)

    # ---- gradients that wait for a decision ----

    def keep(self, param: Tensor, grad: Tensor, scale: Tensor | None) -> None:
        """Measure a gradient, which carries a ``scale``, and begin to copy it into host memory, where it stays until :meth:`drop`."""
        self.measured[id(param)] = measure_one(grad, scale)
        spare = self._spare.get(id(param))
        if spare is None or (spare.shape, spare.stride(), spare.dtype) != (grad.shape, grad.stride(), grad.dtype):
            spare = torch.empty_like(grad, device="cpu", pin_memory=grad.is_cuda)
        self._spare[id(param)] = self.kept[id(param)] = spare
        self._waits.append(self._line(grad.device)[1].down([(spare, grad)]))

    def wait_for_kept(self) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()

    def drop(self) -> None:
        """Forget the kept gradients. Their memory stays for the next ones."""
        self.wait_for_kept()
        self.kept, self.measured = {}, {}

    # ---- updates ----

    def begin(self, groups: list[dict[str, Any]], arguments: Callable[[Launch], UpdateArguments]) -> None:
        """Before the first :meth:`add` of a step. ``arguments(launch)``: those of the update op."""
        self._groups, self._arguments = groups, arguments

    def add(self, group: int, place: Place, grad: Tensor) -> None:
        """Take a gradient over, which may be freed then. The update comes with a full bucket, or with :meth:`finish`."""
        place.adopt_write()
        (pipeline, lanes), own = self._line(place.own.device), place.own
        stays = self.kept.get(id(place.param)) is grad or grad.device != own.device  # it is in host memory
        element = own.element_size() if stays else max(own.element_size(), grad.element_size())
        # The same number on all ranks, so that they close their buckets together.
        nbytes = element * most_elements(place.param)
        key = own.device, self._algorithm.of(place.block.group)
        bucket = self._open.get(key)
        if bucket is not None and bucket.used + nbytes > BUCKET_BYTES:
            self._close(key)
            bucket = None
        if bucket is None:
            slot = pipeline.take()
            bucket = self._open[key] = Bucket(slot if len(slot) >= nbytes else _pinned(nbytes, own))
        part = bucket.slot[bucket.used : bucket.used + nbytes]
        bucket.used += -(-nbytes // 256) * 256
        if not stays:
            staged = _as(grad, part)
            bucket.waits.append(lanes.down([(staged, grad)]))
            grad = staged
        bucket.places.append(place)
        bucket.groups.append(group)
        bucket.grads.append(grad)
        bucket.weights.append(_as(own, part))

    def flush(self) -> None:
        """Begin the updates of all that was added."""
        for key in list(self._open):
            self._close(key)

    def wait(self) -> None:
        """Wait for updates that are under way. Their errors stay for :meth:`finish`."""
        for pipeline, _ in self._lines.values():
            pipeline.wait()

    def finish(self) -> None:
        """Complete all updates, and see their weights on the device."""
        self.flush()
        for pipeline, _ in self._lines.values():
            pipeline.drain()
        done, self._done = self._done, []
        for place in done:
            if place.block.shadow_views:
                refresh_shadow(place.param, place.block.shadow_views[place.slot])

    def _line(self, device: torch.device) -> tuple[Pipeline, Lanes]:
        if device not in self._lines:
            threads = max(1, torch.get_num_threads() - 1)  # leaves a core to backward
            slots = [_pinned(BUCKET_BYTES, torch.empty(0, device=device)) for _ in range(SLOTS)]
            self._lines[device] = Pipeline(slots, threads), Lanes(device)
        return self._lines[device]

    def _planned(self, bucket: Bucket) -> _Plan:
        key = tuple(map(id, bucket.places))
        if key not in self._plans:
            if len(self._plans) > 1000:  # backward has another order each time
                self.forget()
            batch = self._batch_of(bucket.groups, bucket.places)
            of_param = {id(place.param): place for place in bucket.places}
            params = [like(of_param[id(param)].piece, param) for param in batch.params]
            self._plans[key] = _Plan(bucket.places, batch, params)
        return self._plans[key]

    def _close(self, key: tuple[torch.device, Algorithm]) -> None:
        bucket, (pipeline, lanes) = self._open.pop(key), self._lines[key[0]]

        @torch.no_grad()
        def update(_: Tensor) -> None:
            for wait in bucket.waits:
                wait()
            take_together(key[1].prepared([Update(launch, arguments)], agreement, groups))

        @torch.no_grad()
        def back(_: Tensor) -> None:
            # After a backward that failed a parameter may have been written meanwhile: that write came later.
            pairs = [pair for pair in zip(bucket.places, bucket.weights, strict=True) if not pair[0].was_written]
            for place, weight in pairs:
                weight.copy_(place.piece)
            lanes.up((place.own, weight) for place, weight in pairs)
            walks.bump_versions([place.param for place, _ in pairs if is_dtensor(place.param)])
            for place, _ in pairs:
                place.mark_clean()

        try:
            plan = self._planned(bucket)
            batch, grad_of = plan.batch, dict(zip(map(id, [p.param for p in bucket.places]), bucket.grads, strict=True))
            groups = [{**group, "params": []} for group in self._groups]
            for param, group in zip(plan.params, batch.groups_of_params, strict=True):
                groups[group]["params"].append(param)
            number = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
            batch.numbers = [number[id(param)] for param in plan.params]
            launch = Launch(batch, [grad_of[id(param)] for param in batch.params], None)
            arguments = self._arguments(launch)
            agreement = plan.agreement.over(
                [p for group in groups for p in group["params"]], self._options.shard_group, declared_in(groups)
            )
            exchanges = key[1].exchanges and bool(agreement.tensor_groups)
            if exchanges:  # in the order of this thread's others
                update(bucket.slot)
        except BaseException:
            pipeline.give(bucket.slot)
            raise
        self._done += bucket.places
        pipeline.put(bucket.slot, (lambda _: None) if exchanges else update, back)


def _pinned(nbytes: int, beside: Tensor) -> Tensor:
    """Bytes in host memory that the device of ``beside`` copies from and to."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=beside.is_cuda)


def _as(tensor: Tensor, part: Tensor) -> Tensor:
    """The first bytes of ``part`` as a tensor like this one."""
    return part[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

"""The launches of a step: the parameters of each device as the update op takes them, and a cache of the last step's.

From one step to the next usually only the addresses of the gradients change. On a hit the compiled ops get addresses in a
table instead of tensors in lists; a miss sends the step through all checks.

No gradient is kept alive, and no address outlives the call that it was read for.
"""

from __future__ import annotations

import functools
import operator
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .._dispatch import nodes, walks
from .._raw._block8 import BLOCK
from .._sharding.agreement import LatestAgreement, shard_number
from .._sharding.local import is_dtensor, local
from .._sharding.pieces import rows_of
from .._updates.arguments import UpdateArguments
from .._updates.op import UpdateOp
from .._updates.state import TABLE_DTYPES, Column
from ..ops._shadows import ShadowList
from ._state import Block, Place, WrittenParams


@dataclass
class DeviceBatch:
    """The parameters of one device and update op that take part in a step."""

    device: torch.device
    op: UpdateOp
    params: list[Tensor]
    pieces: list[Tensor]  # what the kernels see: the params, or this rank's pieces of them
    counted: int  # the first so many params count here in norms, the others on other ranks
    numbers: list[int]  # of the params in the optimizer
    blocks: list[Block]
    groups: list[int]  # of each block
    layout: Tensor
    nothing: Tensor  # stands for a buffer that does not exist or is not used
    shadows: ShadowList
    written: WrittenParams
    sharded: list[Tensor]  # the params that are DTensors
    prepared: Any = None  # by the algorithm, for its launches
    _used: list[tuple[str, ...]] | None = None
    _state: tuple[list[Tensor], ...] = ()  # for `_used`

    @functools.cached_property
    def rows(self) -> Tensor:
        """``numbers`` on the device."""
        return torch.tensor(self.numbers, device=self.device)

    @functools.cached_property
    def groups_of_params(self) -> list[int]:
        """The number of each param's group."""
        return self.layout[:, Column.GROUP - Column.BLOCK].tolist()

    def state(self, used: list[tuple[str, ...]], averaged: list[bool]) -> tuple[list[Tensor], ...]:
        """The op's arguments from the moments to ``emas``: a buffer per block, empty where the block's group does not use it.
        They are cached as long as ``used``, the moments of each group, is the same list."""
        if self._used is not used:
            pairs = list(zip(self.blocks, self.groups, strict=True))
            self._state = (
                [
                    block.moments[name] if name in used[group] else self.nothing
                    for name in self.op.declared.moments
                    for block, group in pairs
                ],
                [block.steps for block in self.blocks],
                [block.master for block in self.blocks],
                [block.shadow if block.weights is None else self.nothing for block in self.blocks],
                [block.ema if averaged[group] else self.nothing for block, group in pairs],
            )
            self._used = used  # last: an interrupt before it leaves nothing half made
        return self._state


def make_batches(
    number: dict[int, int],
    active: list[tuple[int, Place]],
    counts: list[bool],
    shard_group: ProcessGroup | None,
    op_of: Callable[[dict[str, Any]], UpdateOp],
    numbered: list[tuple[int, int]] | None = None,
) -> list[DeviceBatch]:
    """The batches of the ``active`` parameters, each given with the number of its group. ``number``: of all the optimizer's parameters,
    by id, as in the state_dict. ``counts``: which of them count on this rank in norms. ``op_of(group)``: the op that updates a group.
    ``numbered``: of each parameter the number that its random bits depend on, and the number of parameters it is counted among;
    ``None``: its number, and all. Parameters of several devices are apart also where their state is in host memory: their gradients are
    not."""
    if not all(counts):
        active = sorted(active, key=lambda entry: not counts[number[id(entry[1].param)]])
    by_device: dict[tuple[torch.device, UpdateOp], list[tuple[int, Place, Tensor]]] = defaultdict(list)
    for group, place in active:
        by_device[place.own.device, op_of(place.block.group)].append((group, place, place.piece))
    batches = []
    for (_, op), members in by_device.items():
        places, device = [place for _, place, _ in members], members[0][2].device
        numbers = [number[id(place.param)] for place in places]
        group_of = {place.block: group for group, place, _ in members}
        position = {block: i for i, block in enumerate(group_of)}
        rows = []
        for (group, place, _), index in zip(members, numbers, strict=True):
            own = (index, len(number)) if numbered is None else numbered[index]
            random = random_place(place.param, *own, shard_group)
            rows.append((position[place.block], place.offset, place.slot, group, *random))
        batches.append(
            DeviceBatch(
                device,
                op,
                params=[place.param for place in places],
                pieces=[piece for _, _, piece in members],
                counted=sum(counts[index] for index in numbers),
                numbers=numbers,
                blocks=list(group_of),
                groups=list(group_of.values()),
                # On the CPU whatever torch.set_default_device says: the host reads it at each launch.
                layout=torch.tensor(rows, dtype=torch.int64, device="cpu"),
                nothing=torch.empty(0, dtype=torch.float32, device=device),
                shadows=ShadowList([(p.param, p.block.shadow_views[p.slot]) for p in places if p.block.shadow_views]),
                written=WrittenParams(places),
                sharded=[place.param for place in places if is_dtensor(place.param)],
            )
        )
    return batches


def random_place(param: Tensor, number: int, params: int, shard_group: ProcessGroup | None) -> tuple[int, int, int]:
    """Index, width and pitch (:mod:`.._updates.state`) of the random bits of parameter ``number`` of ``params``.

    Pieces of one parameter must not share bits, and copies must. A piece whose rows are whole blocks of 32 elements has the bits
    that its elements have in one process, so that every mesh rounds alike; so has a piece of consecutive elements that begins
    with a whole block. Other pieces count as further parameters.
    """
    shard = 0 if shard_group is None else shard_group.rank()
    if not is_dtensor(param):
        return (number + params * shard) % 2**32, 0, 0
    rows = rows_of(param)
    if rows is not None and all(count % BLOCK == 0 for count in rows):
        return (number + params * shard) % 2**32 + (rows.first // BLOCK << 32), rows.width, rows.pitch
    within = rows is None or rows.width > 0  # then the first piece has not the bits of the beginning either
    return (number + params * (shard_number(param, shard_group) + within)) % 2**32, 0, 0


_grad, _params_of = operator.attrgetter("grad"), operator.itemgetter("params")
_TORCHS_OWN = (torch.nn.Parameter, Tensor)


def addressable(batch: DeviceBatch, grads: Iterable[Tensor]) -> bool:
    """True if an address describes each tensor completely: none has a dispatch key of its own (negated views, zero tensors)."""
    keys = torch._C._dispatch_keys
    expected = keys(batch.nothing).raw_repr()
    return all(keys(tensor).raw_repr() == expected for tensor in chain(batch.pieces, grads))


def _placements(tensors: Iterable[Tensor]) -> list:
    return [getattr(tensor, "_spec", None) for tensor in tensors]


class TensorTable:
    """The parameters of a batch as the compiled ops take them: a row of :class:`Column` for each. Needs the module ``_nodes``.

    A gradient may be ``None`` where ``units`` says to which unit each row belongs. Rows without one, or of units that are not
    asked for, have no elements, for as long.
    """

    def __init__(self, batch: DeviceBatch, grads: list[Tensor | None], units: list[int] | None = None):
        self._params, self._pieces = batch.params, batch.pieces
        rows = []
        grads = [piece if grad is None else grad for piece, grad in zip(batch.pieces, grads, strict=True)]
        for piece, grad, place in zip(batch.pieces, grads, batch.layout.tolist(), strict=True):
            dtypes = TABLE_DTYPES[piece.dtype], TABLE_DTYPES[grad.dtype]
            rows += [piece.data_ptr(), grad.data_ptr(), piece.numel(), *dtypes, *place, *(1, 1, *piece.shape)[-2:]]
        self._words = array("q", rows)
        self.tensor = torch.frombuffer(self._words, dtype=torch.int64).view(len(batch.pieces), len(Column))
        self._walk = nodes.step_walk()
        self._known = self._walk.remember_tensors(batch.pieces, grads)
        # Gradients of torch's own classes are read in C++. Those of DTensors must also be placed as before.
        self._sharded = bool(batch.sharded)
        self._plain = all(type(param) in _TORCHS_OWN for param in batch.params)
        self._placed = _placements(map(_grad, batch.params))
        self._shared = [*batch.sharded, *chain.from_iterable(block.tensors() for block in batch.blocks)]
        self._written = [*self._pieces, *self._shared]
        self._units, self._mask = units, ()
        self._every = set(units or ())

    def refresh(self, asked: frozenset[int] | None = None) -> bool:
        """Write the current addresses of the gradients into the table; ``False`` if anything else has changed."""
        grads, mask = None, ()
        if self._units is not None:
            every = b"\1" * len(self._units)
            self._mask = bytearray(every if asked is None else map(asked.__contains__, self._units))
            mask = (self._mask,)
        if not self._plain:
            grads = list(map(_grad, self._params))
            if self._sharded and not self._placed_as_before(grads):
                return False
            grads = list(map(local, grads)) if self._sharded else grads
        column = Column.GRAD, len(Column)
        return self._walk.refresh_addresses(self._known, self._pieces, grads, self._words, *column, *mask)

    def taken(self) -> bytes:
        """A byte for each row, 1 if it takes part, after a refresh that returned ``True``. Empty: all do."""
        return bytes(self._mask) if 0 in self._mask else b""

    def present(self) -> set[int]:
        """The units that have a gradient, after a refresh that returned ``True``."""
        return set(compress(self._units, self._mask)) if 0 in self._mask else self._every

    def is_whole(self, present: set[int]) -> bool:
        """True if every parameter of these units has one."""
        return 0 not in self._mask or sum(map(present.__contains__, self._units)) == sum(self._mask)

    def _placed_as_before(self, grads: list) -> bool:
        if not all(map(isinstance, grads, map(type, self._params))):
            return False
        placed = _placements(grads)
        if placed != self._placed or not walks.same_objects(list(map(local, self._params)), self._pieces):
            return False
        self._placed = placed  # the same objects are compared faster
        return True

    def grads(self) -> list[Tensor]:
        """The gradients, after a refresh that returned ``True``."""
        grads = list(map(_grad, self._params))
        return list(map(local, grads)) if self._sharded else grads

    def bump_versions(self) -> None:
        """Tell autograd that an op has written parameters and state, which it cannot see from addresses."""
        some = 0 in self._mask
        walks.bump_versions([*compress(self._pieces, self._mask), *self._shared] if some else self._written)


class Launch(NamedTuple):
    """Parameters and gradients of one launch of the update op."""

    batch: DeviceBatch
    grads: list[Tensor]  # empty if there is a table
    table: TensorTable | None

    def note_written(self) -> None:
        """After the update: tell autograd what it cannot see from addresses, and shadows and masters that they are up to date."""
        if self.table is not None:
            self.table.bump_versions()
        elif self.batch.sharded:
            walks.bump_versions(self.batch.sharded)
        self.batch.shadows.stamp()
        self.batch.written.stamp()


class CachedStep:
    """The launches of a step and its guards: parameters with and without a gradient, the values of ``optimizer.state``, and
    ``key`` for all else. With ``tables`` the launches get tables instead of lists.

    ``units``: of each parameter the number of its unit, for an optimizer with independent groups; ``asked``: those that the step was
    asked to take. If it is ``masked``, another step may have other units: ``present`` are those that take part; ``None``: all do.
    """

    present: frozenset[int] | None = None

    def __init__(
        self,
        groups: list[dict],
        state: dict,
        batches: list[DeviceBatch],
        grads: list[list[Tensor | None]],
        key: Any,
        tables: bool,
        units: list[int] | None = None,
        asked: frozenset[int] | None = None,
        masked: bool = False,
    ):
        self.key, self.with_tables = key, tables
        self.sizes = [len(group["params"]) for group in groups]
        self.params = [param for group in groups for param in group["params"]]
        self.owners, self.shown = list(state), list(state.values())
        self.tables = [
            (batch, TensorTable(batch, found, [units[number] for number in batch.numbers] if masked else None))
            for batch, found in zip(batches, grads, strict=True)
        ]
        active = {id(param) for batch in batches for param in batch.params}
        self.idle = [param for param in self.params if id(param) not in active]
        self._asked, self._masked = asked, masked
        self._idle_units = [
            unit for unit, param in zip(units or (), self.params, strict=False) if id(param) not in active
        ]

    def lookup(
        self, groups: list[dict], state: dict, key: Any, asked: frozenset[int] | None = None
    ) -> list[Launch] | None:
        """The step's launches on a hit, ``None`` on a miss."""
        if not self._masked and asked != self._asked:
            return None
        of_groups = list(map(_params_of, groups))
        params = list(chain.from_iterable(of_groups))
        if key != self.key or list(map(len, of_groups)) != self.sizes or not walks.same_objects(params, self.params):
            return None
        if not walks.same_objects(list(state.values()), self.shown) or not walks.same_objects(list(state), self.owners):
            return None
        idle = self.idle
        if asked is not None:
            idle = compress(idle, map(asked.__contains__, self._idle_units))
        if not all(map(operator.is_, map(_grad, idle), repeat(None))):
            return None
        launches = []
        for batch, table in self.tables:
            if not table.refresh(asked):
                return None
            launches.append(Launch(batch, [], table) if self.with_tables else Launch(batch, table.grads(), None))
        if self._masked:
            present = frozenset().union(*(table.present() for _, table in self.tables))
            if not all(table.is_whole(present) for _, table in self.tables):
                return None
            self.present = present if any(table.taken() for _, table in self.tables) else None
        return launches


@dataclass
class LoneStep:
    """The step of one parameter alone."""

    place: Place
    batch: DeviceBatch
    versions: array  # of the place, which another batch may have taken over since
    agreement: LatestAgreement = field(default_factory=LatestAgreement)
    _launch: Launch | None = None
    _update: Callable[[], None] | None = None  # the op with its arguments; the table has the gradient

    def belongs_to(self, place: Place | None) -> bool:
        return place is self.place and place.versions is self.versions

    def cache(self, arguments: UpdateArguments, grads: list[Tensor]) -> None:
        """Keep the step that these arguments take, for :meth:`take`."""
        self._launch = Launch(self.batch, [], TensorTable(self.batch, grads))
        op, values = self.batch.op.bound(arguments, self._launch.table.tensor)
        self._update = op.bound_in_cpp(values, arguments.options)

    def take(self) -> bool:
        """Repeat the cached step with the gradient and the learning rate of now; ``False``, having done nothing, if anything else of
        the parameter is other than it was."""
        if self._launch is None or not self._launch.table.refresh():
            return False
        if self.batch.shadows.pairs:
            self.batch.shadows.renew()
        self.batch.written.adopt()
        self._update()
        self._launch.note_written()
        return True

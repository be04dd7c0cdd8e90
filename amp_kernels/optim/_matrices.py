"""The matrices of parameters, and a Muon step over those of one batch: an elementwise pass that writes the 16-bit iterates,
products over stacks of iterates of one shape, and two elementwise passes that move the weights and the momentum.

The first pass works on a copy of the momentum, because the products take memory and may fail. The last two cannot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._updates.arguments import UpdateArguments
from .._updates.op import UpdateCall, UpdateOp
from .._updates.state import LAYOUT_COLUMNS, MAXIMIZE, STOCHASTIC, TABLE_DTYPES, Column
from ..ops.newton_schulz import ELEMENTS_TOGETHER, orthogonalized
from ._launches import DeviceBatch, Launch
from ._trial import PART_ELEMENTS, Copies

ITERATE = torch.bfloat16  # has the range of float32: an iterate is a sum of gradients of any size
RESULT = torch.float16  # as the last product rounds it on a GPU: it needs no range
CHUNK_ELEMENTS = PART_ELEMENTS  # 128 MiB of iterates: the products of a chunk are still many waves
ALIGN = 64  # elements: a stack begins at 128 bytes


class Matrices(NamedTuple):
    """The matrices of a parameter: all of one shape.

    ``stack`` is their shape together, with the dimensions of the parameter in their own order whatever its strides, so that sums
    come in the same order. ``packed``: memory is this stack, element by element; otherwise the stack is a copy.
    """

    rows: int
    columns: int
    stack: tuple[int, int, int]
    packed: bool

    @classmethod
    def of(cls, piece: Tensor, heads: int | None, flatten: bool) -> Matrices:
        rows, columns = (piece.shape[0], math.prod(piece.shape[1:])) if flatten else piece.shape[-2:]
        rows //= heads or 1
        return cls(rows, columns, (piece.numel() // (rows * columns), rows, columns), piece.is_contiguous())


class Member(NamedTuple):
    """A parameter of a step."""

    position: int  # in the batch
    matrices: Matrices
    settings: tuple  # of Newton-Schulz: the coefficients of each step, and eps
    group: tuple[int, float]  # its group, and the ratio of its step's length to the learning rate


class Stack:
    """Iterates of one shape that one call orthogonalizes, with the place of each member's in it."""

    def __init__(self, members: Sequence[Member]):
        self.members, first = members, members[0]
        counts = [member.matrices.stack[0] for member in members]
        self.shape = sum(counts), *first.matrices.stack[1:]
        size = math.prod(self.shape[1:])
        self.offsets = [begin * size for begin in accumulate(counts[:-1], initial=0)]
        self.numel = self.shape[0] * size

    def orthogonalize(self, iterates: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """The orthogonalized matrices, flat and in the order of ``iterates``."""
        first = self.members[0]
        call = *first.settings, RESULT
        if first.matrices.packed:
            return orthogonalized(iterates.view(self.shape), *call).view(-1)
        stack, result = iterates.new_empty(self.shape), torch.empty_like(iterates, dtype=RESULT)
        self._copy(iterates, stack, pieces, gather=True)
        self._copy(result, orthogonalized(stack, *call), pieces, gather=False)
        return result

    def _copy(self, flat: Tensor, stack: Tensor, pieces: Sequence[Tensor], *, gather: bool) -> None:
        """Between the matrices in the memory order of their parameters, and the stack."""
        for member, offset in zip(self.members, self.offsets, strict=True):
            piece = pieces[member.position]
            inside = flat.as_strided(piece.shape, piece.stride(), flat.storage_offset() + offset)
            matrices = stack.view(-1)[offset : offset + piece.numel()].view(piece.shape)
            if gather:
                matrices.copy_(inside)
            else:
                inside.copy_(matrices)


class Orthogonalized(Protocol):
    """Iterates in one flat buffer, with the offset of each member's, and what orthogonalizes them."""

    members: Sequence[Member]
    offsets: Sequence[int]
    numel: int

    def orthogonalize(self, iterates: Tensor, pieces: Sequence[Tensor]) -> Tensor: ...


class Chunk:
    """Parameters whose iterates exist at the same time."""

    def __init__(self, batch: DeviceBatch, stacks: Sequence[Orthogonalized]):
        self.stacks, self.begins, total = stacks, [], 0
        for stack in stacks:
            self.begins.append(total)
            total += -(-stack.numel // ALIGN) * ALIGN
        self.elements = total
        members = [member for stack in stacks for member in stack.members]
        self.positions = [member.position for member in members]
        self.index = _integers(self.positions)
        self.stack_of = _integers([i for i, stack in enumerate(stacks) for _ in stack.members])
        self.offsets = _integers([offset for stack in stacks for offset in stack.offsets])
        #: The second pass has a group for each group and ratio.
        self.groups = list(dict.fromkeys(member.group for member in members))
        self.layouts = batch.layout[self.index], batch.layout[self.index]
        self.layouts[1][:, Column.GROUP - Column.BLOCK] = _integers(
            [self.groups.index(member.group) for member in members]
        )
        self.copies = Copies(self.layouts[0], [batch.pieces[i].numel() for i in self.positions])

    def prepared(self, op: UpdateOp, launch: Launch, arguments: UpdateArguments) -> list[UpdateCall]:
        """The calls that move weights and momentum. A skipped step orthogonalizes whatever the iterates' memory holds, for
        nothing."""
        batch = launch.batch
        flat = torch.empty(self.elements, dtype=ITERATE, device=batch.device)
        iterates = [flat[b : b + s.numel] for b, s in zip(self.begins, self.stacks, strict=True)]
        if arguments.factors is not None:
            arguments = arguments._replace(factors=arguments.factors[self.index.to(batch.device)])
        before = self._before(batch, arguments)
        if self.positions:
            trial = self._call(op, launch, self.copies.made(before), iterates, self.copies.layout, second=False)
            op.step(trial.arguments, trial.table)
            del trial  # the products need memory
        results = [
            stack.orthogonalize(iterate, batch.pieces) for stack, iterate in zip(self.stacks, iterates, strict=True)
        ]
        if not self.positions:
            return []
        unread = [result.view(ITERATE) for result in results]  # the weights have moved by then
        return [
            self._call(op, launch, self._after(batch, arguments), results, self.layouts[1], second=True),
            self._call(op, launch, before, unread, self.layouts[0], second=False),
        ]

    def _before(self, batch: DeviceBatch, a: UpdateArguments) -> UpdateArguments:
        """Arguments of a pass over the momentum, whose weights are the iterates, rounded to nearest. The one that moves the weights
        counts the step."""
        absent = [batch.nothing] * len(batch.blocks)
        flags = [bits & ~STOCHASTIC for bits in a.flags]
        steps = [buffer.clone() for buffer in a.steps]
        return a._replace(steps=steps, masters=absent, shadows=absent, emas=absent, flags=flags)

    def _after(self, batch: DeviceBatch, a: UpdateArguments) -> UpdateArguments:
        """Arguments of the pass that moves the weights. Its gradients are neither scaled nor clipped, and have the sign of the
        first pass."""
        ratio = list(batch.op.declared.options).index("ratio")
        count, options = len(batch.op.declared.options), []
        for group, value in self.groups:
            options += a.options[group * count : (group + 1) * count]
            options[ratio - count] = value
        numbers = [group for group, _ in self.groups]
        return a._replace(
            moments=[batch.nothing] * len(batch.blocks),
            lrs=[a.lrs[group] for group in numbers] if a.lrs else [],
            weight_decays=[a.weight_decays[group] for group in numbers] if a.weight_decays else [],
            grad_scale=None,
            sum_sq=None,
            factors=None if a.factors is None else (a.factors > 1.0) + 1.0,
            options=options,
            ema_decay=[a.ema_decay[group] for group in numbers],
            flags=[a.flags[group] & ~MAXIMIZE for group in numbers],
        )

    def _call(
        self,
        op: UpdateOp,
        launch: Launch,
        a: UpdateArguments,
        buffers: Sequence[Tensor],
        layout: Tensor,
        *,
        second: bool,
    ) -> UpdateCall:
        """A pass with the flat ``buffers`` of the stacks for the weights, in the ``second`` for the gradients."""
        batch, grads, table = launch
        if table is not None:
            rows = table.tensor[self.index]
            address, dtype = (Column.GRAD, Column.GRAD_DTYPE) if second else (Column.PARAM, Column.PARAM_DTYPE)
            addresses = _integers([buffer.data_ptr() for buffer in buffers])
            rows[:, address] = addresses[self.stack_of] + buffers[0].element_size() * self.offsets
            rows[:, dtype] = TABLE_DTYPES[buffers[0].dtype]
            rows[:, LAYOUT_COLUMNS] = layout
            return UpdateCall(op, a, rows, buffers)
        pieces = [batch.pieces[i] for i in self.positions]
        places = zip(pieces, self.stack_of.tolist(), self.offsets.tolist(), strict=True)
        views = [
            buffers[i].as_strided(piece.shape, piece.stride(), buffers[i].storage_offset() + offset)
            for piece, i, offset in places
        ]
        grads = views if second else [grads[i] for i in self.positions]
        return UpdateCall(op, a._replace(params=pieces if second else views, grads=grads, layout=layout), None)


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def stacks_of(members: Sequence[Member], largest: int = ELEMENTS_TOGETHER) -> list[Stack]:
    """Stacks of all members of one shape, of ``largest`` elements at most unless one member has more."""
    by_shape: dict[tuple, list[list[Member]]] = {}
    room: dict[tuple, int] = {}  # in the last run of a shape
    for member in members:
        (_, *shape), size = member.matrices.stack, math.prod(member.matrices.stack)
        key = (*shape, member.settings, member.matrices.packed)
        runs = by_shape.setdefault(key, [])
        if size > room.get(key, 0):
            runs.append([])
            room[key] = largest
        runs[-1].append(member)
        room[key] -= size
    return [Stack(run) for runs in by_shape.values() for run in runs]


def chunks_of(batch: DeviceBatch, members: Sequence[Member]) -> list[Chunk]:
    """The chunks of a batch whose matrices are on this rank."""
    chunks: list[list[Stack]] = []
    for stack in stacks_of(members, min(CHUNK_ELEMENTS, ELEMENTS_TOGETHER)):
        if not chunks or sum(other.numel for other in chunks[-1]) + stack.numel > CHUNK_ELEMENTS:
            chunks.append([])
        chunks[-1].append(stack)
    return [Chunk(batch, of_chunk) for of_chunk in chunks]

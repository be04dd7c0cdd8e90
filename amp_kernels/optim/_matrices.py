"""The matrices of parameters, and a Muon step over those of one batch: an elementwise pass that writes the 16-bit iterates,
products over stacks of iterates of one shape, and an elementwise pass that moves the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._updates.arguments import UpdateArguments
from .._updates.op import UpdateOp
from .._updates.state import MAXIMIZE, STOCHASTIC, TABLE_DTYPES, TABLE_GRAD, TABLE_LAYOUT
from ..ops.newton_schulz import ELEMENTS_TOGETHER, orthogonalized
from ._launches import DeviceBatch, Launch

ITERATE = torch.bfloat16  # has the range of float32: an iterate is a sum of gradients of any size
RESULT = torch.float16  # as the last product rounds it on a GPU: it needs no range
CHUNK_ELEMENTS = 2**27  # 256 MiB of iterates: the products of a chunk are still many waves
ALIGN = 64  # elements: a stack begins at 128 bytes


class Matrices(NamedTuple):
    """The matrices of a parameter: all of one shape.

    ``order`` of the dimensions comes before the reshape to a stack. ``stack`` is the stack's shape, that of the transposed matrices
    if they are stored so in memory: Newton-Schulz commutes with transposition and with permutations of columns. ``packed``: memory is
    this stack, element by element; otherwise the stack is a copy.
    """

    rows: int
    columns: int
    order: tuple[int, ...]
    stack: tuple[int, int, int]
    packed: bool

    @classmethod
    def of(cls, piece: Tensor, heads: int | None, flatten: bool) -> Matrices:
        order = tuple(range(piece.dim()))
        if flatten:
            order = (0, *sorted(order[1:], key=lambda dim: -piece.stride(dim)))
            rows, columns = piece.shape[0], math.prod(piece.shape[1:])
        else:
            rows, columns = piece.shape[-2:]
        rows //= heads or 1
        stack = piece.numel() // (rows * columns), rows, columns
        described = torch.empty_strided(piece.shape, piece.stride(), device="meta").permute(order)
        try:
            view = described.view(stack)
        except RuntimeError:
            return cls(rows, columns, order, stack, False)
        if view.mT.is_contiguous() and not view.is_contiguous():
            return cls(rows, columns, order, (stack[0], columns, rows), True)
        return cls(rows, columns, order, stack, view.is_contiguous())

    def gathered(self, tensor: Tensor) -> Tensor:
        """The matrices of ``tensor``, shaped as the parameter, as a contiguous stack."""
        return tensor.permute(self.order).reshape(self.stack).contiguous()

    def scatter(self, stack: Tensor, tensor: Tensor) -> None:
        """The inverse: write the matrices of a stack into ``tensor``."""
        ordered = tensor.permute(self.order)
        ordered.copy_(stack.view(ordered.shape))


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
        self.offsets = [sum(counts[:i]) * size for i in range(len(counts))]
        self.numel = self.shape[0] * size

    def orthogonalize(self, iterates: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """The orthogonalized matrices, flat and in the order of ``iterates``."""
        member = self.members[0]
        call = *member.settings, RESULT
        if member.matrices.packed:
            return orthogonalized(iterates.view(self.shape), *call).view(-1)
        piece, result = pieces[member.position], torch.empty_like(iterates, dtype=RESULT)
        shape, strides = piece.shape, piece.stride()
        stack = member.matrices.gathered(iterates.as_strided(shape, strides, iterates.storage_offset()))
        member.matrices.scatter(orthogonalized(stack, *call), result.as_strided(shape, strides))
        return result


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
        self.layouts[1][:, 3] = _integers([self.groups.index(member.group) for member in members])

    def step(self, op: UpdateOp, launch: Launch, arguments: UpdateArguments) -> None:
        """Update the parameters. A skipped step orthogonalizes whatever the iterates' memory holds, for nothing."""
        batch = launch.batch
        flat = torch.empty(self.elements, dtype=ITERATE, device=batch.device)
        iterates = [flat[b : b + s.numel] for b, s in zip(self.begins, self.stacks, strict=True)]
        self._pass(op, launch, self._before(batch, arguments), iterates, second=False)
        results = [
            stack.orthogonalize(iterate, batch.pieces) for stack, iterate in zip(self.stacks, iterates, strict=True)
        ]
        self._pass(op, launch, self._after(batch, arguments), results, second=True)

    def _before(self, batch: DeviceBatch, a: UpdateArguments) -> UpdateArguments:
        """Arguments of the first pass, whose weights are the iterates, rounded to nearest. The second one counts the step."""
        absent = [batch.nothing] * len(batch.blocks)
        flags = [bits & ~STOCHASTIC for bits in a.flags]
        steps = [buffer.clone() for buffer in a.steps]
        return a._replace(steps=steps, masters=absent, shadows=absent, emas=absent, flags=flags)

    def _after(self, batch: DeviceBatch, a: UpdateArguments) -> UpdateArguments:
        """Arguments of the second pass. Its gradients are neither scaled nor clipped, and have the sign of the first pass."""
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
            options=options,
            ema_decay=[a.ema_decay[group] for group in numbers],
            flags=[a.flags[group] & ~MAXIMIZE for group in numbers],
        )

    def _pass(
        self, op: UpdateOp, launch: Launch, a: UpdateArguments, buffers: Sequence[Tensor], *, second: bool
    ) -> None:
        """One of the passes, with the flat ``buffers`` of the stacks for the weights, in the ``second`` for the gradients."""
        batch, grads, table = launch
        layout = self.layouts[second]
        if not self.positions:
            return
        if table is not None:
            rows = table.tensor[self.index]
            column = TABLE_GRAD if second else 0
            addresses = _integers([buffer.data_ptr() for buffer in buffers])
            rows[:, column] = addresses[self.stack_of] + buffers[0].element_size() * self.offsets
            rows[:, column + 3] = TABLE_DTYPES[buffers[0].dtype]
            rows[:, TABLE_LAYOUT] = layout
            op.step(a, rows)
            return
        pieces = [batch.pieces[i] for i in self.positions]
        places = zip(pieces, self.stack_of.tolist(), self.offsets.tolist(), strict=True)
        views = [
            buffers[i].as_strided(piece.shape, piece.stride(), buffers[i].storage_offset() + offset)
            for piece, i, offset in places
        ]
        grads = views if second else [grads[i] for i in self.positions]
        op.step(a._replace(params=pieces if second else views, grads=grads, layout=layout))


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def stacks_of(members: Sequence[Member], largest: int = ELEMENTS_TOGETHER) -> list[Stack]:
    """Stacks of all members of one shape, of ``largest`` elements at most unless one member has more."""
    by_shape: dict[tuple, list[list[Member]]] = {}
    for member in members:
        (_, *shape), size = member.matrices.stack, math.prod(member.matrices.stack)
        key = (*shape, member.settings, None if member.matrices.packed else member.position)
        runs = by_shape.setdefault(key, [[]])
        room = largest - sum(math.prod(other.matrices.stack) for other in runs[-1])
        if runs[-1] and size > room:
            runs.append([])
        runs[-1].append(member)
    return [Stack(run) for runs in by_shape.values() for run in runs]


def chunks_of(batch: DeviceBatch, members: Sequence[Member]) -> list[Chunk]:
    """The chunks of a batch whose matrices are on this rank."""
    chunks: list[list[Stack]] = []
    for stack in stacks_of(members, min(CHUNK_ELEMENTS, ELEMENTS_TOGETHER)):
        if not chunks or sum(other.numel for other in chunks[-1]) + stack.numel > CHUNK_ELEMENTS:
            chunks.append([])
        chunks[-1].append(stack)
    return [Chunk(batch, of_chunk) for of_chunk in chunks]

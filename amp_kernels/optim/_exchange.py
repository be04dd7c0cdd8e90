"""Newton-Schulz of matrices whose pieces are spread over several ranks.

Each matrix has an owner among the ranks that hold it. An exchange brings the pieces of the iterates to the owners, another one the
orthogonalized pieces back. Matrices go in two rounds, however many there are, so that those of one round travel while those of
the other are multiplied. A matrix is orthogonalized whole, with the bits that one process computes.

Ranks exchange the pieces of all parameters, also of those that have no gradient: no rank knows which gradients others have, and
the sizes must fit. A piece without a gradient counts as zeros and stays as it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._sharding.pieces import Holders
from ._matrices import RESULT, Member, stacks_of

ALIGN = 8  # elements: a piece begins at 16 bytes


class Sharded(NamedTuple):
    """A parameter of which this rank holds a piece; ``member`` describes the whole one."""

    member: Member
    number: int  # in the optimizer, the same on all ranks
    shape: tuple[int, ...]  # of the whole
    holders: Holders
    idle: bool  # without a gradient on this rank


def flops(member: Member) -> float:
    """The flops of five Newton-Schulz steps, in the cheaper form (:func:`amp_kernels.newton_schulz`)."""
    count, rows, columns = member.matrices.stack
    short, long = sorted((rows, columns))
    return count * min(15 * short**2 * long + 5 * short**3, 6 * short**2 * long + 14 * short**3)


def owners_of(parameters: Sequence[Sharded]) -> dict[int, int]:
    """The owner of each parameter, by number: the most work first, each to that of its holders that has the least."""
    load: dict[int, float] = {}
    owners = {}
    for sharded in sorted(parameters, key=lambda sharded: (-flops(sharded.member), sharded.number)):
        owner = min(sharded.holders.pieces, key=lambda rank: (load.get(rank, 0.0), rank))
        load[owner] = load.get(owner, 0.0) + flops(sharded.member)
        owners[sharded.number] = owner
    return owners


def rounds_of(parameters: Sequence[Sharded], owners: Mapping[int, int]) -> list[list[Sharded]]:
    """Half of each owner's work, and the other half if any owner has more than one matrix. Matrices of one shape stay together
    as far as possible."""
    load: dict[int, float] = defaultdict(float)
    for sharded in parameters:
        load[owners[sharded.number]] += flops(sharded.member)
    rounds: tuple[list[Sharded], list[Sharded]] = ([], [])
    begun: dict[int, float] = defaultdict(float)
    for sharded in sorted(parameters, key=lambda sharded: (sharded.member.matrices.stack[1:], sharded.number)):
        owner, work = owners[sharded.number], flops(sharded.member)
        rounds[2 * begun[owner] + work > load[owner]].append(sharded)
        begun[owner] += work
    return [part for part in rounds if part]


class Exchange:
    """The iterates of all parameters over one group of ranks, as one :class:`Stack` of pieces."""

    def __init__(self, parameters: Iterable[Sharded]):
        ordered = sorted(parameters, key=lambda sharded: sharded.number)
        group, owners = ordered[0].holders.group, owners_of(ordered)
        rank = dist.get_rank(group)
        self.rounds = [_Round(part, owners, group) for part in rounds_of(ordered, owners)]
        self.numel = sum(part.numel for part in self.rounds)
        self.members: list[Member] = []
        self.offsets: list[int] = []
        self.idle: list[slice] = []
        begin = 0
        for part in self.rounds:
            for sharded, offset in part.places:
                size = math.prod(sharded.holders.pieces[rank].shape)
                if sharded.idle:
                    self.idle.append(slice(begin + offset, begin + offset + size))
                elif size:
                    self.members.append(sharded.member)
                    self.offsets.append(begin + offset)
            begin += part.numel

    def orthogonalize(self, iterates: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """The orthogonalized pieces, flat and in the order of ``iterates``. Every rank of the group must call this."""
        for idle in self.idle:
            iterates[idle].zero_()
        result = torch.empty_like(iterates, dtype=RESULT)
        sizes = [part.numel for part in self.rounds]
        arrived = [
            torch.empty(sum(part.received), dtype=iterates.dtype, device=iterates.device) for part in self.rounds
        ]
        coming = [
            part.collect(*flats) for part, *flats in zip(self.rounds, iterates.split(sizes), arrived, strict=True)
        ]
        going = []
        for part, flat, moved, back in zip(self.rounds, arrived, coming, result.split(sizes), strict=True):
            moved.wait()
            part.orthogonalize(flat)
            going.append(part.give_back(flat, back))
        for moved in going:
            moved.wait()
        return result


class _Round:
    """Matrices whose pieces travel together. ``places``: the parameters, and where their pieces begin in the round's buffer."""

    def __init__(self, ordered: Sequence[Sharded], owners: Mapping[int, int], group: dist.ProcessGroup):
        self.group = group
        rank, size = dist.get_rank(group), group.size()
        self.sent: list[int] = [0] * size
        self.places: list[tuple[Sharded, int]] = []
        for owner in range(size):  # pieces lie as they are sent
            for sharded in ordered:
                if owners[sharded.number] == owner:
                    self.places.append((sharded, sum(self.sent)))
                    self.sent[owner] += _padded(sharded.holders.pieces[rank].shape)
        self.numel = sum(self.sent)
        owned = [sharded for sharded in ordered if owners[sharded.number] == rank]
        whole = {id(sharded.member): sharded for sharded in owned}
        self.stacks = stacks_of([sharded.member for sharded in owned])
        self.shapes = [[whole[id(member)].shape for member in stack.members] for stack in self.stacks]
        self.received, self.parts = [0] * size, []
        at = {id(member): (i, j) for i, stack in enumerate(self.stacks) for j, member in enumerate(stack.members)}
        for source in range(size):
            for sharded in owned:
                piece = sharded.holders.pieces.get(source)
                if piece is not None:
                    begin = sum(self.received)
                    self.parts.append((slice(begin, begin + math.prod(piece.shape)), at[id(sharded.member)], piece))
                    self.received[source] += _padded(piece.shape)

    def collect(self, pieces: Tensor, arrived: Tensor) -> dist.Work:
        """Begin to bring the pieces to their owners."""
        return self._move(pieces, self.sent, arrived, self.received)

    def give_back(self, arrived: Tensor, pieces: Tensor) -> dist.Work:
        """The inverse."""
        return self._move(arrived, self.received, pieces, self.sent)

    def orthogonalize(self, arrived: Tensor) -> None:
        """Replace the pieces that have arrived by those of the orthogonalized matrices, whose elements have the same size."""
        stacks = [torch.empty(stack.numel, dtype=arrived.dtype, device=arrived.device) for stack in self.stacks]
        self._copy(arrived, self._wholes(stacks), gather=True)
        stacks = [stack.orthogonalize(flat, ()) for stack, flat in zip(self.stacks, stacks, strict=True)]
        self._copy(arrived.view(RESULT), self._wholes(stacks), gather=False)

    def _wholes(self, stacks: Sequence[Tensor]) -> list[list[Tensor]]:
        """The parameters in the buffers of the stacks, with their shapes."""
        return [
            [
                flat[offset : offset + math.prod(shape)].view(shape)
                for offset, shape in zip(stack.offsets, shapes, strict=True)
            ]
            for stack, shapes, flat in zip(self.stacks, self.shapes, stacks, strict=True)
        ]

    def _copy(self, flat: Tensor, wholes: list[list[Tensor]], *, gather: bool) -> None:
        """Between the pieces as they are exchanged, and the whole parameters."""
        pairs = []
        for where, (i, j), piece in self.parts:
            part, whole = flat[where].view(piece.shape), wholes[i][j]
            if all(isinstance(index, slice) for index in piece.box):
                pairs.append((whole[piece.box], part))
            elif gather:
                whole[piece.box] = part
            else:
                part.copy_(whole[piece.box])
        if pairs:
            inside, parts = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(*((inside, parts) if gather else (parts, inside)))

    def _move(self, flat: Tensor, sent: Sequence[int], to: Tensor, received: Sequence[int]) -> dist.Work:
        """As bytes, because not every backend moves bfloat16."""
        sizes = [[count * flat.element_size() for count in counts] for counts in (received, sent)]
        return dist.all_to_all_single(
            to.view(torch.uint8), flat.view(torch.uint8), *sizes, group=self.group, async_op=True
        )


def _padded(shape: Sequence[int]) -> int:
    return -(-math.prod(shape) // ALIGN) * ALIGN

"""Newton-Schulz of matrices whose pieces lie on several ranks.

Each matrix has an owner among the ranks that hold it. One exchange brings the pieces of the iterates to the owners, a second one
the orthogonalized pieces back, however many matrices there are. A matrix is orthogonalized whole, with the bits that one
process computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._sharding.pieces import Holders
from ._matrices import Member, stacks_of

ALIGN = 8  # elements: a piece begins at 16 bytes


class Sharded(NamedTuple):
    """A parameter of which this rank holds a piece; ``member`` describes the whole one."""

    member: Member
    number: int  # in the optimizer, the same on all ranks
    shape: tuple[int, ...]  # of the whole
    holders: Holders


def flops(member: Member) -> float:
    """Of five steps, in the cheaper of the forms that :func:`amp_kernels.newton_schulz` takes."""
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


class Exchange:
    """The iterates of all parameters over one group of ranks, as one :class:`Stack` of pieces."""

    def __init__(self, parameters: Iterable[Sharded]):
        ordered = sorted(parameters, key=lambda sharded: sharded.number)
        self.group = ordered[0].holders.group
        rank, size = dist.get_rank(self.group), self.group.size()
        owners = owners_of(ordered)
        self.sent, offsets = [0] * size, {}
        for owner in range(size):  # pieces lie as they are sent
            for sharded in ordered:
                if owners[sharded.number] == owner:
                    offsets[sharded.number] = sum(self.sent)
                    self.sent[owner] += _padded(sharded.holders.pieces[rank].shape)
        present = [sharded for sharded in ordered if math.prod(sharded.holders.pieces[rank].shape)]
        self.members = [sharded.member for sharded in present]
        self.offsets = [offsets[sharded.number] for sharded in present]
        self.numel = sum(self.sent)
        owned = {sharded.member.position: sharded for sharded in ordered if owners[sharded.number] == rank}
        self.stacks = stacks_of([sharded.member for sharded in owned.values()], math.inf)
        self.shapes = [[owned[member.position].shape for member in stack.members] for stack in self.stacks]
        self.received, self.parts = [0] * size, []
        places = {member: (i, j) for i, stack in enumerate(self.stacks) for j, member in enumerate(stack.members)}
        for source in range(size):
            for sharded in owned.values():
                piece = sharded.holders.pieces.get(source)
                if piece is not None:
                    begin = sum(self.received)
                    self.parts.append((slice(begin, begin + math.prod(piece.shape)), places[sharded.member], piece))
                    self.received[source] += _padded(piece.shape)

    def orthogonalize(self, iterates: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        """The orthogonalized pieces, flat and in the order of ``iterates``. Every rank of the group must call this."""
        arrived = self._moved(iterates, self.sent, self.received)
        stacks = [torch.empty(stack.numel, dtype=iterates.dtype, device=iterates.device) for stack in self.stacks]
        self._copy(arrived, self._wholes(stacks), gather=True)
        stacks = [stack.orthogonalize(flat, ()) for stack, flat in zip(self.stacks, stacks, strict=True)]
        self._copy(arrived, self._wholes(stacks), gather=False)
        return self._moved(arrived, self.received, self.sent)

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

    def _moved(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The elements that the ranks of the group send to this one, as bytes, because not every backend moves bfloat16."""
        width = flat.element_size()
        result = torch.empty(sum(received) * width, dtype=torch.uint8, device=flat.device)
        sizes = [[count * width for count in counts] for counts in (received, sent)]
        dist.all_to_all_single(result, flat.view(torch.uint8), *sizes, group=self.group)
        return result.view(flat.dtype)


def _padded(shape: Sequence[int]) -> int:
    return -(-math.prod(shape) // ALIGN) * ALIGN

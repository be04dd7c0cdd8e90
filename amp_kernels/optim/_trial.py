"""A pass over copies of moments: an algorithm that needs its results before the first weight moves takes it, and later the same
pass over the moments themselves, so that a failure in between leaves nothing changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from .._updates.arguments import UpdateArguments
from .._updates.op import UpdateCall, UpdateOp
from .._updates.state import ALIGN, LAYOUT_COLUMNS, exponents_at, state_layout
from ._algorithm import Update
from ._launches import DeviceBatch

PART_ELEMENTS = 2**26  # 256 MiB of each moment


class Copies:
    """The plan of copies of moments: those of the parameters in the rows of ``layout``, which have ``numels`` elements.

    Attributes:
        layout: its rows, with the offsets in the copies.
    """

    def __init__(self, layout: Tensor, numels: Sequence[int]):
        rows = layout.tolist()
        members: dict[int, list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            members[row[0]].append(i)
        #: By block: offsets, and numbers of elements with those that fill the last block of 8-bit moments up.
        self._places: dict[int, list[tuple[int, int]]] = {}
        for block, of_block in members.items():
            sizes = [-(-numels[i] // ALIGN) * ALIGN for i in of_block]
            self._places[block] = [(rows[i][1], size) for i, size in zip(of_block, sizes, strict=True)]
            for i, offset in zip(of_block, state_layout(sizes)[0], strict=True):
                rows[i][1] = offset
        self.layout = torch.tensor(rows, dtype=torch.int64, device="cpu").view(layout.shape)

    def made(self, a: UpdateArguments) -> UpdateArguments:
        """``a`` over copies of the moments and the counters, and of the masters, which have the same offsets. There are no shadows
        and averages."""
        blocks = len(a.steps)
        absent = [a.emas[0][:0]] * blocks
        return a._replace(
            moments=[self._copied(buffer, i % blocks) for i, buffer in enumerate(a.moments)],
            masters=[self._copied(buffer, i) for i, buffer in enumerate(a.masters)],
            steps=[buffer.clone() for buffer in a.steps],
            shadows=absent,
            emas=absent,
        )

    def _copied(self, buffer: Tensor, block: int) -> Tensor:
        places = self._places.get(block, []) if buffer.numel() else []
        pieces = [buffer[offset : offset + size] for offset, size in places]
        if buffer.dtype == torch.uint8:
            pieces += [exponents_at(buffer, offset, size) for offset, size in places]
        return torch.cat(pieces) if pieces else buffer[:0]


def trial(op: UpdateOp, update: Update, part: slice) -> UpdateCall:
    """The call of the op for the parameters ``part`` of a batch, over copies of their moments and counters."""
    batch, grads, _ = update.launch
    copies = Copies(batch.layout[part], [piece.numel() for piece in batch.pieces[part]])
    arguments, table = copies.made(update.arguments), update.table
    if arguments.factors is not None:
        arguments = arguments._replace(factors=arguments.factors[part])
    if table is None:
        arguments = arguments._replace(params=batch.pieces[part], grads=grads[part], layout=copies.layout)
        return UpdateCall(op, arguments, None)
    rows = table[part].clone()
    rows[:, LAYOUT_COLUMNS] = copies.layout
    return UpdateCall(op, arguments, rows)


def parts_of(batch: DeviceBatch) -> list[slice]:
    """The parameters of a batch in runs of :data:`PART_ELEMENTS`, or of one parameter that has more."""
    starts, room = [0], PART_ELEMENTS
    for i, piece in enumerate(batch.pieces):
        if piece.numel() > room and i > starts[-1]:
            starts.append(i)
            room = PART_ELEMENTS
        room -= piece.numel()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(batch.pieces)], strict=True)]

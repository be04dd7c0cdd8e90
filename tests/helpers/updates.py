"""Parameter lists and calls of the update ops for tests, and access to their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amp_kernels._checks.lists import flat
from amp_kernels._dispatch.library import Op
from amp_kernels._raw._block8 import FIRST, SECOND, decode
from amp_kernels._raw._split_master import join_master
from amp_kernels._updates.op import RULES
from amp_kernels._updates.samples import Blocks, Kind
from amp_kernels._updates.state import exponents_at

_F16, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32

#: Every representation of a weight.
KINDS = [
    Kind(_F32),
    Kind(_F32, shadow=_F16),
    Kind(_F32, shadow=_BF16),
    Kind(_F16),
    Kind(_BF16),
    Kind(_F16, master=_F32),
    Kind(_BF16, master=_F32),
    Kind(_F16, master=torch.int16),
    Kind(_BF16, master=torch.int16),
    Kind(_F16, stochastic=True),
    Kind(_BF16, stochastic=True, ema=True),
    Kind(_F32, shadow=_BF16, ema=True),
    Kind(_F16, master=torch.int16, ema=True),
]
#: A shape with a tail, an empty one, a scalar, and shapes that span several chunks of the CPU kernels.
SHAPES = ((7, 5), (0, 3), (), (1031,), (17003,))


class Update(Blocks):
    """A call of update op ``name``. The first elements of every buffer, 16 or with 8-bit moments 32, are unused."""

    def __init__(self, name: str, kinds: Sequence[Kind], shapes: Sequence[tuple[int, ...]] = SHAPES, **options):
        super().__init__(RULES[name].declared, kinds, shapes=shapes, start=16, **options)

    @property
    def op(self) -> Op:
        return RULES[self.declared.name].op

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the op may write, and the gradients."""
        lists = (self.params, self.grads, *self.moments, self.steps, self.masters, self.shadows, self.emas)
        return [t for tensors in lists for t in tensors]

    def step(self, op: Callable[..., None] | None = None, **call) -> Update:
        """Take the step with the arguments of :meth:`Blocks.arguments`. ``op`` is the compiled one by default. Returns self."""
        (op or self.op.overload)(*self.arguments(**call).of_op())
        return self

    def place(self, i: int) -> tuple[Kind, slice, int, int]:
        """The kind of parameter i, its elements in the block's buffers, its block and its slot."""
        block, offset, slot, *_ = self.layout[i].tolist()
        return self.kinds[block], slice(offset, offset + self.params[i].numel()), block, slot

    def weight(self, i: int) -> Tensor:
        """The fp32 weight of parameter i, in memory order."""
        kind, piece, block, _ = self.place(i)
        if kind.master == _F32:
            return self.masters[block][piece].clone()
        if kind.master is not None:
            return join_master(flat(self.params[i]), self.masters[block][piece])
        return flat(self.params[i]).to(_F32, copy=True)

    def moment(self, k: int, i: int) -> Tensor:
        _, piece, block, _ = self.place(i)
        buffer = self.moments[k][block]
        if buffer.dtype != torch.uint8:
            return buffer[piece].clone()
        code = SECOND if self.declared.moments[k] in self.declared.unsigned else FIRST
        return decode(buffer[piece], exponents_at(buffer, piece.start, self.params[i].numel()), code)

    def ema(self, i: int) -> Tensor:
        _, piece, block, _ = self.place(i)
        return self.emas[block][piece].clone()

    def count(self, i: int) -> float:
        """The step count of parameter i."""
        _, _, block, slot = self.place(i)
        return self.steps[block][slot].item()

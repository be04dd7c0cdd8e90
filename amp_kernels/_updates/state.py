"""Blocks, the layout of an optimizer's state in the update ops, and functions that their references share.

Parameters and gradients are lists of tensors. Everything else is in flat buffers, contiguous tensors of which only the elements count: a
*block* is a set of parameters of one device, dtype and group, and holds one buffer per kind of state (moments, masters, shadows) plus one
step counter per parameter. ``layout`` is an int64 CPU tensor ``[n, 7]``. Its row ``i`` is ``(block, offset, slot, group, index, width,
pitch)``: the state of parameter ``i`` is ``buffer[offset : offset + numel]`` in each buffer of ``block``, its step counter is
``steps[slot]``, its hyper-parameters are those of ``group``. ``index`` is part of the key of its random bits: its number in the
optimizer, below 2^32, plus 2^32 times the block of 32 elements with which this piece of it begins, 0 for a whole parameter
(:mod:`.._raw._stochastic`). A piece within the rows of a matrix, such as a column shard, has ``width`` elements of each row of ``pitch``
elements, both multiples of 32, and the random bits of these elements; other pieces are consecutive elements, with 0 and 0. Elements are
taken in memory order, so state and parameter match whatever the strides.

A buffer with 0 elements means the block has no such state. Moments in uint8 are in 8 bits (:mod:`.._raw._block8`), rounded
stochastically: the buffer holds the codes of all elements and then one exponent for each 32 of them, so that element
``offset`` has code ``offset`` and, with ``n`` elements in the buffer, exponent ``n + offset / 32``. The offset of a parameter is
a multiple of 32; its last block counts as if filled up with zeros.

Masters: float32 holds full masters of 16-bit parameters, int16 the remainders of :mod:`.._raw._split_master`, int8 those of
masters that are rounded stochastically to 24 bits; without one the parameter is its own master, rounded to nearest even or, with
the flag ``STOCHASTIC`` of its group, stochastically (:mod:`.._raw._stochastic`). Shadows: float16 or bfloat16 copies of
float32 parameters. Emas: float32 exponential moving averages of the float32 weights.

Optimizers pass a *table* instead of lists and layout, to private ops: int64 ``[n, 14]`` on the CPU, a row is ``(address of
the parameter, address of the gradient, numel, dtype of the parameter, dtype of the gradient)``, the row of the layout, and
the last two dimensions of the parameter (1 for a dimension that it lacks). That saves some 140 ns a tensor and list. An
address cannot be checked: :mod:`amp_kernels.optim._launches` makes the tables, and no public op takes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .._checks import lists
from .._checks.lists import HALF_DTYPES
from .._raw import _block8
from .._raw._block8 import decode, encode
from .._raw._split_master import join_master, split_master, split_master24
from .._raw._stochastic import round_stochastic, rounding_bits
from .arguments import UpdateArguments

# A group's flags.
MAXIMIZE, NESTEROV, COUPLED_DECAY, STOCHASTIC, NO_BIAS_CORRECTION, ADAPT_ALL, CAUTIOUS = (1 << k for k in range(7))
MAX_SEED = 2**63 - 1


class Column(IntEnum):
    """The columns of a table, as in csrc/base/table_columns.h."""

    PARAM, GRAD, NUMEL, PARAM_DTYPE, GRAD_DTYPE, BLOCK, OFFSET, SLOT, GROUP, INDEX, WIDTH, PITCH, ROWS, COLUMNS = range(
        14
    )


LAYOUT_COLUMNS = slice(Column.BLOCK, Column.PITCH + 1)
TABLE_DTYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}  # torch's own numbers


ALIGN = 32  # elements: whole blocks of 8-bit moments; a piece starts 32-byte aligned in a buffer of any dtype


def state_layout(numels: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of consecutive pieces in a flat buffer, multiples of :data:`ALIGN`, and the number of elements it
    needs."""
    offsets, total = [], 0
    for numel in numels:
        offsets.append(total)
        total += -(-numel // ALIGN) * ALIGN
    return offsets, total


def buffer_numel(elements: int, dtype: torch.dtype) -> int:
    """The size of a buffer for moments of so many elements, a multiple of :data:`ALIGN`."""
    return elements + elements // _block8.BLOCK if dtype == torch.uint8 else elements


def elements_of(buffer: Tensor) -> int:
    """The number of elements that a buffer has room for."""
    numel = buffer.numel()
    return numel * _block8.BLOCK // (_block8.BLOCK + 1) if buffer.dtype == torch.uint8 else numel


def exponents_at(buffer: Tensor, offset: int, numel: int) -> Tensor:
    """The exponents of a piece of a buffer of 8-bit moments."""
    first = elements_of(buffer) + offset // _block8.BLOCK
    return buffer[first : first - (-numel // _block8.BLOCK)]


def view_like(buffer: Tensor, param: Tensor, offset: int) -> Tensor:
    """The piece of a flat buffer that belongs to ``param``, with its shape and strides: both walk memory in the same
    order."""
    return buffer.as_strided(param.shape, param.stride(), offset)


def fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """float32 ``a * b + c`` with one rounding, as the compiled kernels compute it (the product is exact in double)."""
    return (b.double() * a + c.double()).float()


def decayed(g: Tensor, weight_decay: float | Tensor, p: Tensor) -> Tensor:
    """float32 ``g + weight_decay * p``; ``g`` where there is no decay, which an infinite weight must not reach."""
    if not isinstance(weight_decay, Tensor):
        return g if weight_decay == 0 else fma(rounded(weight_decay), p, g)
    return torch.where(weight_decay == 0, g, fma(rounded(weight_decay), p, g))


def cautious_direction(direction: Tensor, g: Tensor, flags: int) -> Tensor:
    """``direction``; with the flag ``CAUTIOUS``, 0 where its sign differs from the gradient's (Liang et al., "Cautious optimizers",
    2024, without the rescaling). NaN stays."""
    return torch.where(direction * g <= 0, 0.0, direction) if flags & CAUTIOUS else direction


def sqrt(x: Tensor) -> Tensor:
    """float32 root, correctly rounded: torch's own on the CPU (a vector math library) may be one unit off."""
    return x.double().sqrt().float()


def rounded(value: float | Tensor) -> float | Tensor:
    """A scalar derived in double, rounded once to float32."""
    return value.float() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32, device="cpu").item()


@dataclass
class StepScalars:
    """The scalars of a step that are on the device."""

    inv_scale: Tensor | float
    clip: Tensor | float
    taken: Tensor | None  # None: never skipped

    @classmethod
    def make(cls, a: UpdateArguments) -> StepScalars:
        clip: Tensor | float = 1.0
        if a.sum_sq is not None:
            clip = (a.max_norm / (sqrt(a.sum_sq.reshape(())) + 1e-6)).clamp(max=1.0)
        taken = None if a.found_inf is None else ~(a.found_inf.reshape(()) > 0)
        return cls(lists.inverse_scale(a.grad_scale), clip, taken)

    def of(self, factor: Tensor) -> StepScalars:
        """The scalars of a parameter with its own clip factor."""
        taken = ~(factor > 1)
        return StepScalars(self.inv_scale, factor, taken if self.taken is None else taken & self.taken)

    def gradient(self, grad: Tensor, flags: int) -> Tensor:
        """The gradient that the update sees, float32 in memory order."""
        value = lists.flat(grad).float() * self.inv_scale * self.clip
        return -value if flags & MAXIMIZE else value

    def store(self, target: Tensor, value: Tensor) -> None:
        """Write ``value`` rounded to nearest even, unless the step is skipped."""
        value = value.to(target.dtype)
        target.copy_(value if self.taken is None else torch.where(self.taken, value, target))


def piece(buffer: Tensor, offset: int, numel: int) -> Tensor | None:
    """One parameter's part of a block's buffer, or ``None`` if the block has none."""
    return None if buffer.numel() == 0 else buffer[offset : offset + numel]


@dataclass
class Moment:
    """One moment of one parameter, as it is stored."""

    values: Tensor  # codes if it has exponents
    exponents: Tensor | None
    code: _block8.Code8
    random16: Tensor | None

    @classmethod
    def at(cls, a: UpdateArguments, i: int, row: Sequence[int], step: Tensor, k: int, *, unsigned: bool) -> Moment:
        """Moment number ``k`` of parameter ``i``; ``row`` and ``step`` as in :meth:`Weight.at`."""
        block, offset, _, _, index, width, pitch = row
        buffer, n = a.moments[k * len(a.steps) + block], a.params[i].numel()
        code = _block8.SECOND if unsigned else _block8.FIRST
        if buffer.dtype != torch.uint8:
            return cls(buffer[offset : offset + n], None, code, None)
        random16 = rounding_bits(a.seed, step, index, -(-n // _block8.BLOCK) * _block8.BLOCK, 1 + k, width, pitch)
        return cls(buffer[offset : offset + n], exponents_at(buffer, offset, n), code, random16)

    def load(self) -> Tensor:
        """The float32 values."""
        if self.exponents is None:
            return self.values.float()
        return decode(self.values, self.exponents, self.code)

    def store(self, scalars: StepScalars, value: Tensor) -> None:
        if self.exponents is None:
            scalars.store(self.values, value)
            return
        codes, exponents = encode(value, self.code, self.random16)
        scalars.store(self.values, codes)
        scalars.store(self.exponents, exponents)


@dataclass
class Weight:
    """One parameter's weight in every form that is stored."""

    param: Tensor  # in memory order, as all of them
    master: Tensor | None
    shadow: Tensor | None
    ema: Tensor | None
    ema_decay: float
    random16: Tensor | None  # bits for stochastic rounding

    @classmethod
    def at(cls, a: UpdateArguments, i: int, row: Sequence[int], step: Tensor) -> Weight:
        """The weight of parameter ``i``, whose row of the layout is ``row``; ``step``: its count after the increment."""
        param, (block, offset, _, group, index, width, pitch) = a.params[i], row
        n = param.numel()
        master, shadow, ema = (piece(buffers[block], offset, n) for buffers in (a.masters, a.shadows, a.emas))
        short = master is not None and master.dtype == torch.int8
        stochastic = short or (a.flags[group] & STOCHASTIC and master is None and param.dtype in HALF_DTYPES)
        random16 = rounding_bits(a.seed, step, index, n, 0, width, pitch) if stochastic else None
        return cls(lists.flat(param), master, shadow, ema, a.ema_decay[group], random16)

    def load(self) -> Tensor:
        """The float32 weight to be updated."""
        if self.master is None:
            return self.param.float()
        return self.master.clone() if self.master.dtype == torch.float32 else join_master(self.param, self.master)

    def store(self, scalars: StepScalars, weight: Tensor) -> None:
        if self.ema is not None:  # torch.lerp's form: an average that equals the weight stays
            scalars.store(self.ema, fma(rounded(1 - self.ema_decay), weight - self.ema, self.ema))
        if self.master is not None and self.master.dtype != torch.float32:
            if self.master.dtype == torch.int8:
                half, remainder = split_master24(weight, self.param.dtype, self.random16 & 0xFF)
            else:
                half, remainder = split_master(weight, self.param.dtype)
            scalars.store(self.param, half)
            scalars.store(self.master, remainder)
            return
        if self.random16 is not None:
            scalars.store(self.param, round_stochastic(weight, self.param.dtype, self.random16))
        else:
            scalars.store(self.param, weight)
        if self.master is not None:
            scalars.store(self.master, weight)
        if self.shadow is not None:
            scalars.store(self.shadow, weight)

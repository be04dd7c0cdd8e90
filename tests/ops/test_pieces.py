"""Pieces of a parameter, as meshes cut it: rows, columns and both. A step of every piece has the bits of a step of the whole."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from amp_kernels import _host
from amp_kernels._raw._block8 import BLOCK
from amp_kernels._updates.op import RULES
from amp_kernels._updates.samples import Kind
from amp_kernels._updates.state import exponents_at

from ..helpers.bits import assert_same_bits
from ..helpers.updates import Update
from .moments8 import BACKEND, step
from .update_rules import BF16, F16, F32

U8, I8 = torch.uint8, torch.int8
ROWS, COLUMNS, INDEX = 12, 384, 7
KINDS = [
    Kind(F32, ema=True),
    Kind(F32, shadow=BF16),
    Kind(BF16, master=I8),
    Kind(F16, master=I8, ema=True),
    Kind(BF16, stochastic=True),
]


def fields(update: Update) -> dict[str, Tensor]:
    """The tensors that a step reads and writes for an update's one parameter, flat: a number an element, or for each 32."""
    _, at, *_ = update.place(0)
    found = {"weight": update.params[0], "grad": update.grads[0]}
    lists = {"master": update.masters, "shadow": update.shadows, "ema": update.emas}
    found |= {name: buffers[0][at] for name, buffers in lists.items() if buffers[0].numel()}
    for name, buffers in zip(update.declared.moments, update.moments, strict=True):
        if buffers[0].numel():
            found[name] = buffers[0][at]
        if buffers[0].dtype == U8 and buffers[0].numel():
            found[name + " exponents"] = exponents_at(buffers[0], at.start, update.params[0].numel())
    return found


def matrix(field: Tensor, rows: int, columns: int, numel: int) -> Tensor:
    return field.view(rows, columns * field.numel() // numel)


def part(field: Tensor, rows: slice, columns: slice, numel: int) -> Tensor:
    """A piece of a field of the whole."""
    unit = numel // field.numel()
    return matrix(field, ROWS, COLUMNS, numel)[rows, columns.start // unit : columns.stop // unit]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "lamb_"])  # LAMB's halves: tests/distributed
@BACKEND
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("moments", [U8, BF16], ids=str)
@pytest.mark.parametrize("mesh", [(1, 2), (1, 4), (4, 1), (2, 2), (3, 12)], ids=str)
def test_pieces_have_the_bits_of_the_whole(rule, backend, kind, moments, mesh):
    def make(numel, offset, rows):
        update = Update(rule, [kind], ((numel,),), moment_dtype=moments, grad_dtype=F32, seed=1)
        update.layout[:, 4] = INDEX + ((first + offset // BLOCK) << 32)
        update.layout[:, 5:] = torch.tensor(rows)
        return update

    first = 2**30 - 30  # so that numbers of groups of eight pass 2^32
    whole, numel = make(ROWS * COLUMNS, 0, (0, 0)), ROWS * COLUMNS
    height, width = ROWS // mesh[0], COLUMNS // mesh[1]
    pieces = {}
    for i, j in itertools.product(*map(range, mesh)):
        rows, columns = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        cut = (width, COLUMNS) if mesh[1] > 1 else (0, 0)
        piece = pieces[rows.start, columns.start] = make(height * width, rows.start * COLUMNS + columns.start, cut)
        for name, field in fields(piece).items():
            matrix(field, height, width, height * width).copy_(part(fields(whole)[name], rows, columns, numel))
    for _ in range(2):
        for update in (whole, *pieces.values()):
            step(update, backend, lr=0.1)
    for (row, column), piece in pieces.items():
        rows, columns = slice(row, row + height), slice(column, column + width)
        for name, field in fields(piece).items():
            wanted = part(fields(whole)[name], rows, columns, numel)
            assert_same_bits(matrix(field, height, width, height * width), wanted, f"{name} from {row}, {column} on")


def test_a_product_divides_every_number_of_a_group():
    """Widths around powers of two and at random, groups around the multiples of the width, up to 2^31 of them."""
    generator = np.random.default_rng(0)
    powers = [2**k + d for k in range(2, 31) for d in (-1, 0, 1) if 2**k + d >= 2]
    for width in [2, *powers, *generator.integers(2, 2**31, 300), *generator.integers(2, 2**13, 300)]:
        width = int(width)
        rows = generator.integers(0, 2**31 // width, 60, dtype=np.uint64)
        near = (rows[:, None] * np.uint64(width) + np.array([0, 1, width - 1], dtype=np.uint64)).reshape(-1)
        last = np.array([2**31 - 1, 2**31 - 2], dtype=np.uint64)
        groups = np.concatenate([near[near < 2**31], last])
        pitch = min(width + 12_345, 2**32 - 1)
        wanted = 5 + groups // width * pitch + groups % width
        assert np.array_equal(_host.random_groups(groups, 5, width, pitch), wanted)

"""unit_sums: sums over rows in one order, which no cut at a multiple of 64 rows changes."""

import functools

import pytest
import torch

from amp_kernels._raw.unit_sums import op

from ..helpers.backends import use
from ..helpers.generators import OUT_DTYPES, normal
from .targets import device_for

device = device_for(op)
SHAPES = [(1, 40), (17, 7), (63, 8), (64, 33), (65, 256), (150, 300), (1300, 1), (0, 4), (3, 0)]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_bits_of_the_reference(device, rows, columns, fresh):
    """Of each pair of dtypes; alone, as a norm's and as a centred norm's."""
    new = functools.partial(normal, device=device)
    mean, rstd, start = new(rows), new(rows, seed=1), new(columns, seed=2)
    for i in range(9):
        grad, x = (new(rows, columns, dtype=OUT_DTYPES[k], seed=k) for k in (i % 3, i // 3))
        for operands in ((), (x, None, rstd), (x.t().contiguous().t(), mean, rstd)):
            sums, want = (torch.full_like(start, torch.nan) if fresh else start.clone() for _ in range(2))
            op(sums, grad, *operands, fresh=fresh)
            with use("reference"):
                op(want, grad, *operands, fresh=fresh)
            assert torch.equal(sums, want), (grad.dtype, x.dtype, len(operands))


def test_cuts(device):
    """The unit is 64 rows: other cuts show."""
    x = normal(200, 33, device=device)
    whole, cut_at = torch.empty(33, device=device), {}
    op(whole, x, fresh=True)
    for cut in (64, 128, 40, 100):
        cut_at[cut] = torch.empty_like(whole)
        op(cut_at[cut], x[:cut], fresh=True)
        op(cut_at[cut], x[cut:])
    assert [torch.equal(sums, whole) for sums in cut_at.values()] == [True, True, False, False]

"""The Triton kernels of rows in the interpreter: column sums, the gradient of an embedding, rotary embedding, rows of tokens to their
groups and back; run by test_interpreted.py. Norms, losses and activations have files of their own."""

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw import routing as raw
from amp_kernels._triton import column_sums, embedding_accumulate, rotary, routing

from ..helpers.bounds import assert_within
from ..helpers.generators import normal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# ---- column_sums


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("programs", [2, 1024])
def test_column_sums_of_shares_and_strips(dtype, programs, monkeypatch):
    """Around the rows of a program and of all, and the columns of one; rows with a gap, whose values are NaN."""
    monkeypatch.setattr(column_sums, "PROGRAMS", programs)
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((0, 5), (1, 128), (31, 129), (33, 7), (200, 260)):
        x = torch.full((rows, columns + 3), torch.nan, dtype=dtype)[:, :columns]
        x.copy_(torch.randn(rows, columns, generator=generator))
        exact = x.double()
        bound = rows * 2.0**-24 * exact.abs().sum(0)
        assert_within(column_sums.column_sums(x), exact.sum(0), bound, f"{rows} x {columns}")


def test_column_sums_of_rows_far_apart():
    far = 2**31 + 8
    x = torch.empty(far + 40, dtype=BF16).as_strided((2, 40), (far, 1))
    x[0], x[1] = 1, 2
    assert column_sums.column_sums(x).tolist() == [3.0] * 40


# ---- embedding_accumulate_


@pytest.mark.parametrize("pieces", [1024, 3])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2, "scale_by_frequency": True}], ids=str)
@pytest.mark.parametrize("runs", [[16], [1] * 40, [15, 2, 47, 1], [100], [3, 30, 16, 16, 5]], ids=str)
def test_runs_within_and_across_pieces(runs, options, pieces, monkeypatch):
    """Exact sums of small integers: a run that loses, or counts twice, one entry shows."""
    monkeypatch.setattr(embedding_accumulate, "MOST_PIECES", pieces)
    rows = len(runs) + 2
    index = torch.cat([torch.full((n,), row + 1) for row, n in enumerate(runs)])
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(0))
    grad = torch.randint(-4, 5, (len(index), 40), generator=torch.Generator().manual_seed(1)).to(BF16)
    want, got = torch.ones(rows, 40), torch.ones(rows, 40)
    REGISTRY["embedding_accumulate_"].reference(want, grad, index, order, **options)
    embedding_accumulate.embedding_accumulate_(got, grad, index, order, **options)
    assert torch.equal(got, want)


def test_rows_out_of_range_are_not_followed():
    out, grad = torch.zeros(3, 40), torch.ones(20, 40)
    index, order = torch.tensor([-5] * 3 + [1] * 14 + [3, 3, 1 << 40]), torch.arange(20)
    order[5] = 1 << 40
    embedding_accumulate.embedding_accumulate_(out, grad, index, order)
    assert torch.equal(out[:, 0], torch.tensor([0.0, 13.0, 0.0]))


# ---- rotary_forward and rotary_backward


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "turning"), [(32, 32), (20, 12)])
def test_heads_in_several_blocks_and_tokens_in_strips(width, turning, interleaved, monkeypatch):
    forward, backward = REGISTRY["rotary_forward"], REGISTRY["rotary_backward"]
    monkeypatch.setattr(rotary, "_ELEMENTS", 128)
    q = normal(2, 7, 9, 2 * width)[..., :width]
    k = normal(2, 9, 7, width, seed=1).transpose(1, 2)[:, :, :5]
    grads = normal(2, 9, 7, width, seed=2).transpose(1, 2), normal(2, 7, 5, width, seed=3)
    cos, sin = normal(2, 7, turning, seed=4), normal(2, 7, turning, seed=5)
    weights = normal(width, seed=6), normal(width, seed=7)
    q[0, 1] *= 2.0**100  # its squares overflow
    options = {"eps": 1e-3, "interleaved": interleaved, "out_dtype": FP32}
    for op, operands in (
        (forward, (q[1:], k[1:], cos[1:], sin[1:])),
        (forward, (q, k, cos, sin, *weights)),
        (backward, (*grads, cos, sin)),
        (backward, (*grads, cos, sin, q, k, *weights)),
    ):
        torch.testing.assert_close(
            [*op.triton(*operands, **options)], [*op.reference(*operands, **options)], rtol=2e-5, atol=2e-5
        )


# ---- spread_rows and combine_rows


@pytest.mark.parametrize("columns", [40, 1100])
def test_routed_rows_are_exact(columns):
    """Sums in the order of the choices, of products that are rounded by themselves."""
    places = torch.randperm(15, generator=torch.Generator().manual_seed(0)).int().view(5, 3)
    x, y, weights = normal(5, columns), normal(15, columns, seed=1), normal(5, 3)
    assert torch.equal(
        routing.spread_rows(x, places, weights, out_dtype=BF16)[0], raw.spread(x, places, weights).bfloat16()
    )
    assert torch.equal(routing.combine_rows(y, places, weights), raw.combine(y, places, weights))


def test_places_out_of_range_are_passed_over():
    places = torch.tensor([[0, 4], [-1, 2], [2**31 - 1, 1]], dtype=torch.int32)
    x, y = torch.ones(3, 8), torch.arange(6.0).view(6, 1).expand(6, 8)
    assert routing.combine_rows(y, places)[:, 0].tolist() == [4, 2, 1]
    out, dots = routing.spread_rows(x, places, None, y)
    assert dots.tolist() == [[0, 32], [0, 16], [0, 8]]
    assert all(out[i].eq(1).all() for i in (0, 1, 2, 4))

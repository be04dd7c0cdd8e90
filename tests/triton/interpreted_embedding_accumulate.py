"""The Triton kernels of embedding_accumulate_ in the interpreter; run by test_interpreted.py."""

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._triton import embedding_accumulate as module
from amp_kernels.cli.check import check_backend

OP = REGISTRY["embedding_accumulate_"]


def test_samples_of_the_op():
    assert check_backend(OP, "triton", "cpu") > 0


@pytest.mark.parametrize("pieces", [1024, 3])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2, "scale_by_frequency": True}], ids=str)
@pytest.mark.parametrize("runs", [[16], [1] * 40, [15, 2, 47, 1], [100], [3, 30, 16, 16, 5]], ids=str)
def test_runs_within_and_across_pieces(runs, options, pieces, monkeypatch):
    """Exact sums of small integers: a run that loses, or counts twice, one entry shows."""
    monkeypatch.setattr(module, "MOST_PIECES", pieces)
    rows = len(runs) + 2
    index = torch.cat([torch.full((n,), row + 1) for row, n in enumerate(runs)])
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(0))
    grad = torch.randint(-4, 5, (len(index), 40), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    want, got = torch.ones(rows, 40), torch.ones(rows, 40)
    OP.reference(want, grad, index, order, **options)
    module.embedding_accumulate_(got, grad, index, order, **options)
    assert torch.equal(got, want)


def test_rows_out_of_range_are_not_followed():
    out, grad = torch.zeros(3, 40), torch.ones(20, 40)
    index, order = torch.tensor([-5] * 3 + [1] * 14 + [3, 3, 1 << 40]), torch.arange(20)
    order[5] = 1 << 40
    module.embedding_accumulate_(out, grad, index, order)
    assert torch.equal(out[:, 0], torch.tensor([0.0, 13.0, 0.0]))

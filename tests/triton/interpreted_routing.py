"""The Triton kernels of spread_rows and combine_rows in the interpreter; run by test_interpreted.py."""

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw import routing as raw
from amp_kernels._triton import routing as module
from amp_kernels.cli.check import check_backend

from ..helpers.generators import normal


@pytest.mark.parametrize("name", ["spread_rows", "combine_rows"])
def test_samples(name):
    assert check_backend(REGISTRY[name], "triton", "cpu") > 0


@pytest.mark.parametrize("columns", [40, 1100])
def test_results_are_exact(columns):
    """Sums in the order of the choices, of products that are rounded by themselves."""
    places = torch.randperm(15, generator=torch.Generator().manual_seed(0)).int().view(5, 3)
    x, y, weights = normal(5, columns), normal(15, columns, seed=1), normal(5, 3)
    assert torch.equal(
        module.spread_rows(x, places, weights, out_dtype=torch.bfloat16)[0], raw.spread(x, places, weights).bfloat16()
    )
    assert torch.equal(module.combine_rows(y, places, weights), raw.combine(y, places, weights))


def test_places_out_of_range_are_passed_over():
    places = torch.tensor([[0, 4], [-1, 2], [2**31 - 1, 1]], dtype=torch.int32)
    x, y = torch.ones(3, 8), torch.arange(6.0).view(6, 1).expand(6, 8)
    assert module.combine_rows(y, places)[:, 0].tolist() == [4, 2, 1]
    out, dots = module.spread_rows(x, places, None, y)
    assert dots.tolist() == [[0, 32], [0, 16], [0, 8]]
    assert all(out[i].eq(1).all() for i in (0, 1, 2, 4))

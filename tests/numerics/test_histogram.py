"""GradientHistogram against counts made by hand, its advice against FP16's own rounding, and its figure."""

import re

import pytest
import torch
from torch import nn

import amp_kernels as ak
from amp_kernels._raw.exponent_histogram import exponent_histogram
from amp_kernels.numerics import GradientHistogram
from amp_kernels.numerics._statistics import flushed_share, shifted


def spread(n=5000, low=-40, high=4):
    exponents = torch.randint(low, high, (n,), generator=torch.Generator().manual_seed(0))
    return 2.0**exponents * 1.25  # no power of two, so that none lies on an edge


@pytest.mark.parametrize("scale", [1.0, 2.0**-5, 2.0**8, 2.0**16, 2.0**40])
def test_flushed_share_is_what_fp16_rounds_to_zero(scale):
    x = spread()
    lost = ((x * scale).half() == 0).float().mean().item()
    (counts,), _ = exponent_histogram([x])
    assert flushed_share(counts, scale) == pytest.approx(lost, abs=1e-7)  # counts are exact, the mean is fp32's


@pytest.mark.parametrize("exponent", [-200, -3, 0, 7, 300])
def test_shifted_counts_are_those_of_the_scaled_values(exponent):
    x = torch.cat([spread(), torch.tensor([0.0, torch.inf, torch.nan])])
    (counts,), _ = exponent_histogram([x])
    moved = shifted(counts, torch.tensor(exponent))
    assert moved.sum() == counts.sum()
    assert moved[[0, 278, 279]].tolist() == [1, 1, 1]
    if abs(exponent) < 100:
        (expected,), _ = exponent_histogram([x * 2.0**exponent])
        assert torch.equal(moved, expected)


def test_counts_by_hand():
    """The gradient of a mean over 8 entries is 1/8 each; of the weight, sums of inputs."""
    model = nn.Sequential(nn.Linear(2, 4, bias=False))
    x = torch.ones(2, 2)
    with GradientHistogram(model) as histogram:
        for _ in range(3):
            model(x).mean().backward()
            model.zero_grad()
    assert histogram.counts("activations").nonzero().flatten().tolist() == [1 + 149 - 3]
    assert histogram.counts("activations").sum() == 3 * 8
    assert histogram.counts("parameters 0.weight").nonzero().flatten().tolist() == [1 + 149 - 2]
    assert histogram.counts("parameters").sum() == 3 * 8
    assert histogram.counts().sum() == 6 * 8
    model(x).mean().backward()  # the block is over
    assert histogram.counts().sum() == 6 * 8


def test_a_name_is_no_prefix_of_letters():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(11)))
    with GradientHistogram(model) as histogram:
        model(torch.ones(2)).sum().backward()
    counted = {of: histogram.counts(of).sum().item() for of in ("activations 1", "activations 1.0", "parameters 10")}
    assert counted == {"activations 1": 2, "activations 1.0": 2, "parameters 10": 6}
    assert histogram.counts("parameters 1.0.weight").sum() == 4
    assert histogram.counts("parameters").sum() == 11 * 6
    assert histogram.counts("activations").sum() == 11 * 2
    assert histogram.counts("act").sum() == 0


@pytest.mark.parametrize("make", [ak.GradScaler, torch.amp.GradScaler])
def test_the_loss_scale_is_divided_out(make):
    def counts(scaler):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        with GradientHistogram(model, scaler) as histogram:
            for _ in range(2):
                scaler.scale(model(torch.randn(5, 3)).square().mean()).backward()
        return histogram.counts(), histogram.advise()

    plain, advice = counts(make("cpu", enabled=False))
    scaled, advice_scaled = counts(make("cpu", init_scale=2.0**12))
    assert torch.equal(plain, scaled)
    assert advice == advice_scaled


def test_advice_keeps_what_it_promises():
    values = spread(low=-40, high=0)
    param = nn.Parameter(torch.zeros_like(values))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = param

    with GradientHistogram(Model()) as histogram:
        (param * values).sum().backward()
    low, high = histogram.advise(tolerance=0.0)
    assert ((values * low).half() != 0).all()
    assert ((values * low / 2).half() == 0).any()
    assert (values * high).half().isfinite().all()
    assert not (values * high * 2).half().isfinite().all()
    low, _ = histogram.advise(tolerance=0.25)
    assert 0.2 < ((values * low).half() == 0).float().mean() <= 0.25


def test_no_scale_keeps_what_spans_more_than_fp16():
    param = nn.Parameter(torch.zeros(2))
    model = nn.Module()
    model.weight = param
    with GradientHistogram(model) as histogram:
        (param * torch.tensor([2.0**-40, 2.0**15])).sum().backward()
    low, high = histogram.advise()
    assert low > high
    assert "FP16 cannot represent them at any loss scale" in str(histogram)


def test_nothing_counted():
    histogram = GradientHistogram(nn.Linear(2, 2))
    assert histogram.advise() == (1.0, torch.inf)
    assert histogram.flushed_share(scale=1.0) == 0.0
    assert histogram.counts().sum() == 0


def test_text():
    model = nn.Linear(2, 2)
    with GradientHistogram(model) as histogram:
        (model(torch.ones(1, 2)).sum() * 2.0**-30).backward()
    text = str(histogram)
    assert re.search(r"2\^-30 +100\.00%  zero +#{50}", text)


def test_bad_arguments():
    with pytest.raises(TypeError, match="model has type int"):
        GradientHistogram(3)
    with pytest.raises(ValueError, match="scale is 0"):
        GradientHistogram(nn.Linear(2, 2)).flushed_share(scale=0.0)
    with pytest.raises(ValueError, match="tolerance is 2"):
        GradientHistogram(nn.Linear(2, 2)).advise(2.0)


def test_the_worst_modules_are_those_that_lose_the_largest_share():
    """Of two layers in turn: a last one whose gradients are below 2^-25, and a first one with a quarter of its own there."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(4, 2))
    with GradientHistogram(model) as histogram:
        (model[0].weight * torch.tensor([1.0, 1.0, 1.0, 2.0**-30])).sum().backward()
        (model[1](torch.ones(3, 4)) * 2.0**-40).sum().backward()
    assert histogram.worst() == [("activations 1", 1.0), ("parameters 1", 1.0), ("parameters 0", 0.25)]
    assert histogram.worst(1, scale=2.0**20) == [("parameters 0", 0.0)]
    assert all(share == histogram.flushed_share(name, scale=1.0) for name, share in histogram.worst())
    with pytest.raises(ValueError, match="count is 0"):
        histogram.worst(0)

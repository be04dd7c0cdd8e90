"""parity: what a run is given, how the verdict falls, and that a format which breaks training is told."""

import math
import random

import pytest
import torch

import amp_kernels as ak
from amp_kernels.numerics import Outcome, Parity, Run, parity


def outcomes(**metrics):
    return Parity(
        tuple(
            Outcome(p.replace("_", "-"), i, m, 10, 0, 1.0, None) for p, of in metrics.items() for i, m in enumerate(of)
        )
    )


def test_the_verdict_weighs_the_difference_against_the_spread():
    """Means 10 and 10.3, both with variance 0.04 / 3 over 4 seeds: allowed is 3 * sqrt(2 * 0.04 / 3 / 4) = 0.245."""
    base = [9.9, 9.9, 10.1, 10.1]
    result = outcomes(fp32=base, bf16=[x + 0.2 for x in base], fp16=[x + 0.3 for x in base])
    allowed = 3 * math.sqrt(2 * 0.04 / 3 / 4)
    assert result.difference("bf16") == (pytest.approx(0.2), pytest.approx(allowed))
    assert (result.verdict("bf16"), result.verdict("fp16")) == ("parity", "DIFFERS")
    assert not result
    assert bool(outcomes(fp32=base, bf16=[x - 0.2 for x in base]))
    assert not outcomes(fp32=base, bf16=[*base[:3], math.nan])
    assert not outcomes(fp32=[math.inf, 1.0], bf16=[1.0, 1.0])
    assert bool(outcomes(fp32=[1.0, 1.0], bf16=[1.0 + 1e-7] * 2))  # a metric that no seed moves
    assert not outcomes(fp32=[1.0, 1.0], bf16=[1.0 + 1e-4] * 2)


def test_seeds_that_differ_by_a_tenth_of_the_metric_prove_nothing():
    """Means 2.5 and 2.4: allowed is 0.245, a little below and a little above a tenth of them."""
    for mean, verdict in ((2.5, "parity"), (2.4, "inconclusive")):
        base = [mean - 0.1, mean - 0.1, mean + 0.1, mean + 0.1]
        result = outcomes(fp32=base, bf16=[x + 0.01 for x in base])
        assert result.verdict("bf16") == verdict
        assert bool(result) == (verdict == "parity")
        assert str(result).endswith(verdict)


def test_arguments_of_a_run():
    seen = []

    def train(run):
        with run.autocast():
            dtype = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
        seen.append((run.precision, run.seed, dtype, run.scaler.is_enabled(), torch.rand(()).item(), random.random()))
        run.scaler.update() if not run.scaler.is_enabled() else None
        return 1.0

    parity(train, precisions=["fp16-unscaled", "fp16", "bf16", "fp32"], seeds=2)
    assert [s[:2] for s in seen] == [(p, s) for s in (0, 1) for p in ("fp32", "fp16-unscaled", "fp16", "bf16")]
    assert {s[0]: s[2:4] for s in seen} == {
        "fp32": (torch.float32, False),
        "bf16": (torch.bfloat16, False),
        "fp16": (torch.float16, True),
        "fp16-unscaled": (torch.float16, False),
    }
    draws = {s[1]: s[4:] for s in seen}
    assert all(s[4:] == draws[s[1]] for s in seen), "the same seed draws the same numbers in every format"
    assert draws[0] != draws[1]


def small(loss_weight, overflow=False):
    """A regression whose gradients shrink with the weight of its loss; the optimizer makes up for it."""

    def train(run):
        model = torch.nn.Linear(8, 1)
        optimizer = ak.optim.SGD(model.parameters(), lr=0.02 / loss_weight)
        for step in range(60):
            x = torch.randn(64, 8)
            with run.autocast():
                out = model(x)
                loss = (out.float() - x.sum(1, keepdim=True)).square().mean() * loss_weight
            if overflow and step == 5:
                loss = loss * torch.inf
            run.scaler.scale(loss).backward()
            run.scaler.step(optimizer)
            run.scaler.update()
            optimizer.zero_grad()
        return model.weight.mean().item()  # of weights that should become 1

    return train


def test_fp16_without_scaling_fails_where_gradients_are_small_and_with_it_does_not():
    shown = []
    result = parity(small(2.0**-24), precisions=["fp16", "fp16-unscaled"], seeds=3, show=shown.append)
    assert result.holds("fp16")
    assert not result.holds("fp16-unscaled")
    assert len(shown) == len(result.outcomes) == 9
    assert {outcome.steps for outcome in result.outcomes} == {60}
    table = str(result).splitlines()
    assert table[1].startswith("fp32")
    assert [line.split()[-1] for line in table[2:]] == ["parity", "DIFFERS"]


def test_skips_are_counted():
    result = parity(small(1.0, overflow=True), precisions=["fp16"], seeds=2)
    skipped = {outcome.precision: outcome.skipped for outcome in result.outcomes}
    assert skipped["fp16"] >= 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: parity(lambda run: 1.0, precisions=["fp8"]), ValueError, "precisions has 'fp8'; accepted: fp32, bf16"),
        (lambda: parity(lambda run: 1.0, seeds=1), ValueError, "seeds is 1"),
        (lambda: parity(lambda run: None), TypeError, "train returned a value of type NoneType; accepted: a number"),
        (lambda: Run("fp8", 0, torch.device("cpu")), ValueError, "precision is 'fp8'"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("changed", "parted"),
    [
        ({}, None),
        ({range(120, 400): 0.5}, 120),
        ({range(40, 60): 5.0, range(307, 400): 0.5}, 300),  # what recovers does not part; 20 steps are one figure
        ({range(399, 400): math.nan}, 380),
    ],
)
def test_curves_part_where_they_differ_to_the_end(changed, parted):
    added = {step: by for steps, by in changed.items() for step in steps}

    def train(run):
        shift = added if run.precision == "bf16" else {}
        return [2.0 + run.seed / 1000 + random.random() / 10 + shift.get(step, 0.0) for step in range(400)]

    result = parity(train, precisions=["bf16"], seeds=2, curve=True)
    assert result.parted("bf16") == parted
    assert (result.verdict("bf16") == "DIFFERS") is (parted is not None)
    assert ("from step" in str(result)) is (parted is not None)


def test_curves_are_lists_of_numbers():
    with pytest.raises(TypeError, match="parity: train returned float; accepted with curve=True: the losses of all"):
        parity(lambda run: 1.0, seeds=2, curve=True)
    with pytest.raises(ValueError, match="the runs of 'bf16' have no curves"):
        outcomes(fp32=[1.0, 1.0], bf16=[1.0, 1.0]).parted("bf16")

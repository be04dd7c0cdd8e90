"""The paper's table: what its columns lose, when one fails, and the share of gradients that vanish."""

import pytest
import torch
from torch import nn

from bench import paper
from bench.training import paper_table
from bench.training.tasks import Task

STEPS = 4


class Slope(Task):
    """One weight, 1 at first, whose gradient is ``slope`` in every batch, by plain SGD: what it must become is known."""

    name, small_steps, batch, optimizer = "slope", STEPS, 1, "SGD"
    lr, slope = 0.25, 0.5

    def model(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def loss(self, model, draw):
        return (model(torch.ones(1, 1, dtype=model.weight.dtype)).float() * self.slope).sum()

    def metric(self, model):
        return model.weight.item()


@pytest.fixture
def slope(monkeypatch):
    """``slope(column, steps, **changes)``: the row of its run."""
    monkeypatch.setitem(paper.TASKS, "slope", Slope)

    def trained(column, steps=STEPS, **changes):
        for name, value in changes.items():
            monkeypatch.setattr(Slope, name, value)
        return paper.train(paper.Cell("slope", column, 0, "small", steps, "cpu"))

    return trained


def test_gradients_below_fp16_are_lost_without_scaling_and_in_no_other_column(slope):
    found = {name: slope(name, slope=2.0**-26, lr=2.0**24) for name in paper.COLUMNS}
    assert {name for name in found if found[name]["metric"] == 1.0} == {"fp16 unscaled"}
    assert {found[name]["metric"] for name in found} == {1.0, 1 - STEPS / 4}
    assert {name for name in found if found[name]["zero_share"] == 1} == {"fp16 unscaled"}


@pytest.mark.parametrize(("dtype", "quarter_unit"), [("fp16", 2.0**-13), ("bf16", 2.0**-10)])
def test_updates_of_a_quarter_of_a_unit_are_lost_without_masters(slope, dtype, quarter_unit):
    """A unit in the last place of a weight just below 1."""
    found = {name: slope(name, 64, slope=1.0, lr=quarter_unit)["metric"] for name in paper.COLUMNS if dtype in name}
    assert found.pop(f"{dtype} no master") == 1
    if dtype == "bf16":
        assert 1 - 128 * quarter_unit < found.pop("bf16 stochastic") < 1 - 16 * quarter_unit
    assert set(found.values()) == {1 - 64 * quarter_unit}


def table(values, factor=5.0, **changes):
    """The table of one task; ``values``: the metric by column and seed."""
    cost = {"skipped": 1, "state_bytes": 1 << 20, "peak_bytes": 3 << 20, "seconds": 60.0, "cpu_seconds": 30.0}
    cell = {"task": "t", "size": "small", "steps": 1, "device": "cpu", "zero_share": 0.0, **cost}
    rows = [
        {**cell, "column": column, "seed": seed, "metric": metric, **changes.get(column, {})}
        for column, of in values.items()
        for seed, metric in enumerate(of)
    ]
    return paper_table.Table(rows, {"t": "loss"}, list(values), factor)


def test_a_failure_exceeds_the_stated_number_of_standard_errors():
    """Variance 0.01 and three seeds: a standard error of sqrt(2 * 0.01 / 3) = 0.082; the difference is 0.5."""
    values = {"fp32": [0.9, 1.0, 1.1], "fp16": [1.4, 1.5, 1.6], "bf16": [0.4, 0.5, 0.6]}
    assert table(values, factor=6.0).failed("t", "fp16")
    assert not table(values, factor=6.2).failed("t", "fp16")
    assert not table(values, factor=1.0).failed("t", "bf16")  # better is no failure
    single, diverged = table({"fp32": [1.0], "fp16": [9.0]}), table({"fp32": [1.0, 1.1], "fp16": [1.0, None]})
    assert (single.failed("t", "fp16"), single.metric("t", "fp16")) == (False, "9")
    assert (diverged.failed("t", "fp16"), diverged.metric("t", "fp16")) == (True, "diverged ✗")
    assert diverged.message() == "Tasks that fail, of 1: fp16 1"


def test_vanished_gradients_are_counted_among_those_that_fp32_has():
    found = table({"fp32": [1.0], "fp16": [1.0]}, fp32={"zero_share": 0.2}, fp16={"zero_share": 0.6})
    assert found.vanished("t", "fp16") == pytest.approx(0.5)
    assert (found.vanished_share("t", "fp16"), found.vanished_share("t", "fp32")) == ("50%", "0")

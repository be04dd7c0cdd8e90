"""The paper's table: columns, resumed runs and failures."""

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


def row(task, column, seed, metric, **changes):
    cell = {"task": task, "column": column, "seed": seed, "size": "small", "steps": 1, "device": "cpu"}
    cost = {"skipped": 1, "state_bytes": 1 << 20, "peak_bytes": 3 << 20, "seconds": 60.0, "cpu_seconds": 30.0}
    return {**cell, "metric": metric, "zero_share": 0.0, **cost, **changes}


def table(values, factor=5.0):
    """The table of one task; ``values``: the metric by column and seed."""
    rows = [row("t", column, seed, metric) for column, of in values.items() for seed, metric in enumerate(of)]
    return paper_table.Table(rows, {"t": "loss"}, list(values), factor)


@pytest.mark.parametrize("column", paper.COLUMNS)
def test_every_column_steps_by_learning_rate_and_the_mean_gradient_of_its_batches(slope, column):
    for batches in (1, 8):
        assert slope(column, accumulate=batches)["metric"] == 1 - STEPS * 0.25 * 0.5


def test_gradients_below_fp16_are_lost_without_scaling_and_in_no_other_column(slope):
    found = {name: slope(name, slope=2.0**-26, lr=2.0**24) for name in paper.COLUMNS}
    assert {name: found[name]["metric"] for name in found} == {
        name: 1.0 if name == "fp16 unscaled" else 1 - STEPS / 4 for name in paper.COLUMNS
    }
    assert {name for name in found if found[name]["zero_share"] == 1} == {"fp16 unscaled"}


@pytest.mark.parametrize(("dtype", "quarter_unit"), [("fp16", 2.0**-13), ("bf16", 2.0**-10)])
def test_updates_of_a_quarter_of_a_unit_are_lost_without_masters(slope, dtype, quarter_unit):
    """A unit in the last place of a weight just below 1."""
    found = {name: slope(name, 64, slope=1.0, lr=quarter_unit)["metric"] for name in paper.COLUMNS if dtype in name}
    assert found.pop(f"{dtype} no master") == 1
    if dtype == "bf16":
        assert 1 - 128 * quarter_unit < found.pop("bf16 stochastic") < 1 - 16 * quarter_unit
    assert set(found.values()) == {1 - 64 * quarter_unit}


# ---- the real tasks


# Each task once and each column once, some steps of each: a diagonal of the table.
CELLS = [*zip(paper.TASKS, [*paper.COLUMNS, "fp16"], strict=True)]


@pytest.mark.parametrize(("task", "column"), CELLS)
def test_a_cell_trains(task, column):
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's; `make test` installs it")
    before = paper.train(paper.Cell(task, column, 0, "small", 0, "cpu"))["metric"]
    few = {"classifier": 50, "cnn": 30, "detector": 10, "transformer": 1, "lstm": 1}.get(task, 60)
    found = paper.train(paper.Cell(task, column, 0, "small", few, "cpu"))
    assert found["metric"] < before
    assert 0 <= found["zero_share"] < 1
    assert found["peak_bytes"] > found["state_bytes"] > 0


# ---- resuming


def arguments(folder, *more):
    return ["--task", "slope", "--processes", "1", "--out", str(folder), *more]


def test_a_killed_run_goes_on_and_nothing_is_trained_twice(slope, monkeypatch, tmp_path, capsys):
    one = arguments(tmp_path, "--column", "fp16", "--seed", "1")
    assert paper.main(one) == 0
    results = tmp_path / "paper.jsonl"
    first = results.read_text()
    results.write_text(first + '{"task": "slope", "column": "fp32", "se')  # the kill came while a line was written

    trained = []
    monkeypatch.setattr(paper, "train", lambda cell, train=paper.train: trained.append(cell) or train(cell))
    assert paper.main(arguments(tmp_path)) == 0
    everything = {(column, seed) for column in paper.COLUMNS for seed in (0, 1, 2)}
    assert len(trained) == 20
    assert {(c.column, c.seed) for c in trained} == everything - {("fp16", 1)}
    assert paper.main(arguments(tmp_path)) == 0
    assert len(trained) == 20
    assert len(paper.read(results)) == 21
    assert results.read_text().startswith(first)
    assert "21 runs" in capsys.readouterr().out


# ---- the verdict


def test_a_failure_exceeds_the_stated_number_of_standard_errors():
    """Variance 0.01 and three seeds: a standard error of sqrt(2 * 0.01 / 3) = 0.082; the difference is 0.5."""
    values = {"fp32": [0.9, 1.0, 1.1], "fp16": [1.4, 1.5, 1.6], "bf16": [0.4, 0.5, 0.6]}
    assert table(values, factor=6.0).failed("t", "fp16")
    assert not table(values, factor=6.2).failed("t", "fp16")
    assert not table(values, factor=1.0).failed("t", "bf16")  # better is no failure


def test_one_seed_is_no_failure_and_a_run_that_diverged_is_one(tmp_path):
    single = table({"fp32": [1.0], "fp16": [9.0]})
    assert (single.failed("t", "fp16"), single.metric("t", "fp16")) == (False, "9")
    diverged = table({"fp32": [1.0, 1.1], "fp16": [1.0, None]})
    assert (diverged.failed("t", "fp16"), diverged.metric("t", "fp16")) == (True, "diverged ✗")
    assert diverged.message() == "Tasks that fail, of 1: fp16 1"
    assert single.message() == "Tasks that fail, of 1: fp16 0"
    assert paper_table.plot(tmp_path / "p.png", diverged)
    assert (tmp_path / "p.png").stat().st_size > 5_000


def test_vanished_gradients_are_counted_among_those_that_fp32_has():
    rows = [row("t", "fp32", 0, 1.0, zero_share=0.2), row("t", "fp16", 0, 1.0, zero_share=0.6)]
    found = paper_table.Table(rows, {"t": "loss"}, ["fp32", "fp16"], 5.0)
    assert found.vanished("t", "fp16") == pytest.approx(0.5)
    assert found.vanished_share("t", "fp16") == "50%"
    assert found.vanished_share("t", "fp32") == "0"

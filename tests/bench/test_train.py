"""The training benchmark: the command, the text, what a run reports about itself, and the table."""

import itertools
import json

import pytest
import torch

from bench import train
from bench.training import report
from bench.training.data import load_text
from bench.training.trainers import TRAINERS
from bench.training.trial import Settings, Trial

NANO = ["--model", "nano", "--device", "cpu"]


def test_a_run_leaves_table_plot_and_record(tmp_path, capsys):
    assert train.main([*NANO, "--steps", "8", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.json", "train.png", "train.txt"]
    record = json.loads((tmp_path / "train.json").read_text())
    assert [(run["dtype"], run["provider"]) for run in record["runs"]] == [
        (dtype, provider) for dtype in ("fp32", "bf16", "fp16") for provider in ("torch", "amp_kernels")
    ]
    assert all(len(run["losses"]) == 8 for run in record["runs"])
    assert (tmp_path / "train.txt").read_text().splitlines()[1] in capsys.readouterr().out
    assert train.main([*NANO, "--out", str(tmp_path), "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_held_out_bytes_are_not_trained_on(tmp_path):
    """Each block of this text has its own byte, so any that strays to the other side shows."""
    path = tmp_path / "text"
    path.write_bytes(b"".join(bytes([i]) * 600 for i in range(40)))  # 24000 bytes: blocks of 600
    text = load_text(str(path))
    assert set(text.validation.tolist()) == {9, 19, 29, 39}
    assert set(text.train.tolist()) == set(range(40)) - {9, 19, 29, 39}


def trained(provider, steps, dtype, scale=None):
    trial = Trial(Settings("nano", steps, (dtype,), (provider,), True, 0, False, "cpu"), load_text(), provider, dtype)
    if scale:
        trial.trainer.scaler.load_state_dict({**trial.trainer.scaler.state_dict(), "scale": scale})
    assert trial.train()
    return trial


@pytest.mark.parametrize("provider", TRAINERS)
def test_skipped_steps_are_those_where_the_scale_fell(provider):
    """The counter comes from the optimizer, the scale from the scaler."""
    result = trained(provider, 30, "fp16", 2.0**26).result()
    falls = sum(after < before for before, after in itertools.pairwise([2.0**26, *result["scales"]]))
    assert result["skipped_steps"] == falls > 0
    assert result["final_scale"] == result["scales"][-1]


@pytest.mark.parametrize("provider", TRAINERS)
def test_memory_is_the_weights_two_moments_and_the_most_on_top(provider):
    """In a flat buffer each moment is a view of the whole, which must not count once a parameter."""
    trial = trained(provider, 2, "fp32")
    weights, held = 4 * sum(p.numel() for p in trial.trainer.model.parameters()), trial.trainer.held_bytes()
    assert held == pytest.approx(3 * weights, rel=0.02)
    assert trial.peak_bytes > 4 * weights  # a step adds the gradients and activations
    with trial._count():
        first, second = torch.empty(10 << 20, dtype=torch.uint8), torch.empty(5 << 20, dtype=torch.uint8)
        del first
        third = torch.empty(3 << 20, dtype=torch.uint8)
    assert trial.peak_bytes == pytest.approx(held + (15 << 20), abs=1000)
    del second, third


def result(provider, dtype, loss, **changes):
    scaled = dtype == "fp16"
    run = {"name": f"{dtype} {provider}", "provider": provider, "dtype": dtype, "scaled": scaled}
    run |= {"validation_loss": loss, "tokens_per_second": 12345.6, "peak_memory_bytes": 3 << 20}
    run |= {"final_scale": 2.0**17 if scaled else None, "skipped_steps": 2, "validation": [[3, loss]]}
    return run | {"losses": [3.0, 2.0, loss], "scales": [2.0**16, 2.0**17, 2.0**17] if scaled else None} | changes


def test_the_table_compares_within_provider_and_within_precision():
    results = [result("torch", "fp32", 2.0), result("amp_kernels", "fp32", 2.2)]
    results += [result("torch", "fp16", 2.1), result("amp_kernels", "fp16", 1.98)]
    rows = [line.split()[2:] for line in report.table(results).splitlines()[2:]]
    assert rows[0] == ["2.0000", "12,346", "3.0", "MiB"]
    assert rows[1][:3] == ["2.2000", "+10.00", "%"]
    assert rows[2] == ["2.1000", "+5.00", "%", "12,346", "3.0", "MiB", "2^17", "2"]
    assert rows[3][:5] == ["1.9800", "-10.00", "%", "-5.71", "%"]


def test_a_run_that_diverged_is_null_in_json_and_has_a_plot(tmp_path):
    nan = float("nan")
    report.write_json(tmp_path / "r.json", {"a": [nan, 1.5], "b": (float("inf"), 2)})
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": [None, 1.5], "b": [None, 2]}
    diverged = result("torch", "fp16", nan, losses=[3.0, nan, nan], validation=[[3, nan]])
    assert report.plot(tmp_path / "p.png", [result("torch", "fp32", 2.0), diverged], "title")

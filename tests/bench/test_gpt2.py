"""The training step of GPT-2: every provider takes the same one, and what is left says whose time and memory it is."""

import json

import pytest

from bench import gpt2
from bench.training import gpt

PROVIDERS = [
    "torch",
    *(f"amp_kernels{kind}" for kind in (" three lines", "", " fuse_residuals", " fused norms", " graph")),
]


@pytest.fixture
def small(monkeypatch):
    for module in (gpt2, gpt):
        monkeypatch.setattr(module, "WORDS", 64)
        monkeypatch.setattr(module, "CONTEXT", 16)
    config = gpt.GPT2Config(width=32, heads=2, layers=3, batch=2)
    monkeypatch.setitem(gpt.GPT2_MODELS, "gpt2-124m", config)
    return config


def run(tmp_path, *options):
    common = ["--device", "cpu", "--steps", "1", "--rounds", "3", "--out", str(tmp_path / "new")]
    assert gpt2.main([*common, *options]) == 0
    return [json.loads(line) for line in (tmp_path / "new" / "gpt2.jsonl").read_text().splitlines()]


def test_all_take_the_same_step(small, tmp_path, capsys):
    rows = run(tmp_path, "--provider", ",".join(PROVIDERS), "--layers", "2", "--profile")
    assert [(row["dtype"], row["provider"]) for row in rows] == [(d, p) for d in ("bf16", "fp16") for p in PROVIDERS]
    for row in rows:
        losses = row["losses"]
        assert (row["model"], row["layers"], row["batch"], len(losses)) == ("gpt2-124m", 2, 2, 4)
        assert {"device", "commit", "date", "versions"} <= set(row)
        assert row["shadows"] == ("amp_kernels" in row["provider"])
        assert "peak_gib" not in row  # which torch counts on CUDA alone
        first = rows[0 if row["dtype"] == "bf16" else len(PROVIDERS)]["losses"]
        assert losses == pytest.approx(first, rel=5e-3)
        assert max(losses) - min(losses) > 5e-3 * first[0]  # so that a step left out would show
    assert "bf16 amp_kernels graph: microseconds of a step" in capsys.readouterr().out


def test_rates_are_of_medians_and_ratios_of_turns(small, tmp_path, monkeypatch):
    taken = iter([1.0, 0.5, 3.0, 1.0, 2.0, 0.1])  # seconds of a step: torch and ours in turn
    monkeypatch.setattr(gpt2, "seconds", lambda step, steps, device: next(taken))
    torchs, ours = run(tmp_path, "--provider", "torch, amp_kernels", "--dtype", "bf16", "--batch", "5")
    assert (torchs["ms"], ours["ms"]) == (2000, 500)
    assert (torchs["speedup"], ours["speedup"]) == (1, 3)  # of 2, 3 and 20
    assert (torchs["ktok_per_s"], ours["ktok_per_s"]) == (5 * 16 / 2000, 5 * 16 / 500)


def test_rows_of_a_dtype_are_kept_if_the_next_one_is_cut_off(small, tmp_path, monkeypatch):
    measure = gpt2.measure
    monkeypatch.setattr(gpt2, "measure", lambda *rest: 1 / 0 if rest[-1] == "tf32" else measure(*rest))
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, "--provider", "torch", "--dtype", "fp32,tf32")
    assert json.loads((tmp_path / "new" / "gpt2.jsonl").read_text())["dtype"] == "fp32"
    assert (tmp_path / "new" / "sources.json").exists()

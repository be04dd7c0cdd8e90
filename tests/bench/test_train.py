"""The training benchmark: the table, the record, and who trains on which bytes."""

import json

from bench.training import report
from bench.training.data import split


def test_held_out_bytes_are_not_trained_on():
    """Each block of this text has its own byte, so any that strays to the other side shows."""
    train, held_out = split(b"".join(bytes([i]) * 600 for i in range(40)), 600)
    assert set(held_out.tolist()) == {9, 19, 29, 39}
    assert set(train.tolist()) == set(range(40)) - {9, 19, 29, 39}


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

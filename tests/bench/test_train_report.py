import json

from bench import train_report as report


def result(provider, dtype, loss, **changes):
    return {
        "name": f"{dtype} {provider}",
        "provider": provider,
        "dtype": dtype,
        "scaled": dtype == "fp16",
        "steps": 3,
        "validation_loss": loss,
        "tokens_per_second": 12345.6,
        "peak_memory_bytes": 3 << 20,
        "final_scale": 2.0**17 if dtype == "fp16" else None,
        "skipped_steps": 2,
        "validation": [[3, loss]],
        "losses": [3.0, 2.0, loss],
        "scales": [2.0**16, 2.0**17, 2.0**17] if dtype == "fp16" else None,
        **changes,
    }


def row(table, dtype, provider):
    return next(line.split() for line in table.splitlines() if line.split()[:2] == [dtype, provider])


def test_table_compares_within_provider_and_within_precision():
    results = [result("torch", "fp32", 2.0), result("amp_kernels", "fp32", 2.2)]
    results += [result("torch", "fp16", 2.1), result("amp_kernels", "fp16", 1.98)]
    table = report.table(results)
    assert row(table, "fp32", "torch")[2:] == ["2.0000", "12,346", "3.0", "MiB"]
    assert row(table, "fp32", "amp_kernels")[2:5] == ["2.2000", "+10.00", "%"]
    assert row(table, "fp16", "torch")[2:] == ["2.1000", "+5.00", "%", "12,346", "3.0", "MiB", "2^17", "2"]
    assert row(table, "fp16", "amp_kernels")[2:7] == ["1.9800", "-10.00", "%", "-5.71", "%"]


def test_table_of_a_single_unscaled_run_has_no_comparisons():
    table = report.table([result("torch", "fp16", 2.1, scaled=False, scales=None, final_scale=None)])
    assert table.splitlines()[-1].split() == ["fp16", "unscaled", "torch", "2.1000", "12,346", "3.0", "MiB"]


def test_json_has_null_for_what_json_cannot_say(tmp_path):
    report.write_json(tmp_path / "r.json", {"a": [float("nan"), 1.5], "b": (float("inf"), 2)})
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": [None, 1.5], "b": [None, 2]}


def test_plot_survives_a_run_that_diverged(tmp_path):
    nan = float("nan")
    results = [
        result("torch", "fp32", 2.0),
        result("torch", "fp16", nan, losses=[3.0, nan, nan], validation=[[3, nan]]),
    ]
    assert report.plot(tmp_path / "p.png", results, "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "p.png").stat().st_size > 10_000

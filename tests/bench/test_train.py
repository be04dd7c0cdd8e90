"""The training benchmark as a user runs it: options, outputs, interruption by signal."""

import json

import pytest

from bench import train
from bench.training import report

NANO = ["--model", "nano", "--device", "cpu"]


def test_a_run_leaves_table_plot_and_record(tmp_path, capsys):
    assert train.main([*NANO, "--steps", "8", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.json", "train.png", "train.txt"]
    record = json.loads((tmp_path / "train.json").read_text())
    assert [(run["dtype"], run["provider"]) for run in record["runs"]] == [
        (dtype, provider) for dtype in ("fp32", "bf16", "fp16") for provider in ("torch", "amp_kernels")
    ]
    assert all(len(run["losses"]) == 8 for run in record["runs"])
    assert {"device", "commit", "date", "versions"} <= set(record["machine"])
    assert (tmp_path / "train.txt").read_text().splitlines()[1] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps: '0' is not a positive number"),
        (["--dtype", "fp32,fp8"], "--dtype: fp8 is unknown; accepted: fp32, bf16, fp16"),
        (["--model", "huge"], "--model: invalid choice: 'huge'"),
        (["--device", "tpu"], "--device tpu: not a device; accepted: cpu, cuda, cuda:<index>"),
        (["--text", "/nowhere/text"], "the text /nowhere/text cannot be read: No such file"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_a_bad_option_gets_one_line(tmp_path, capsys, options, message):
    assert train.main([*NANO, "--out", str(tmp_path / "out"), *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert not (tmp_path / "out").exists()


# ---- table, record and plot


def result(provider, dtype, loss, **changes):
    scaled = dtype == "fp16"
    return {
        "name": f"{dtype} {provider}",
        "provider": provider,
        "dtype": dtype,
        "scaled": scaled,
        "validation_loss": loss,
        "tokens_per_second": 12345.6,
        "peak_memory_bytes": 3 << 20,
        "final_scale": 2.0**17 if scaled else None,
        "skipped_steps": 2,
        "validation": [[3, loss]],
        "losses": [3.0, 2.0, loss],
        "scales": [2.0**16, 2.0**17, 2.0**17] if scaled else None,
        **changes,
    }


def test_the_table_compares_within_provider_and_within_precision():
    results = [result("torch", "fp32", 2.0), result("amp_kernels", "fp32", 2.2)]
    results += [result("torch", "fp16", 2.1), result("amp_kernels", "fp16", 1.98)]
    rows = [line.split()[2:] for line in report.table(results).splitlines()[2:]]
    assert rows[0] == ["2.0000", "12,346", "3.0", "MiB"]
    assert rows[1][:3] == ["2.2000", "+10.00", "%"]
    assert rows[2] == ["2.1000", "+5.00", "%", "12,346", "3.0", "MiB", "2^17", "2"]
    assert rows[3][:5] == ["1.9800", "-10.00", "%", "-5.71", "%"]
    alone = report.table([result("torch", "fp16", 2.1, scaled=False, scales=None, final_scale=None)])
    assert alone.splitlines()[-1].split() == ["fp16", "unscaled", "torch", "2.1000", "12,346", "3.0", "MiB"]


def test_a_run_that_diverged_is_null_in_json_and_has_a_plot(tmp_path):
    nan = float("nan")
    report.write_json(tmp_path / "r.json", {"a": [nan, 1.5], "b": (float("inf"), 2)})
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": [None, 1.5], "b": [None, 2]}
    diverged = result("torch", "fp16", nan, losses=[3.0, nan, nan], validation=[[3, nan]])
    assert report.plot(tmp_path / "p.png", [result("torch", "fp32", 2.0), diverged], "title")
    assert (tmp_path / "p.png").stat().st_size > 10_000

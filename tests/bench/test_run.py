"""The command: what it runs, what it leaves behind, and what survives a case that takes the process with it."""

import json

import pytest
import torch

from amp_kernels._dispatch import cpu_isa
from bench import run
from bench.harness.case import Scope
from bench.harness.rows import KEY
from bench.ops import OPS, cpu_suite

from .doubling import doubling

IN_PLACE = {"adamw", "cast", "lamb", "lion", "muon", "sgd", "unscale", "update_scale"}
NAMES = {f"{name}_" if name in IN_PLACE else name for name in OPS} | {"gemm_accumulate_"}


def read(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def case(name=None, **providers):
    return doubling(name=name, functions=providers)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Every benchmark, small: the programs that a GPU runs, on the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("results")
    status = run.main(["--device", "cpu", "--quick", "--out", str(folder)])
    torch.set_num_threads(threads)
    assert status == 0
    return folder


def test_every_benchmark_runs_and_writes_rows_tables_and_plots(everything):
    rows = read(everything)
    assert {row["op"] for row in rows} == NAMES
    assert {row["provider"] for row in rows} == {
        "torch",
        "amp_kernels",
        "amp_kernels:full",
        "torch:all bf16",
        "torch:loop",
    }
    needed = "op shape dtype provider p20_us p50_us p80_us bytes flops floor_us roofline_share device versions peers"
    for row in rows:
        assert row["status"] == "ok"
        assert row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert set(needed.split()) <= set(row)
        assert ("backend" in row) == (row["provider"] == "amp_kernels")
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["p50_us"] / 1e3)
        assert row["floor_us"] == pytest.approx(row["roofline_share"] * row["p50_us"])
        assert 0 <= row.get("written", 0) <= row["bytes"]
    assert {path.stem for path in everything.glob("*.png")} >= {"step", "products", "layers", "norms", "losses"}
    table = (everything / "table.txt").read_text()
    for title in (
        "Speed-ups",
        "Whole optimizer step",
        "Host time of a call",
        "Matrix multiplication by shape",
        "Other ops",
    ):
        assert f"\n\n{title}\n" in table
    batched = next(r for r in rows if r["op"] == "gemm" and r["shape"].startswith("3 x") and r["provider"] == "torch")
    assert batched["kernels"][0] == "aten::bmm"


def test_a_step_says_what_it_moves_and_holds_per_parameter(everything):
    rows = [row for row in read(everything) if row["op"] == "step" and row["shape"] == "tiny"]
    found = {(row["dtype"], row["provider"]): row for row in rows}
    layouts = ("fp32 + bf16 shadow", "bf16 + fp32 master", "bf16 + split master", "bf16 + split, bf16 moments")
    for layout, needed, held in zip(layouts, (34, 30, 28, 20), (14, 14, 12, 8), strict=True):
        row = found[layout, "amp_kernels"]
        assert row["bytes"] == row["moved_bytes"] == needed * row["params"]
        assert row["state_bytes"] / row["params"] == pytest.approx(held, rel=0.02)
        assert found[layout, "torch"]["moved_bytes"] == 54 * row["params"]
        assert row["host_us"] > 0
    half = found[layouts[-1], "torch:all bf16"]
    assert (half["moved_bytes"], half["state_bytes"] // half["params"]) == (20 * half["params"], 6)


def test_the_suite_of_a_cpu(tmp_path):
    assert run.main(["--suite", "cpu", "--quick", "--shape", "4x16x16", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path)
    assert {row["shape"] for row in rows} == {"4x16x16 autocast forward", "4x16x16 autocast forward + backward"}
    assert all(row["speedup_p20"] <= row["speedup"] <= row["speedup_p80"] for row in rows)
    assert all(row["threads"] == torch.get_num_threads() and row["isa"] == cpu_isa.chosen() for row in rows)
    assert "\n\nGoals\n" in (tmp_path / "table.txt").read_text()
    goals = {case.name: case.goal for case in cpu_suite.cases(Scope(torch.device("cpu")))}
    assert goals["step 10000 x 64 fp32"] == 11.0
    assert goals["linear 4x16x16 autocast forward + backward bf16"] == pytest.approx(1 / 1.3)
    assert {name for name, goal in goals.items() if goal is None} == {"adamw_ 64 M fp32", "check_and_norm 64 M fp32"}


def test_a_row_measured_again_replaces_the_old_one(tmp_path, capsys):
    options = ["--device", "cpu", "--quick", "--op", "check_and_norm,unscale", "--out", str(tmp_path)]
    assert run.main(options) == 0
    before = read(tmp_path)
    assert run.main([*options, "--shape", "inf", "--provider", "amp_kernels"]) == 0
    after = read(tmp_path)
    assert [[row[key] for key in KEY] for row in after] == [[row[key] for key in KEY] for row in before]
    assert "1/1 check_and_norm tiny inf" in capsys.readouterr().err
    changed = [row for row, old in zip(after, before, strict=True) if row["p50_us"] != old["p50_us"]]
    assert [(row["shape"], row["provider"]) for row in changed] == [("tiny inf", "amp_kernels")]


def test_a_case_whose_times_vary_is_measured_again_and_named(tmp_path, monkeypatch, capsys):
    spreads = iter([4.0, 2.0, 3.0, 1.2])

    def measure(*arguments):
        row = {
            "op": "double",
            "shape": "64",
            "dtype": "fp32",
            "provider": "torch",
            "status": "ok",
            "bytes": 1,
            "flops": 1,
        }
        return [row | {"p20_us": 1.0, "p50_us": 1.0, "p80_us": next(spreads), "error": 0.0}]

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "select", lambda options: [case(torch=lambda x: 2 * x)])
    for vary in ("UNSTEADY, times vary by 2.0: double 64 fp32 torch", None):
        assert run.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert vary in said if vary else "UNSTEADY" not in said


def test_a_wrong_result_fails_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "select", lambda options: [case(torch=lambda x: 2 * x, amp_kernels=lambda x: 3 * x)])
    assert run.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    assert "WRONG: double 64 fp32 amp_kernels: out[0]: relative error 5.00e-01" in capsys.readouterr().out


def test_rows_survive_a_case_that_ends_the_process(tmp_path, monkeypatch):
    def dies(x):
        raise KeyboardInterrupt

    cases = [case("first", torch=lambda x: 2 * x), case("second", torch=lambda x: 2 * x, amp_kernels=dies)]
    monkeypatch.setattr(run, "select", lambda options: cases)
    progress = tmp_path / "progress"
    command = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--progress-file", str(progress)]
    with pytest.raises(KeyboardInterrupt):
        run.main(command)
    assert [row["shape"] for row in read(tmp_path)] == ["first"]
    assert progress.read_text() == "double second fp32\namp_kernels, check\n"
    del cases[1]
    assert run.main(command) == 0
    assert not progress.exists()

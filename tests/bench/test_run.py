"""The command: what it runs, what it leaves behind, and what survives a case that takes the process with it."""

import itertools
import json
import sys
import types

import pytest
import torch

from bench import floor, run
from bench.harness.case import Scope
from bench.harness.measure import measure
from bench.harness.roofline import Roofline
from bench.harness.rows import KEY, record
from bench.harness.timer import Effort
from bench.ops import OPS, cpu_suite, peers

from .doubling import doubling

IN_PLACE = {"adamw", "cast", "lamb", "lion", "muon", "sgd", "unscale", "update_scale"}
NAMES = {f"{name}_" if name in IN_PLACE else name for name in OPS} | {"gemm_accumulate_"}
CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--quick", "--out"]


def read(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def case(name=None, **providers):
    return doubling(name=name, functions=providers)


@pytest.fixture
def played(monkeypatch):
    """`played(*cases)`: these are selected, and the ceilings need no measurement."""
    ceilings = Roofline(1e9, 1e9, {"fp32": 1e9, "bf16": 1e9, "fp16": 1e9})
    monkeypatch.setattr(Roofline, "measured", classmethod(lambda *arguments: ceilings))
    return lambda *cases: monkeypatch.setattr(run, "select", lambda options: list(cases))


def test_every_benchmark_agrees_with_its_reference():
    """The first case of every op and the layouts of a tiny step: the programs that a GPU runs, on the CPU."""
    effort, found = Effort(settle=0.0, warmup=0.0, sample=0.0, rounds=1), {}
    for cases in OPS.values():
        for case in cases(Scope(CPU, quick=True)):
            if case.op not in found or (case.op, case.shape) == ("step", "tiny"):
                found.setdefault(case.op, []).extend(measure(case, CPU, effort))
    assert found.keys() == NAMES
    for row in itertools.chain(*found.values()):
        assert row["status"] == "ok", row
        assert ("backend" in row) == (row["provider"] == "amp_kernels")
        assert 0 <= row.get("written", 0) <= row["bytes"]
    steps = {(row["dtype"], row["provider"]): row for row in found["step"]}
    layouts = ("fp32 + bf16 shadow", "bf16 + fp32 master", "bf16 + split master", "bf16 + split, bf16 moments")
    for layout, needed, held in zip(layouts, (34, 30, 28, 20), (14, 14, 12, 8), strict=True):
        row = steps[layout, "amp_kernels"]
        assert row["bytes"] == row["moved_bytes"] == needed * row["params"]
        assert row["state_bytes"] / row["params"] == pytest.approx(held, rel=0.02)
        assert steps[layout, "torch"]["moved_bytes"] == 54 * row["params"]
        assert row["host_us"] > 0


def test_the_suite_of_a_cpu(played, tmp_path):
    cases = {case.name: case for case in cpu_suite.cases(Scope(CPU))}
    linear = "linear 4x16x16 autocast forward + backward bf16"
    assert (cases["step 10000 x 64 fp32"].goal, cases[linear].goal) == (11.0, pytest.approx(1 / 1.3))
    played(cases[linear])
    assert run.main(["--suite", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    assert "\n\nGoals\n" in (tmp_path / "table.txt").read_text()


def test_the_floor_is_the_larger_of_bytes_and_flops_at_the_chips_rates(capsys):
    assert run.main(["--floor", "H100", "--op", "gemm", "--shape", "4096x4096x4096 NN", "--dtype", "bf16"]) == 0
    line = capsys.readouterr().out.splitlines()[-1].split()
    # 3 * 2 * 4096^2 bytes at 3.35e12, 2 * 4096^3 at 989.5e12
    assert line[-4:] == ["100.7", "137.4", "138.90", "arithmetic"]
    (moved,) = floor.table([doubling(3350)], "H100")[1:]
    assert moved[-2:] == ("0.01", "memory")


def test_a_row_measured_again_replaces_the_old_one(tmp_path):
    def row(shape, provider, us):
        return dict(zip(KEY, ("double", shape, "fp32", provider), strict=True)) | {"p50_us": us}

    record(tmp_path / "rows.jsonl", [row("a", "torch", 1), row("a", "amp_kernels", 2), row("b", "torch", 3)])
    assert record(tmp_path / "rows.jsonl", [row("a", "amp_kernels", 4)]) == read(tmp_path)
    assert [each["p50_us"] for each in read(tmp_path)] == [1, 4, 3]


def test_a_case_whose_times_vary_is_measured_again_and_named(played, tmp_path, monkeypatch, capsys):
    spreads = iter([4.0, 2.0, 3.0, 1.2])

    def vary(*arguments):
        row = {"op": "double", "shape": "64", "dtype": "fp32", "provider": "torch", "status": "ok", "error": 0.0}
        return [row | {"bytes": 1, "flops": 1, "p20_us": 1.0, "p50_us": 1.0, "p80_us": next(spreads)}]

    monkeypatch.setattr(run, "measure", vary)
    played(case(torch=lambda x: 2 * x))
    for said_so in ("UNSTEADY, times vary by 2.0: double 64 fp32 torch", None):
        assert run.main([*QUICK, str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert said_so in said if said_so else "UNSTEADY" not in said


def test_a_wrong_result_fails_the_command(played, tmp_path, capsys):
    played(case(torch=lambda x: 2 * x, amp_kernels=lambda x: 3 * x))
    assert run.main([*QUICK, str(tmp_path)]) == 1
    assert "WRONG: double 64 fp32 amp_kernels: out[0]: relative error 5.00e-01" in capsys.readouterr().out


def test_rows_survive_a_case_that_ends_the_process(played, tmp_path):
    def dies(x):
        raise KeyboardInterrupt

    played(case("first", torch=lambda x: 2 * x), case("second", torch=lambda x: 2 * x, amp_kernels=dies))
    progress = tmp_path / "progress"
    with pytest.raises(KeyboardInterrupt):
        run.main([*QUICK, str(tmp_path), "--progress-file", str(progress)])
    assert [row["shape"] for row in read(tmp_path)] == ["first"]
    assert progress.read_text() == "double second fp32\namp_kernels, check\n"


def test_a_peer_that_does_not_import_is_absent(tmp_path, monkeypatch):
    (tmp_path / "brokenpeer.py").write_text("raise OSError('libcudart.so.11: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.version("brokenpeer") is None
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    sys.modules["apex"].__spec__ = types.SimpleNamespace()
    assert peers.version("apex") == "unknown"


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (["--op", "gemm", "--shape", "96x24x130", "--dtype", "fp16", "--quick"], ["gemm 96x24x130 NT fp16"]),
        (["--op", "gemm", "--shape", "96x24x130 TN", "--quick"], ["gemm 96x24x130 TN bf16"]),
        (["--op", "gemm,linear,rms_norm", "--shape", "8x4x6", "--dtype", "fp32"], ["linear 8x4x6 forward fp32"]),
        (["--op", "cross_entropy", "--quick", "--shape", "x", "--dtype", "fp8"], []),
        (["--op", "gemm", "--shape", "8x4x6", "--provider", "quack"], []),
    ],
)
def test_a_product_of_any_size_and_dtype_is_timed(asked, names):
    assert [case.name for case in run.select(run.parse(["--device", "cpu", *asked]))] == names


def test_a_filter_without_a_match_fails_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Roofline, "measured", None)
    assert run.main(["--device", "cpu", "--op", "gemm", "--shape", "7 x 7", "--out", str(tmp_path / "out")]) == 2
    assert "no case matches" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--after: no selected case is called 'nope'"):
        run.main(["--device", "cpu", "--op", "gemm", "--after", "nope", "--list"])
    assert not (tmp_path / "out").exists()


def test_a_quick_run_writes_to_the_cache_and_measures_the_ceilings_once(played, monkeypatch, tmp_path, capsys):
    played(case(torch=lambda x: 2 * x))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    counted, measured = [], Roofline.measured
    monkeypatch.setattr(Roofline, "measured", lambda *arguments: (counted.append(1), measured())[1])
    for threads, ceilings in ((1, 1), (1, 1), (2, 2)):
        torch.set_num_threads(threads)
        assert run.main(["--device", "cpu", "--quick"]) == 0
        assert len(counted) == ceilings
    (folder,) = (tmp_path / "amp_kernels" / "bench").iterdir()
    assert read(folder)[0]["in_cache"]
    assert " in cache " in capsys.readouterr().out

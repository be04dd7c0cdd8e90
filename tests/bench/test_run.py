"""The command: what it runs, what it leaves behind, and what survives a case that takes the process with it."""

import json
import subprocess
import sys
import types

import pytest
import torch

from amp_kernels._dispatch import cpu_isa
from amp_kernels.testing.patience import PATIENCE
from bench import cpu, peers, run, timing, watch
from bench.harness import Case, Scope
from bench.rows import KEY

OPS = {
    "activation",
    "activation_backward",
    "adamw_",
    "check_and_norm",
    "gemm",
    "gemm_accumulate_",
    "lamb_",
    "linear",
    "lion_",
}
OPS |= {
    "cast_",
    "cross_entropy",
    "dropout_add",
    "embedding",
    "exponent_histogram",
    "layer_norm",
    "linear_cross_entropy",
    "mlp",
    "rms_norm",
    "sgd_",
    "softmax",
    "step",
    "unscale_",
    "update_scale_",
}


def read(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def case(name="64", **providers) -> Case:
    return Case(
        op="double",
        shape=name,
        dtype="fp32",
        bytes=512,
        flops=64,
        inputs=lambda generator: torch.randn(64, generator=generator),
        providers={name: lambda x, f=f: lambda: {"out": f(x)} for name, f in providers.items()},
        reference=lambda x: {"out": (2 * x.double(), 1e-6)},
    )


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
    assert {row["op"] for row in rows} == OPS
    assert {row["provider"] for row in rows} == {"torch", "amp_kernels", "torch:all bf16"}
    needed = "op shape dtype provider p20_us p50_us p80_us bytes flops floor_us roofline_share device versions peers"
    for row in rows:
        assert row["status"] == "ok"
        assert row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert set(needed.split()) <= set(row)
        assert ("backend" in row) == (row["provider"] == "amp_kernels")
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["p50_us"] / 1e3)
        assert row["floor_us"] == pytest.approx(row["roofline_share"] * row["p50_us"])
    for plot in ("roofline.png", "gemm.png"):
        assert (everything / plot).read_bytes().startswith(b"\x89PNG")
    table = (everything / "table.txt").read_text()
    for title in ("Speed-ups", "Whole optimizer step", "Host time of a call", "Matrix products by shape", "Other ops"):
        assert f"\n\n{title}\n" in table


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


def test_products_say_what_torch_runs(everything):
    rows = [row for row in read(everything) if row["op"] == "gemm"]
    assert all(row["kernels"] for row in rows)
    batched = next(row for row in rows if row["shape"].startswith("3 x") and row["provider"] == "torch")
    assert batched["kernels"][0] == "aten::bmm"


def test_the_suite_of_a_cpu(tmp_path):
    assert run.main(["--suite", "cpu", "--quick", "--shape", "4x16x16", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path)
    assert {(row["shape"], row["provider"]) for row in rows} == {
        (f"4x16x16 autocast {direction}", provider)
        for direction in ("forward", "forward + backward")
        for provider in ("torch", "amp_kernels")
    }
    assert all(row["speedup_p20"] <= row["speedup"] <= row["speedup_p80"] for row in rows)
    assert all(row["threads"] == torch.get_num_threads() and row["isa"] == cpu_isa.chosen() for row in rows)
    assert "\n\nGoals\n" in (tmp_path / "table.txt").read_text()


def test_the_suite_asks_for_what_the_record_shows():
    scope = Scope(torch.device("cpu"))
    goals = {case.name: case.goal for case in cpu.cases(scope)}
    assert goals["step 10000 x 64 fp32"] == 11.0
    assert goals["linear 4x16x16 autocast forward + backward bf16"] == pytest.approx(1 / 1.3)
    assert sum(name.endswith(("forward bf16", "forward fp16", "forward fp32")) for name in goals) == 10
    assert {name for name, goal in goals.items() if goal is None} == {"adamw_ 64 M fp32", "check_and_norm 64 M fp32"}


def test_the_arithmetic_of_a_cpu():
    if cpu_isa.chosen() == "portable":
        assert cpu_isa.peak(torch.bfloat16, 0.01) == 0
        return
    assert cpu_isa.peak(torch.bfloat16, 0.01) > 0


def test_a_row_measured_again_replaces_the_old_one(tmp_path, capsys):
    options = ["--device", "cpu", "--quick", "--op", "check_and_norm,unscale", "--out", str(tmp_path)]
    assert run.main(options) == 0
    before = read(tmp_path)
    assert run.main([*options, "--shape", "inf", "--provider", "amp_kernels"]) == 0
    after = read(tmp_path)
    assert [[row[key] for key in KEY] for row in after] == [[row[key] for key in KEY] for row in before]
    said = capsys.readouterr()
    assert "\n1 cases, 0 s or more\n" in said.out
    assert "1/1 check_and_norm tiny inf" in said.err
    changed = [row for row, old in zip(after, before, strict=True) if row["p50_us"] != old["p50_us"]]
    assert [(row["shape"], row["provider"]) for row in changed] == [("tiny inf", "amp_kernels")]


def test_the_time_said_beforehand():
    effort = timing.Effort(settle=1.0, warmup=2.0, sample=0.5, rounds=10)
    roofline = types.SimpleNamespace(floor_seconds=lambda bytes, flops, dtype: bytes / 512)
    two = [case(torch=None, amp_kernels=None), case("slow", torch=None)]
    two[1].bytes *= 60
    assert run._least_time(two, None, effort, roofline) == "10 min"  # 2 * (2 + 10) and 2 + 600 seconds
    assert run._least_time(two[:1], ["torch"], effort, roofline) == "12 s"


def test_a_wrong_result_fails_the_command(tmp_path, monkeypatch, capsys):
    bad = case(torch=lambda x: 2 * x, amp_kernels=lambda x: 3 * x)
    monkeypatch.setattr(run, "select", lambda options: [bad])
    assert run.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    assert "WRONG: double 64 fp32 amp_kernels: out[0]: relative error 5.00e-01" in capsys.readouterr().out


def test_what_is_measured_survives_a_case_that_ends_the_process(tmp_path, monkeypatch):
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


def test_what_does_not_fit_into_the_time_is_named_and_an_error(tmp_path, capsys):
    command = ["--device", "cpu", "--quick", "--op", "update_scale", "--out", str(tmp_path), "--seconds", "0"]
    assert run.main(command) == 1
    assert "NOT MEASURED within 0 s: update_scale_ 1 flag fp32" in capsys.readouterr().out


def names(capsys, *options) -> list[str]:
    assert run.main(["--device", "cpu", "--list", *options]) == 0
    return [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]


def test_it_starts_behind_a_case(capsys):
    everything = names(capsys, "--op", "gemm,step")
    assert names(capsys, "--op", "gemm,step", "--after", everything[5]) == everything[6:]
    assert names(capsys, "--op", "gemm,step", "--after", "gemm 1x1x1 NT bf16") == []


def test_what_does_not_fit_into_memory_is_reduced_or_left_out_aloud(capsys):
    assert run.main(["--device", "cpu", "--list", "--op", "gemm,step", "--memory", "0.001"]) == 0
    captured = capsys.readouterr()
    assert "left out: gemm 1024x768x768 NT bf16 needs 45.0 MiB of memory" in captured.err
    assert "1024x768x768" not in captured.out
    assert "step tiny / 64 fp32 " in captured.out
    assert "step tiny fp32" not in captured.out


def test_every_op_has_cases_of_both_sizes(capsys):
    for quick in ([], ["--quick"]):
        assert {name.split()[0] for name in names(capsys, *quick)} == OPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--op", "conv"], "--op: conv is unknown; accepted: activation, activation_backward, adamw"),
        (["--provider", "flash"], "--provider: flash is unknown; accepted: torch, amp_kernels, apex"),
        (["--device", "tpu"], "--device tpu: not a device"),
    ],
)
def test_bad_options_are_refused(capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        run.main(options)
    assert message in capsys.readouterr().err


def test_a_case_that_never_returns_ends_the_process_and_leaves_its_name(tmp_path):
    progress = tmp_path / "progress"
    for seconds in (0.5, 5.0, 50.0):  # a busy machine may need more than the first between the two notes
        program = (
            "import pathlib, time; from bench import watch\n"
            f"with watch.watched(pathlib.Path({str(progress)!r}), {seconds}) as note:\n"
            "    note('gemm 8x8x8', 'torch, check'); note('gemm 8x8x8', 'amp_kernels, check'); time.sleep(10_000)"
        )
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
        assert ended.returncode == 1
        assert "Timeout" in ended.stderr
        if progress.read_text() == "gemm 8x8x8\namp_kernels, check\n":
            break
    else:
        pytest.fail(progress.read_text())


def test_a_case_gets_its_time_anew_and_the_watch_ends_with_the_run(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(watch.faulthandler, "dump_traceback_later", lambda seconds, **_: asked.append(seconds))
    monkeypatch.setattr(watch.faulthandler, "cancel_dump_traceback_later", lambda: asked.append("end"))
    with watch.watched(None, 5.0) as note:
        for text in (("a", "1"), ("a", "2"), ("b", "1")):
            note(*text)
    assert asked == [5.0, 5.0, "end"]


def test_a_peer_that_does_not_import_is_absent(tmp_path, monkeypatch):
    (tmp_path / "brokenpeer.py").write_text("raise OSError('libcudart.so.11: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert peers.version("brokenpeer") is None
    assert peers.version("no_such_peer") is None
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    sys.modules["apex"].__spec__ = types.SimpleNamespace()
    assert peers.version("apex") == "unknown"

"""`make gpu` without a GPU: its time adds up, and a hang costs one case and is named. The benchmarks are played by a script."""

import os
import re
import subprocess
import sys

import pytest

from amp_kernels.testing.patience import PATIENCE
from bench import gpu
from bench.harness.watch import CEILINGS
from bench.ops import OPS

FAKE = """
import pathlib, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, progress, after = pathlib.Path(options["--out"]), pathlib.Path(options["--progress-file"]), options.get("--after")
with open(folder / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
"""
#: Seconds that a process which hangs is given. A slow machine needs more than the first to start it.
UNTIL_IT_HAS_STARTED = (1, 10, 100, 1000)


def play(tmp_path, script, seconds=20):
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE + script)
    outcomes = gpu.bench("some", [sys.executable, fake], seconds, tmp_path)
    assert {name for name, _, _ in outcomes} == {"benchmarks: some"}
    calls = tmp_path / "calls"
    return [outcome for _, outcome, _ in outcomes], calls.read_text().splitlines() if calls.exists() else []


DIES_ONCE = """
if after is None:
    progress.write_text("gemm 8x8x8 NT bf16\\namp_kernels, check\\n")
    sys.exit(1)
assert after == "gemm 8x8x8 NT bf16"
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("", ["passed"]),
        ("sys.exit(1)", ["FAILED (exit 1)"]),  # wrong results: no reason to run again
        (DIES_ONCE, ["FAILED (exit 1) in gemm 8x8x8 NT bf16, amp_kernels, check", "passed"]),
        (f"progress.write_text({CEILINGS!r}); sys.exit(3)", [f"FAILED (exit 3) in {CEILINGS}"]),
        ("progress.write_text('always'); sys.exit(3)", ["FAILED (exit 3) in always"] * 2),
    ],
    ids=["passes", "wrong", "continues after a case that ends the process", "no ceilings", "the same case again"],
)
def test_a_part_is_run_again_behind_the_case_that_ended_it(tmp_path, script, expected):
    outcomes, calls = play(tmp_path, script)
    assert outcomes == expected
    assert len(calls) == len(expected)
    assert calls[0].startswith("--seconds 20 --out")


def test_a_process_that_hangs_is_ended_and_its_case_named(tmp_path, monkeypatch):
    for seconds in UNTIL_IT_HAS_STARTED:
        monkeypatch.setattr(gpu, "GRACE_SECONDS", seconds)
        (outcome, *_), _ = play(tmp_path, "progress.write_text('gemm 1\\ncheck\\n'); time.sleep(10_000)", seconds)
        if "check" in outcome:
            break
    assert re.fullmatch(r"HUNG for \d+ s in gemm 1, check", outcome)
    assert gpu.run("late", [sys.executable, "-c", ""], -1.0)[1] == "NOT RUN: no time left"


def test_a_part_and_the_build_take_nine_minutes_at_most_and_every_benchmark_is_in_one(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(
        gpu, "bench", lambda name, command, seconds, results: ran.append((name, command, seconds)) or []
    )
    for part in gpu.parts():
        assert part.seconds + gpu.BUILD_SECONDS <= gpu.MOST_SECONDS == 540
        if part.name in ("products", "step", "ops"):
            part.run(tmp_path, part.seconds, part.name == "ops")
    ops = [op for _, command, _ in ran for op in command[command.index("--op") + 1].split(",")]
    assert sorted([*ops, "adamw"]) == sorted(OPS)  # the step times adamw_ too
    assert [(name, "--resume" in command) for name, command, _ in ran] == [
        ("products", False),
        ("step", False),
        ("ops", True),
    ]


def played(tmp_path, monkeypatch, ends, arguments=()):
    """`run_parts` with parts that end so; those that ran."""
    ran = []

    def part(name):
        def run(results, seconds, resume):
            ran.append((name, resume))
            return [(name, ends[name], 1.0)]

        return gpu.Part(name, 100, run)

    monkeypatch.setattr(gpu.environment, "commit", lambda: "c0ffee")
    options = gpu.parse(list(arguments))
    return gpu.run_parts([part(name) for name in ends], tmp_path, options), ran


def test_a_run_that_was_cut_is_resumed_behind_what_passed(tmp_path, monkeypatch):
    ends = {"tests": "passed", "products": "HUNG for 9 s", "step": "passed: none"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("of an earlier run")
    outcomes, ran = played(tmp_path, monkeypatch, ends, ["--seconds", "250"])
    assert outcomes[:2] == [("tests", "passed", 1.0), ("products", "HUNG for 9 s", 1.0)]
    assert outcomes[2][1] == "passed: none"  # each took no time
    assert not rows.exists()
    rows.write_text("of this run")
    outcomes, ran = played(tmp_path, monkeypatch, ends, ["--resume"])
    assert ran == [("products", True)]
    assert outcomes == [(name, end, 1.0) for name, end in ends.items()]
    assert rows.exists()
    monkeypatch.setattr(gpu.environment, "commit", lambda: "c0ffee+changes")
    _, ran = played(tmp_path, monkeypatch, ends)
    assert [name for name, _ in ran] == list(ends)


def test_every_folder_with_gpu_tests_is_run():
    folders = [gpu.ROOT / folder for folder in gpu.TESTS]
    marked = [path for path in (gpu.ROOT / "tests").rglob("*/*.py") if "pytest.mark." + "gpu" in path.read_text()]
    assert {path.parent for path in marked} == set(folders)


BROKEN = """
import os, pytest, torch

@pytest.mark.parametrize("i", range(6))
def test_it(i):
    assert not torch.cuda.broken, "the context was broken before"
    if i == 2:
        torch.cuda.broken = True
    assert i not in (2, 4)
"""
FAKE_TORCH = """
class cuda:
    broken = False
    is_initialized = staticmethod(lambda: True)
    def synchronize():
        if cuda.broken:
            raise RuntimeError("illegal memory access")
"""


def test_a_broken_context_costs_one_test(tmp_path):
    """In the only worker; a test that fails beside it costs no process."""
    (tmp_path / "test_broken.py").write_text(BROKEN)
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    options = ["-p", "tests.gpu.fresh_context", "-p", "no:cacheprovider", "-n", "1", "-c", os.devnull]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, tmp_path / "test_broken.py"],
        cwd=gpu.ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "3 failed, 4 passed" in run.stdout, run.stdout  # test 2 failed, and again as what its worker ended in
    assert set(re.findall(r"worker '(\w+)' crashed", run.stdout)) == {
        "gw0"
    }  # once or twice: the summary's lines are long
    assert "test_it[2]" in run.stdout.partition("crashed while running")[2].splitlines()[0]

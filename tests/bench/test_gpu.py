"""`make gpu` without a GPU: its parts add up, and a case that ends or hangs costs one case and is named."""

import sys

import pytest

from bench import gpu
from bench.harness.watch import CEILINGS
from bench.ops import OPS

FAKE = """
import pathlib, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
progress, after = pathlib.Path(options["--progress-file"]), options.get("--after")
"""
DIES_ONCE = """
if after is None:
    progress.write_text("gemm 8x8x8 NT bf16\\namp_kernels, check\\n")
    sys.exit(1)
assert after == "gemm 8x8x8 NT bf16"
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("sys.exit(1)", ["FAILED (exit 1)"]),  # wrong results: no reason to run again
        (DIES_ONCE, ["FAILED (exit 1) in gemm 8x8x8 NT bf16, amp_kernels, check", "passed"]),
        (f"progress.write_text({CEILINGS!r}); sys.exit(3)", [f"FAILED (exit 3) in {CEILINGS}"]),
        ("progress.write_text('always'); sys.exit(3)", ["FAILED (exit 3) in always"] * 2),
    ],
    ids=["wrong", "continues after a case that ends the process", "no ceilings", "the same case again"],
)
def test_a_part_is_run_again_behind_the_case_that_ended_it(tmp_path, script, expected):
    (tmp_path / "fake.py").write_text(FAKE + script)
    outcomes = gpu.bench("some", [sys.executable, tmp_path / "fake.py"], 60, tmp_path)
    assert [(name, outcome) for name, outcome, _ in outcomes] == [("benchmarks: some", end) for end in expected]


def test_a_process_that_hangs_is_ended():
    assert gpu.run("late", [sys.executable, "-c", "import time; time.sleep(10_000)"], 1.0)[1] == "HUNG for 1 s"
    assert gpu.run("late", [sys.executable, "-c", ""], -1.0)[1] == "NOT RUN: no time left"


def test_a_part_and_the_build_take_nine_minutes_at_most_and_every_benchmark_is_in_one(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(gpu, "bench", lambda name, command, seconds, results: ran.append(command) or [])
    for part in gpu.parts():
        assert part.seconds + gpu.BUILD_SECONDS <= gpu.MOST_SECONDS == 540
        if part.name in ("products", "step", "ops"):
            part.run(tmp_path, part.seconds, False)
    ops = [op for command in ran for op in command[command.index("--op") + 1].split(",")]
    assert sorted([*ops, "adamw"]) == sorted(OPS)  # the step times adamw_ too


def test_a_run_that_was_cut_is_resumed_behind_what_passed(tmp_path, monkeypatch):
    ends, ran = {"tests": "passed", "products": "HUNG for 9 s"}, []

    def part(name):
        return gpu.Part(name, 100, lambda *arguments: ran.append(name) or [(name, ends[name], 1.0)])

    def outcomes(commit, *arguments):
        ran.clear()
        monkeypatch.setattr(gpu.environment, "commit", lambda: commit)
        found = gpu.run_parts([part(name) for name in ends], tmp_path, gpu.parse(list(arguments)))
        return [outcome for _, outcome, _ in found]

    (tmp_path / "rows.jsonl").write_text("of an earlier run")
    assert outcomes("c0ffee", "--seconds", "250") == list(ends.values())
    assert not (tmp_path / "rows.jsonl").exists()
    assert outcomes("c0ffee", "--resume") == list(ends.values())
    assert ran == ["products"]
    outcomes("another", "--resume")
    assert ran == list(ends)


def test_every_folder_with_gpu_tests_is_run():
    folders = [gpu.ROOT / folder for folder in gpu.TESTS]
    marked = [path for path in (gpu.ROOT / "tests").rglob("*/*.py") if "pytest.mark." + "gpu" in path.read_text()]
    assert {path.parent for path in marked} == set(folders)

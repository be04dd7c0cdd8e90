"""`make gpu` without a GPU: its parts add up, and a case that ends or hangs costs one case and is named."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from amp_kernels._dispatch.library import REGISTRY
from bench import gpt2, gpu, resnet, run
from bench.harness.watch import CEILINGS
from bench.ops import OPS

from ..gpu.test_ops import CASES
from ..gpu.test_ops import test_backend_equals_the_reference as TEST

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


def test_a_process_that_hangs_is_ended_with_those_that_it_started(tmp_path):
    assert gpu.run("late", ["sh", "-c", f"sleep 10000 & echo $! > {tmp_path / 'pid'}; wait"], 3.0)[1] == "HUNG for 3 s"
    state = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    while state.exists() and state.read_text().split()[2] != "Z":  # killed, but nobody has asked for its status
        pass
    assert gpu.run("late", [sys.executable, "-c", "import time; time.sleep(10_000)"], 1.0)[1] == "HUNG for 1 s"
    assert gpu.run("late", [sys.executable, "-c", ""], -1.0)[1] == "NOT RUN: no time left"


def test_a_part_and_the_build_take_nine_minutes_at_most_and_every_benchmark_is_in_one(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(gpu, "bench", lambda name, command, *rest: ran.append(command) or [])
    for part in gpu.parts():
        assert part.seconds + gpu.BUILD_SECONDS <= gpu.MOST_SECONDS == 540
        if part.name in ("products", "step", "adapters", "ops"):
            part.run(tmp_path, part.seconds, False)
    ops = [op for command in ran for op in command[command.index("--op") + 1].split(",")]
    assert sorted([*ops, "adamw"]) == sorted(OPS)  # the step times adamw_ too


PARSERS = {"bench.gpt2": gpt2.parse, "bench.resnet": resnet.parse}


def test_the_first_ten_minutes(tmp_path, monkeypatch):
    """Its commands parse, choose cases and name tests; each is one that --resume knows by its name."""
    commands = []

    def note(name, command, seconds, *rest):
        commands.append([str(word) for word in command[2:]])
        return (name, "passed", seconds)

    monkeypatch.setattr(gpu, "run", note)
    monkeypatch.setattr(gpu, "bench", lambda *arguments: [note(*arguments)])
    options = gpu.parse(["--part", "first"])
    outcomes = gpu.run_parts(gpu.first(), tmp_path, options)
    limits = {part.name: part.seconds for part in gpu.first()}
    assert [(name, seconds) for name, _, seconds in outcomes] == list(limits.items())
    assert options.part == list(limits)
    assert gpu.BUILD_SECONDS + sum(limits.values()) <= 600
    for module, *arguments in commands:
        if module == "pytest":
            assert {name for name, _ in CASES} == {name for name, op in REGISTRY.items() if not op.composite}
            assert arguments[0].endswith("::" + TEST.__name__)
        elif module == "bench.run":
            chosen = run.parse([*arguments, "--floor", "H200"])  # the cases of a GPU
            cases = list(run.select(chosen))
            assert {case.op for case in cases} - {"gemm_accumulate_"} == set(chosen.op)
            assert any(run.rows.TRITON in case.providers for case in cases) == ("--no-triton" not in arguments)
        else:
            PARSERS[module]([*arguments, "--device", "cpu"])


def test_the_page_says_what_each_of_the_first_parts_decides():
    page = (gpu.ROOT / "docs/gpu.md").read_text().partition("## The first ten minutes")[2]
    named = re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    assert sorted(named) == sorted(name for name, *_ in gpu.FIRST)


def test_outcomes_are_kept_by_op(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('name', ['gemm-cuda', 'norm_forward', 'other'])\n"
        "def test(name):\n    assert name != 'norm_forward'\n"
    )
    options = ["-p", "no:cacheprovider", "-p", "tests.gpu.outcomes", "--outcomes", tmp_path / "outcomes.jsonl"]
    command = [sys.executable, "-m", "pytest", "-q", *options, tmp_path / "test_some.py"]
    assert subprocess.run([str(word) for word in command], cwd=gpu.ROOT, capture_output=True).returncode == 1
    found = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert [(row["op"], row["passed"]) for row in found] == [("gemm", True), ("norm_forward", False), (None, True)]
    assert all(row["chip"] for row in found)


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

"""`make gpu ARGS="--part first"` without a GPU: each part's command runs to its end on a fake GPU that computes nothing (docs/ptx.md)."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from bench import gpt2, gpu, run
from bench.harness.rows import KEY

from ..helpers.patience import PATIENCE
from .build import ROOT
from .run import environment
from .test_ptx import pytestmark  # noqa: F401

FILES = {"bench.run": "rows.jsonl", "bench.gpt2": "gpt2.jsonl", "bench.resnet": "resnet.jsonl"}
FILES["pytest"] = "../../outcomes.jsonl"
KEYS = {"bench.run": KEY, "pytest": ("op",)}
OURS_TOO = ("torch", "amp_kernels")
LONG = {"step", "step-no-overlap", "fp16-products", "others"}  # a minute or more
RESUMED = ("smoke", "fp16-layers")
PARTS = {name: (seconds, *how) for name, seconds, *how in gpu.FIRST}


def started(results, *parts, ends_in=None, resume=False) -> tuple[int, str]:
    """Exit status and output of these parts; the process is killed with the case `ends_in`."""
    command = [sys.executable, "-m", "tests.ptx.dry_gpu", "bench.gpu", *["--resume"] * resume]
    command += ["--part", ",".join(f"first/{name}" for name in parts)]
    env = environment() | {"RESULTS": str(results)} | ({"DRY_ENDS_IN": ends_in} if ends_in else {})
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE)
    logs = [path.read_text() for path in sorted(results.rglob("log.txt"))]
    return done.returncode, "\n".join([done.stdout, done.stderr, *logs])


def rows_of(results, name) -> list[dict]:
    path = results / "first" / name / FILES[PARTS[name][1][0]]
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def asked_for(name) -> list[tuple]:
    """What the rows of a part are of, by the options of its command."""
    _, (module, words), _ = PARTS[name]
    if module == "pytest":
        return [("column_sums",)]
    if module == "bench.run":
        options = run.parse([*shlex.split(words), "--floor", "H200", "--quick"])
        rows = [(case.op, case.shape, case.dtype, name) for case in run.select(options) for name in case.providers]
        return [row for row in rows if options.provider is None or row[3].split(":")[0] in options.provider]
    if module == "bench.gpt2":
        options = gpt2.parse([*shlex.split(words), "--device", "cpu"])
        return [(dtype, provider) for dtype in options.dtype for provider in options.provider]
    return [("fp32", "torch"), ("tf32", "torch"), *((dtype, name) for dtype in ("bf16", "fp16") for name in OURS_TOO)]


def check(results, name, said) -> None:
    rows = rows_of(results, name)
    keys = KEYS.get(PARTS[name][1][0], ("dtype", "provider"))
    assert [tuple(row[key] for key in keys) for row in rows] == asked_for(name), said[-6000:]
    assert all(row.get("status", "ok") == "ok" and row.get("passed", True) and row["commit"] for row in rows), rows
    told = json.loads((results / "parts.json").read_text())[f"first/{name}"]["outcomes"]
    assert [outcome for _, outcome, _ in told] == ["passed"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in LONG else []) for name in PARTS if name not in RESUMED],
)
def test_a_part_runs_and_writes_its_rows(name, tmp_path):
    status, said = started(tmp_path, name)
    assert status == 0, said[-6000:]
    check(tmp_path, name, said)
    assert f"first/{name}" in (tmp_path / "summary.txt").read_text()
    overlap = max(map(int, re.findall(r"launches that may overlap: (\d+)", said)))
    ours = any("amp_kernels" in row["provider"] for row in rows_of(tmp_path, name))
    assert (overlap > 0) == (ours and PARTS[name][2] != gpu.NO_OVERLAP), overlap
    if "--profile" in PARTS[name][1][1]:
        assert said.count(": microseconds of a step") == len(rows_of(tmp_path, name))


def test_a_run_that_is_cut_goes_on_where_it_was(tmp_path):
    """The machine goes away in the second case of the second part. What has passed and what has rows is not run again."""
    smoke, cut = RESUMED
    _, second, *_ = dict.fromkeys(" ".join(row[:3]) for row in asked_for(cut))
    status, said = started(tmp_path, *RESUMED, ends_in=second)
    assert status == -9, said[-6000:]
    check(tmp_path, smoke, said)
    earlier = rows_of(tmp_path, cut)
    status, said = started(tmp_path, *RESUMED, resume=True)
    assert status == 0, said[-6000:]
    check(tmp_path, smoke, said)  # once
    check(tmp_path, cut, said)
    assert earlier
    assert rows_of(tmp_path, cut)[: len(earlier)] == earlier

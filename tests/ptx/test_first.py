"""`make gpu ARGS="--part first"` without a GPU: each part's command runs to its end on a fake GPU that computes nothing (docs/ptx.md)."""

import itertools
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
LONG = {"step", "step-no-overlap", "fp16-products", "others"}  # exhaustive
RESUMED = ("smoke", "fp16-layers")
PARTS = {name: how for name, _, *how in gpu.FIRST}


def started(results, *parts, ends_in="", resume=False) -> tuple[int, str]:
    """Exit status and output of these parts; the process is killed with the case `ends_in`."""
    command = [sys.executable, "-m", "tests.ptx.dry_gpu", "bench.gpu", *["--resume"] * resume]
    command += ["--part", ",".join(f"first/{name}" for name in parts)]
    env = environment() | {"RESULTS": str(results), "DRY_ENDS_IN": ends_in}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, "\n".join([done.stdout, done.stderr, *(p.read_text() for p in results.rglob("log.txt"))])


def rows_of(results, name) -> list[dict]:
    path = results / "first" / name / FILES.get(PARTS[name][0][0], "../../outcomes.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked_for(name) -> list[tuple]:
    """The keys of a part's rows, by the options of its command."""
    (module, options), _ = PARTS[name]
    words = shlex.split(options)
    if module == "bench.run":
        options = run.parse([*words, "--floor", "H200", "--quick"])
        rows = [(case.op, case.shape, case.dtype, name) for case in run.select(options) for name in case.providers]
        return [row for row in rows if options.provider is None or row[3].split(":")[0] in options.provider]
    if module == "bench.gpt2":
        options = gpt2.parse([*words, "--device", "cpu"])
        return list(itertools.product(options.dtype, options.provider))
    both = itertools.product(("bf16", "fp16"), ("torch", "amp_kernels"))
    return [("column_sums",)] if module == "pytest" else [("fp32", "torch"), ("tf32", "torch"), *both]


def check(results, name, status, said) -> None:
    assert status == 0, said[-6000:]
    rows = rows_of(results, name)
    assert [tuple(row[key] for key in KEY if key in row) for row in rows] == asked_for(name)
    assert all(row.get("status", "ok") == "ok" and row.get("passed", True) and row["commit"] for row in rows), rows
    assert re.search(f"first/{name} +passed", (results / "summary.txt").read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n in LONG)) for n in PARTS if n not in RESUMED]
)
def test_a_part_runs_and_writes_its_rows(name, tmp_path):
    status, said = started(tmp_path, name)
    check(tmp_path, name, status, said)
    (_, options), env = PARTS[name]
    overlap = max(map(int, re.findall(r"launches that may overlap: (\d+)", said)))
    ours = any("amp_kernels" in row["provider"] for row in rows_of(tmp_path, name))
    assert (overlap > 0) == (ours and env != gpu.NO_OVERLAP), overlap
    assert said.count(": microseconds of a step") == len(rows_of(tmp_path, name)) * ("--profile" in options)


def test_a_run_that_is_cut_goes_on_where_it_was(tmp_path):
    """The machine goes away in the second case of the second part. What has passed and what has rows is not run again."""
    _, second, *_ = dict.fromkeys(" ".join(row[:3]) for row in asked_for(RESUMED[1]))
    status, said = started(tmp_path, *RESUMED, ends_in=second)
    assert status == -9, said[-6000:]
    earlier = [rows_of(tmp_path, name) for name in RESUMED]
    status, said = started(tmp_path, *RESUMED, resume=True)
    for name, rows in zip(RESUMED, earlier, strict=True):
        check(tmp_path, name, status, said)
        assert rows == rows_of(tmp_path, name)[: len(rows)] != []

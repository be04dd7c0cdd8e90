"""`make gpu ARGS="--part first"` without a GPU: each part's command runs to its end on a fake GPU that computes nothing (docs/ptx.md)."""

import json
import os
import subprocess
import sys

import pytest

from bench import gpu

from ..helpers.patience import PATIENCE
from .build import ROOT
from .run import environment
from .test_ptx import pytestmark  # noqa: F401

FILES = {"bench.run": "rows.jsonl", "bench.gpt2": "gpt2.jsonl", "bench.resnet": "resnet.jsonl"}


NOT_COVERED = {
    "resnet": "cuDNN's convolutions have no kernel for shapes alone; tests/bench/test_resnet.py runs it on a CPU"
}
LONG = {"step", "step-no-overlap", "fp16-layers", "others"}  # a minute or more


def parts() -> list:
    marks = {name: pytest.mark.exhaustive if name in LONG else [] for name, *_ in gpu.FIRST}
    return [
        pytest.param(name, command[0], id=name, marks=marks[name])
        for name, _, command, _ in gpu.FIRST
        if name not in NOT_COVERED
    ]


@pytest.mark.parametrize(("name", "module"), parts())
def test_a_part_runs_and_writes_its_rows(name, module, tmp_path):
    command = [sys.executable, "-m", "tests.ptx.dry_gpu", "bench.gpu", "--part", f"first/{name}"]
    env = environment() | {"RESULTS": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE)
    logs = "".join(path.read_text()[-4000:] for path in tmp_path.rglob("log.txt"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:] + logs
    told = json.loads((tmp_path / "parts.json").read_text())[f"first/{name}"]["outcomes"]
    assert [outcome for _, outcome, _ in told] == ["passed"]
    assert os.path.getsize(tmp_path / "summary.txt")
    written = tmp_path / "first" / name / FILES[module] if module in FILES else tmp_path / "outcomes.jsonl"
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    assert rows
    assert all(row.get("status", "ok") == "ok" and row.get("passed", True) for row in rows), rows

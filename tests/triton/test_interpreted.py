"""Runs each interpreted_*.py in a process of its own: Triton chooses between compiler and interpreter at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_kernels.testing.patience import PATIENCE

FOLDER = Path(__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("interpreted_*.py"))


def test_there_are_files():
    assert FILES


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_interpreted(name):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FOLDER / name)]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout, run.stdout

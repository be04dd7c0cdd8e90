"""Runs the interpreted_*.py in processes of their own: Triton chooses between compiler and interpreter at import.

A process takes several seconds before its first test, so each runs a quarter of the files.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_kernels.testing.patience import PATIENCE

FOLDER = Path(__file__).parent
FILES = sorted(map(str, FOLDER.glob("interpreted_*.py")))
PROCESSES = 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PROCESSES))
def test_interpreted(part):
    files = FILES[part::PROCESSES]
    assert files
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout, run.stdout

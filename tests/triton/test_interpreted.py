"""Runs the interpreted_*.py in one process of their own: Triton chooses between compiler and interpreter at import, and a process
takes several seconds before its first test. One file alone: ``TRITON_INTERPRET=1 python -m pytest tests/triton/interpreted_X.py``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers.patience import PATIENCE

FILES = sorted(map(str, Path(__file__).parent.glob("interpreted_*.py")))


def passed(*options: str) -> int:
    assert FILES
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *FILES]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert not re.search(r"\d skipped", run.stdout), run.stdout
    return int(re.search(r"(\d+) passed", run.stdout)[1])


@pytest.mark.slow
def test_one_in_twelve():
    assert passed("--sample", "12") > 45


@pytest.mark.exhaustive
def test_interpreted():
    assert passed() > 600

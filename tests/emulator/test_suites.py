"""The tests of optimizers and scaler once more, with every op on the emulator: states, tables, lists and skips as users make
them, through the host code of the CUDA ops."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers.patience import PATIENCE

ROOT = Path(__file__).parents[2]
SHORT = "not thousand_steps and not rank"  # those take minutes on the emulator, or processes of their own


def passed(*options) -> int:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--backend", "emulate", "-k", SHORT, *options]
    command += ["-m", "not gpu and not own_backend", "tests/optim", "tests/amp"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stdout[-6000:]
    return int(re.search(r"(\d+) passed", run.stdout)[1])


@pytest.mark.slow
def test_one_in_a_hundred_of_optimizers_and_scaler_on_the_emulator():
    assert passed("--sample", "100") > 10


@pytest.mark.exhaustive
def test_optimizers_and_scaler_on_the_emulator():
    assert passed() > 1300

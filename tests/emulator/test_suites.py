"""The tests of optimizers and scaler once more, with every op on the emulator: states, tables, lists and skips as users make
them, through the host code of the CUDA ops."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHORT = "not thousand_steps and not rank"  # those take minutes on the emulator, or processes of their own


def test_optimizers_and_scaler_on_the_emulator():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--backend", "emulate", "-k", SHORT]
    command += ["-m", "not gpu and not own_backend", "tests/optim", "tests/amp"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-6000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 500

"""The stub of the compiled module says what is in it: names, arguments, defaults."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_stub_is_that_of_the_module():
    command = [
        sys.executable,
        "-m",
        "mypy.stubtest",
        "--mypy-config-file",
        ROOT / "pyproject.toml",
        "amp_kernels._host",
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]

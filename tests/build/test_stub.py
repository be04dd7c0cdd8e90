"""The stub of the compiled module says what is in it: names, arguments, defaults."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_stub_is_that_of_the_module(tmp_path):
    """Both without the package, of which mypy would read all that it imports."""
    for file in (ROOT / "amp_kernels").glob("_host.*"):
        shutil.copy(file, tmp_path)
    command = [sys.executable, "-m", "mypy.stubtest", "--mypy-config-file", ROOT / "pyproject.toml", "_host"]
    at = {**os.environ, "MYPYPATH": str(tmp_path)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=at)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]

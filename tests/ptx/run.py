"""Runs pytest on executed_*.py in a process in which the fake CUDA runtime stands in for libcudart.

python -m tests.ptx.run                    all cases; further arguments go to pytest
python -m tests.ptx.run --ptx-seeds 20     with more schedules
"""

import os
import subprocess
import sys
from pathlib import Path

from .build import build

FOLDER = Path(__file__).parent


def environment() -> dict[str, str]:
    """Environment of a process that runs on the interpreter."""
    runtime, library = build()
    paths = [str(runtime.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    added = {
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": os.pathsep.join(paths),  # torch opens libcuda.so.1
        "AK_PTX_LIBRARY": str(library),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # every tensor is an allocation of its own, with bounds
    }
    return os.environ | added


def main() -> int:
    arguments = sys.argv[1:]
    if not any(a.endswith(".py") or "::" in a or a.startswith("tests") for a in arguments):
        arguments += map(str, sorted(FOLDER.glob("executed_*.py")))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.ptx.plugin",
        "--progress-every",
        "10",
        *arguments,
    ]
    return subprocess.run(command, env=environment(), cwd=FOLDER.parents[1]).returncode


if __name__ == "__main__":
    sys.exit(main())

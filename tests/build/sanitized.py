"""The package with a CPU library that stops at undefined behaviour: gcc's sanitizer, with the assertions of the standard library.

    python -m tests.build.sanitized build/sanitized -m pytest -p amp_kernels tests/ops/test_gemm.py

builds it in a folder and runs a command of the interpreter under it. A report ends the command with exit code 1 or a signal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import amp_kernels

from ..helpers.patience import PATIENCE

ROOT = Path(__file__).parents[2]
LIBRARY = "libamp_kernels_cpu.so"
# gcc takes the last level of optimization. Not vptr: torch's libraries hide their types.
FLAGS = "-O1 -fsanitize=undefined,bounds-strict -fno-sanitize=vptr -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS"
ONE_WIDTH = ROOT / "tests" / "build" / "one_width.h"


def build(folder: Path) -> None:
    """A copy of the package in ``folder`` with that library, and what ``python -m tests...`` needs."""
    cmake = [
        "cmake", "-S", ROOT, "-B", folder / "build", "-G", "Ninja", f"-DTORCH_ROOT={Path(torch.__file__).parent}",
        "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_CXX_FLAGS_RELEASE={FLAGS} -include {ONE_WIDTH}",
    ]  # fmt: skip
    if shutil.which("ccache"):
        cmake.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    for command in (cmake, ["cmake", "--build", folder / "build", "--target", "amp_kernels_cpu"]):
        step = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert step.returncode == 0, step.stdout + step.stderr
    package = Path(amp_kernels.__file__).parent
    for path in package.rglob("*"):
        if path.suffix in (".py", ".json") or path.name.startswith("_host."):
            link(path, folder / "amp_kernels" / path.relative_to(package))
    link(folder / "build" / LIBRARY, folder / "amp_kernels" / LIBRARY)
    link(ROOT / "tests", folder / "tests")


def link(path: Path, at: Path) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.unlink(missing_ok=True)
    at.symlink_to(path)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """``python arguments`` with the package that :func:`build` left in ``folder``. pytest needs ``-p amp_kernels``."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
    result = run(Path(sys.argv[1]).resolve(), *sys.argv[2:])
    sys.exit(f"{result.stdout}{result.stderr}" if result.returncode else 0)

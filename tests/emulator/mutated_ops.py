"""A pytest file against a library of ops with a bug in its sources: host code of the CUDA ops in the emulated library, or CPU kernels.

The build folder of the package knows how each object is compiled and which headers it reads; only the objects that read the
changed file are compiled again, with little optimisation, and linked with the others. The tests run in a copy of the package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"emulator": "amp_kernels_emulated", "ops": "amp_kernels_cpu"}  # by the folder of the tests
# An environment's own ninja counts, also where it was not activated.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@cache
def build_folder() -> Path:
    folders = sorted((ROOT / "build").glob("cmake-*/libamp_kernels_emulated.so"), key=lambda path: path.stat().st_mtime)
    if not folders:
        sys.exit("the emulated library is not built (make build)")
    return folders[-1].parent


def ninja(*arguments: str) -> list[str]:
    command = ["ninja", "-C", str(build_folder()), "-t", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": PATH}
    ).stdout.splitlines()


@cache
def commands(target: str) -> dict[str, str]:
    """The command of each object and of the library."""
    found = {}
    for line in ninja("commands", target):
        output = re.search(r" -o (\S+)", line)
        if output:
            found[output[1]] = line
    return found


@cache
def objects_of(target: str, file: str) -> list[str]:
    """The objects of the library that read ``file``, a path under csrc/."""
    readers, current = [], ""
    for line in ninja("deps"):
        if line and not line[0].isspace():
            current = line.split(":")[0]
        elif line.endswith(f"csrc/{file}") and current.startswith(f"CMakeFiles/{target}.dir/"):
            readers.append(current)
    return readers


def copy_package(library_name: str, folder: Path) -> None:
    """The package and what its tests need, without this library."""
    shutil.copytree(ROOT / "amp_kernels", folder / "amp_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for library in (ROOT / "amp_kernels").glob("*.so"):
        if library.name != library_name:
            (folder / "amp_kernels" / library.name).symlink_to(library)
    (folder / "tests").mkdir()
    for file in ("pyproject.toml", "tests/conftest.py", "tests/draw.py", "tests/progress.py"):
        shutil.copy(ROOT / file, folder / file)


def build(target: str, file: str | None, sources: Path, folder: Path) -> str:
    """Makes the library from ``sources``, of which ``file`` has changed; "" or the compiler's message."""
    library = f"lib{target}.so"
    link = commands(target)[library].replace(f" -o {library}", f" -o {folder / 'amp_kernels' / library}")
    steps = []
    for i, output in enumerate(objects_of(target, file) if file else []):
        command = commands(target)[output].replace(str(ROOT / "csrc"), str(sources))
        command = command.replace(
            "-O3", "-O0" if target == "amp_kernels_emulated" else "-O1"
        )  # CPU kernels have more to do
        command = re.sub(r" -M[FT] \S+| -MD", "", command).replace(f" -o {output}", f" -o {folder / f'{i}.o'}")
        link = link.replace(f" {output} ", f" {folder / f'{i}.o'} ")
        steps.append(command)
    for command in (*steps, link):
        step = subprocess.run(command, shell=True, cwd=build_folder(), capture_output=True, text=True)
        if step.returncode:
            errors = [line for line in step.stderr.splitlines() if "error" in line]
            return (errors or ["the compiler said nothing"])[0]
    return ""


def build_and_run(test: str, file: str | None, sources: Path, folder: Path, limited: Callable) -> tuple[str, str]:
    """("caught", the first failure), ("missed", "") or ("broken", the compiler's message). ``limited`` bounds a command's time."""
    room = test.split("/")[0]
    copy_package(f"lib{TARGETS[room]}.so", folder)
    shutil.copytree(ROOT / "tests" / room, folder / "tests" / room, ignore=shutil.ignore_patterns("*.cpp", "*.h"))
    error = build(TARGETS[room], file, sources, folder)
    if error:
        return "broken", error
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{test}"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    run = subprocess.run(limited(command), cwd=folder, capture_output=True, text=True, env=environment)
    if run.returncode == 0:
        return "missed", ""
    lines = [line for line in run.stdout.splitlines() if line.startswith(("E  ", "FAILED", "ERROR"))]
    return "caught", (lines or [f"pytest ends with code {run.returncode}"])[0]

"""Pytest files against a library with a bug in its sources: host code of the CUDA ops in the emulated library, CPU kernels, or formulas
in _host.

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
# By the folder of the tests, what is built and how much it is optimised: the tests of CPU kernels have more to do. "emulate/ops" are those
# of ops on the emulator.
TARGETS = {
    "emulator": ("amp_kernels_emulated", "-O0"),
    "emulate": ("amp_kernels_emulated", "-O0"),
    "ops": ("amp_kernels_cpu", "-O1"),
    "math": ("_host", "-O1"),
}
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


def library_of(target: str) -> str:
    return next(output for output in commands(target) if output.endswith(".so") and target in output)


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
    """The package without this library, and the tests."""
    shutil.copytree(ROOT / "amp_kernels", folder / "amp_kernels", ignore=shutil.ignore_patterns("*.so"))
    for library in (ROOT / "amp_kernels").glob("*.so"):
        if library.name != library_name:
            (folder / "amp_kernels" / library.name).symlink_to(library)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("*.cpp", "*.h"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def run(command: str) -> str:
    """ "" or the compiler's message."""
    step = subprocess.run(command, shell=True, cwd=build_folder(), capture_output=True, text=True)
    errors = [line for line in step.stderr.splitlines() if "error" in line] or ["the compiler said nothing"]
    return errors[0] if step.returncode else ""


def compiling(target: str, output: str, optimisation: str, file: str, folder: Path, to: Path) -> str:
    """The command that makes an object, with ``file`` from ``folder`` in place of csrc/ where it is there."""
    command = commands(target)[output].replace(f"-I{ROOT / 'csrc'}", f"-I{folder} -I{ROOT / 'csrc'}")
    if (folder / file).exists():
        command = command.replace(str(ROOT / "csrc" / file), str(folder / file))
    return re.sub(r" -M[FT] \S+| -MD", "", command.replace("-O3", optimisation)).replace(f" -o {output}", f" -o {to}")


def build(target: str, optimisation: str, file: str | None, folder: Path) -> str:
    """Makes the library; ``file``, if any, is taken from ``folder`` in place of csrc/. "" or the compiler's message."""
    library = library_of(target)
    link = commands(target)[library].replace(f" -o {library}", f" -o {folder / 'amp_kernels' / library}")
    steps = []
    for i, output in enumerate(objects_of(target, file) if file else []):
        steps.append(compiling(target, output, optimisation, file, folder, folder / f"{i}.o"))
        link = link.replace(f" {output} ", f" {folder / f'{i}.o'} ")
    return next(filter(None, map(run, (*steps, link))), "")


def same_code(test: str, file: str, folder: Path) -> bool:
    """True if the changed file in ``folder`` makes the objects of the test's library as they were, optimised."""
    target, _ = TARGETS[test.split("/")[0]]
    results = folder / "with.o", folder / "without.o"
    for output in objects_of(target, file):
        for result, source in zip(results, (folder, folder / "none"), strict=True):
            run(compiling(target, output, "-O1", file, source, result))
        if results[0].read_bytes() != results[1].read_bytes():
            return False
    return True


def build_and_run(tests: list[str], file: str | None, folder: Path, limited: Callable) -> tuple[str, str]:
    """("caught", the first failure), ("missed", "") or ("broken", the compiler's message). ``folder`` has the changed file; ``limited``
    bounds a command's time."""
    target, optimisation = TARGETS[tests[0].split("/")[0]]
    copy_package(library_of(target), folder)
    error = build(target, optimisation, file, folder)
    if error:
        return "broken", error
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        # Tests of the folder itself name no backend.
        *(["-k", "emulate or emulator"] if tests[0].startswith("emulate/") else []),
        *(f"tests/{test.removeprefix('emulate/')}" for test in tests),
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    tested = subprocess.run(limited(command, 300), cwd=folder, capture_output=True, text=True, env=environment)
    if tested.returncode == 0:
        return "missed", ""
    if 2 <= tested.returncode <= 5:
        raise RuntimeError(f"pytest has not run the tests: {(tested.stdout + tested.stderr)[-2000:]}")
    lines = [line for line in tested.stdout.splitlines() if line.startswith(("E  ", "FAILED", "ERROR"))]
    return "caught", (lines or [f"pytest ends with code {tested.returncode}"])[0]

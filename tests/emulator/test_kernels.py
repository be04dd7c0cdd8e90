"""Builds and runs the C++ tests of every kernel on the emulator, and the emulator's own (tools/emulator/tests).

Needs a C++20 compiler, no CUDA. A failure prints the seed to replay it with: ``build/emulator/test_X --seed N``.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from ..helpers.processes import python, run
from . import families

HERE = Path(__file__).parent
# An environment's own cmake and ninja count, also where it was not activated.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
BUILD = HERE.parents[1] / "build" / "emulator"
OWN = HERE.parents[1] / "tools" / "emulator" / "tests"
TESTS = sorted(path.stem for folder in (HERE, OWN) for path in folder.glob("test_*.cpp"))


@pytest.fixture(scope="session")
def programs(request) -> Path:
    """The compiled programs of the tests that run."""
    for tool in ("cmake", "ninja"):
        assert shutil.which(tool, path=PATH), f"{tool} was not found (pip install cmake ninja)"
    here = (item for item in request.session.items if item.path == Path(__file__) and "programs" in item.fixturenames)
    needed = {item.callspec.params["test"] for item in here}
    run("cmake", "-S", HERE, "-B", BUILD, "-G", "Ninja", PATH=PATH)
    run("cmake", "--build", BUILD, "--target", *needed, PATH=PATH)
    return BUILD


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
def test_on_emulator(programs: Path, test: str):
    run(programs / test)


@pytest.mark.exhaustive
@pytest.mark.parametrize("test", TESTS)
def test_under_all_seeds(programs: Path, test: str):
    run(programs / test, "all")


@pytest.mark.exhaustive
@pytest.mark.parametrize("test", ["test_grouped_schedules"])
def test_no_schedule_of_grouped_products_hangs(programs: Path, test: str):
    run(programs / test, 100)


def test_every_kernel_is_tested():
    """A kernel that cannot run on the emulator is not finished: a program here includes it, or its family is that of an op's tests."""
    sources = "".join(path.read_text() for path in HERE.glob("*.[ch]*"))
    with_ops = [path for path, tests in families.FAMILIES.values() if "emulate/" in tests]
    csrc = HERE.parents[1] / "csrc"
    for kernel in csrc.rglob("*.cu"):
        text = kernel.read_text()
        # A file that only instantiates a header's kernel for one type is tested with the header.
        instances = re.search(r"^template Status \w+<", text, re.MULTILINE)
        only_instances = instances and "{" not in re.sub(r"namespace [\w:]+ {", "", text)
        header = re.search(r'#include ("[\w/]+\.cuh")', text) if only_instances else None
        name = header[1] if header else f'"{kernel.relative_to(csrc)}"'
        if not any(kernel.relative_to(csrc).match(pattern) for patterns in with_ops for pattern in patterns.split()):
            assert name in sources, f"no test includes {name}"


def test_no_planted_bug_is_stale():
    """Every trap quotes a line that is there, and every explained change is made; else ``make mutants`` ends before it begins."""
    assert " 0 places" not in python(HERE / "mutate.py", "--list").stdout

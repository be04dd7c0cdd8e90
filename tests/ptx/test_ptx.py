"""The PTX that nvcc makes of the kernels, executed: see docs/ptx.md. Needs nvcc and a CUDA build of torch, no GPU."""

import re
import shutil

import pytest
import torch

from tools.ptx.sources import sources_in

from ..helpers.processes import python
from .build import build
from .families import FAMILIES
from .forms import forms_of_words, opcodes
from .mutate import texts_of
from .operators import changes
from .traps import TRAPS

pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH: there is no PTX to execute"),
    pytest.mark.skipif(
        torch.version.cuda is None, reason="the installed torch is a CPU build: it has no CUDA device to stand in for"
    ),
    pytest.mark.slow,
]


HINTS = {"prefetch.tensormap", "griddepcontrol.launch_dependents"}  # which nothing but time depends on


def template(kernel: str) -> str:
    """The kernel's name in the source."""
    return re.match(r".*\d([a-z]\w*_kernel)[EI]", kernel)[1]


def executed(tmp_path, *options: str) -> set[str]:
    """The templates of the kernels that the cases start."""
    said = python("-m", "tests.ptx.run", "--kernels-file", tmp_path / "kernels", *options).stdout
    assert " passed" in said
    assert "skipped" not in said, said
    return {template(name) for name in (tmp_path / "kernels").read_text().split() if name.startswith("_Z")}


def shipped() -> set[str]:
    return {template(name) for source in sources_in(build()[1]) for name in source.kernels}


def test_executed(tmp_path):
    """One case in two of each test; all if the drawn ones leave out a kernel of the library, since the others may have it."""
    if executed(tmp_path, "--one-in", "2") != shipped():
        assert executed(tmp_path) == shipped()


def test_tests_that_want_a_gpu():
    """Two of those that `make ptx` runs."""
    chosen = "-m", "gpu", "-k", "plain and sum and dtype0", "tests/ops/test_cross_entropy.py::test_every_option"
    said = python("-m", "tests.ptx.run", *chosen).stdout
    assert "2 passed" in said, said


def test_planted_bugs():
    """`make ptx` tries them; a trap that kernels have left behind is noticed at once, and a word that no operator doubts."""
    sources = sources_in(build()[1])
    left, doubted, held = [], [], set()
    for name, family in FAMILIES.items():
        texts = texts_of(family, sources)
        held |= set(opcodes(texts))
        traps = TRAPS.get(name, [])
        doubted += [change.opcode for change in changes(texts)] + [trap.old.replace("\\", "") for trap in traps]
        left += [f"{name}: {trap.why}" for trap in traps if not any(trap.plant(text)[1] for text in texts)]
    assert not left, "these texts are in no kernel: " + "\n".join(left)
    words = {form for form in forms_of_words() - HINTS if any(op.startswith(form) for op in held)}
    assert len(words) > 40
    assert not {form for form in words if not any(form in text for text in doubted)}

"""The PTX that nvcc makes of the kernels, executed: see docs/ptx.md. Needs nvcc and a CUDA build of torch, no GPU."""

import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest
import torch

from tools.ptx.sources import sources_in

from ..helpers.patience import PATIENCE
from .build import ROOT, build
from .forms import forms_of_words, opcodes
from .mutate import NEEDED_SHARE, planted_lists

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
    command = [sys.executable, "-m", "tests.ptx.run", "--kernels-file", tmp_path / "kernels", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, (run.stdout + run.stderr)[-12000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout, run.stdout
    return {template(name) for name in (tmp_path / "kernels").read_text().split() if name.startswith("_Z")}


def shipped() -> set[str]:
    return {template(name) for source in sources_in(build()[1]) for name in source.kernels}


def test_executed(tmp_path):
    """One case in two of each test; all if the drawn ones leave out a kernel of the library, since the others may have it."""
    if executed(tmp_path, "--one-in", "2") != shipped():
        assert executed(tmp_path) == shipped()


def test_tests_that_want_a_gpu():
    """Two of those that `make ptx` runs."""
    command = [sys.executable, "-m", "tests.ptx.run", "-m", "gpu", "-k", "plain and sum and dtype0"]
    command.append("tests/ops/test_cross_entropy.py::test_every_option")
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, (run.stdout + run.stderr)[-12000:]
    assert "2 passed" in run.stdout, run.stdout


def test_planted_bugs():
    """`make ptx` tries them; a list that kernels have left behind is noticed at once, and a word that no list doubts."""
    sources = sources_in(build()[1])
    held = {text: set(opcodes([text])) for source in sources for text in source.kernels.values()}
    doubted, left = Counter(), []
    for name, module in planted_lists():
        some, others, found = [], [], set()  # some kernels that hold all forms between them
        for source in (s for s in sources if s.fits(module.CAPABILITY)):
            for kernel, text in source.kernels.items():
                if re.search(module.KERNEL, kernel):
                    (others if held[text] <= found else some).append(text)
                    found |= held[text]
        for number, mutant in enumerate(module.MUTANTS):
            changed = [text for text in some if mutant.plant(text)[0] != text]
            changed = changed or [next((text for text in others if mutant.plant(text)[0] != text), "")]
            if changed == [""]:
                left.append(f"{name} {number}: {mutant.why}: {mutant.old}")
            doubted.update(set().union(*(mutant.forms(text) for text in changed)))
    assert not left, "these texts are in no kernel: " + "\n".join(left)
    words = {
        form for form in forms_of_words() - HINTS if any(op.startswith(form) for ops in held.values() for op in ops)
    }
    counts = {form: sum(n for op, n in doubted.items() if op.startswith(form)) for form in sorted(words)}
    assert len(counts) > 40
    assert not {form: n for form, n in counts.items() if n < 2}


def test_the_docs_count_planted_bugs():
    lists = planted_lists()
    section = (ROOT / "docs/ptx.md").read_text().partition("## Planted bugs")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \| (\d+) \|$", section, re.MULTILINE)
    counts = {name: (len(m.MUTANTS), sum(not mutant.missed for mutant in m.MUTANTS)) for name, m in lists}
    assert {name: (int(planted), int(caught)) for name, planted, caught in rows} == counts
    planted = sum(planted for planted, _ in counts.values())
    assert f"{planted} in PTX (`make ptx`)" in (ROOT / "README.md").read_text()
    assert sum(caught for _, caught in counts.values()) >= NEEDED_SHARE * planted

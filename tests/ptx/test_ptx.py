"""The PTX that nvcc makes of the kernels, executed: see docs/ptx.md. Needs nvcc and a CUDA build of torch, no GPU."""

import re
import shutil
import subprocess
import sys

import pytest
import torch

from .build import CSRC, ROOT, build, compile_kernel
from .interpreter.instructions import find
from .interpreter.text import Module
from .mutate import planted_lists
from .sources import sources_in

pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH: there is no PTX to execute"),
    pytest.mark.skipif(
        torch.version.cuda is None, reason="the installed torch is a CPU build: it has no CUDA device to stand in for"
    ),
    pytest.mark.slow,
]


def test_executed():
    command = [sys.executable, "-m", "tests.ptx.run"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, (run.stdout + run.stderr)[-12000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout, run.stdout


def test_every_text_that_a_planted_bug_changes_is_there():
    """`make ptx` tries the bugs; a list that kernels have left behind is noticed at once."""
    sources, left = sources_in(build()[1]), []
    for name, module in planted_lists():
        texts = [s.kernels[k] for s in sources if s.fits(module.CAPABILITY) for k in s.kernels if module.KERNEL in k]
        for number, mutant in enumerate(module.MUTANTS):
            if not any(mutant.plant(text)[0] != text for text in texts):
                left.append(f"{name} {number}: {mutant.why}: {mutant.old}")
    assert not left, "these texts are in no kernel: " + "\n".join(left)


def forms(sources) -> dict[str, str]:
    """Opcodes with modifiers, each with one instruction that has it."""
    found = {}
    for source in sources:
        for name in source.kernels:
            for instruction in Module(source.text(name)).kernel(name).code:
                found.setdefault(instruction.op, instruction.text)
    return found


def missing(found: dict[str, str]) -> list[str]:
    return [text for op, text in found.items() if find(op) is None]


def test_every_form_of_the_vocabulary_has_a_meaning():
    """Each word of csrc/device, for every architecture of the package."""
    (ROOT / "build" / "ptx").mkdir(parents=True, exist_ok=True)
    objects = compile_kernel(ROOT / "tests/emulator/vocabulary.cu", ["75", "80", "90a", "120"])
    sources = sources_in(objects)
    assert {source.target for source in sources} == {"75", "80", "90a", "120"}
    found = forms(sources)
    assert len(found) > 100
    assert not missing(found)


def test_every_form_of_the_kernels_has_a_meaning():
    """Of all instances of all kernels that the cases can run. The opcodes are found by their shape: to parse all takes minutes."""
    found = opcodes(sources_in(build()[1]))
    assert len(found) > 200
    assert {op.split(".")[0] for op in found} >= {
        "wgmma",
        "mma",
        "ldmatrix",
        "mbarrier",
        "cp",
        "atom",
        "shfl",
        "griddepcontrol",
    }
    assert not missing(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["75", "80", "90a", "120"])
def test_every_form_of_every_architecture_has_a_meaning(arch):
    files = [
        f for f in (CSRC / "kernels").glob("*.cu") if "_sm90" not in f.stem and (arch != "75" or "_sm80" not in f.stem)
    ]
    for file in files:
        assert not missing(opcodes(sources_in(compile_kernel(file, [arch])))), file


def opcodes(sources) -> dict[str, str]:
    pattern = re.compile(r"^[ \t{]*(?:@!?%?\w+ )?([a-z][a-z0-9_]*(?:[.:][\w:.]+)?)[ \t;][^;\n]*", re.MULTILINE)
    return {m[1]: m[0] for source in sources for body in source.kernels.values() for m in pattern.finditer(body)}


def test_an_unknown_form_is_an_error_that_names_it():
    assert find("add.s32") is not None
    assert find("add.sat.s32") is None
    assert missing({"tcgen05.mma.x": "tcgen05.mma.x a, b"}) == ["tcgen05.mma.x a, b"]

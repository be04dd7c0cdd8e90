"""Every form of PTX that the package ships has a meaning in the interpreter, for every architecture it is compiled for. Triton's
output for sm_80 and sm_90 is counted where it is compiled: tests/triton/aot.py."""

import re

import pytest

from tools.ptx.interpreter.instructions import find
from tools.ptx.interpreter.text import Module
from tools.ptx.sources import sources_in

from .build import CSRC, ROOT, build, compile_kernel
from .forms import forms_of_words, missing, opcodes, unknown_registers
from .test_ptx import pytestmark  # noqa: F401

ARCHS = ("75", "80", "90a", "100", "120")


def kernels(binary) -> list[str]:
    return [text for source in sources_in(binary) for text in source.kernels.values()]


def test_these_are_the_architectures_of_the_package():
    default = re.search(r'AMP_KERNELS_CUDA_ARCHS "(.+?)"', (ROOT / "CMakeLists.txt").read_text())[1]
    assert [arch.removesuffix("+PTX").replace(".", "") for arch in default.split(";")] == list(ARCHS)


def test_forms_of_the_vocabulary():
    """Each word of csrc/device, for every architecture. Parsed, so that the forms that are found by their shape are all there are."""
    sources = sources_in(compile_kernel(ROOT / "tests/emulator/vocabulary.cu", [*ARCHS]))
    assert {source.target for source in sources} == set(ARCHS)
    parsed = {i.op for s in sources for name in s.kernels for i in Module(s.text(name)).kernel(name).code}
    found = opcodes(text for source in sources for text in source.kernels.values())
    assert set(found) | {"ret"} == parsed
    assert len(found) > 100
    assert not missing(found)
    assert not [form for form in forms_of_words() if not any(op.startswith(form) for op in found)]


def test_forms_of_the_library():
    """All instances of all kernels, as they ship for sm_80, sm_90a and, if the library was built for it, sm_120."""
    texts = kernels(build()[1])
    found = opcodes(texts)
    assert len(found) > 200
    families = {op.split(".")[0] for op in found}
    assert families >= {"wgmma", "mma", "ldmatrix", "mbarrier", "cp", "atom", "shfl", "griddepcontrol"}
    assert not missing(found)
    assert not unknown_registers(texts)


FILES = sorted(str(file.relative_to(CSRC)) for file in CSRC.rglob("*.cu") if not re.match(r"sm\d+$", file.parent.name))


@pytest.mark.parametrize(
    "file",
    [
        name if name in ("cast/cast.cu", "loss/cross_entropy.cu") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in FILES
    ],
)
def test_forms_of_turing(file):
    """sm_75 ships as machine code alone, so its PTX is not in the library. It has no bf16: conversions are arithmetic there."""
    texts = kernels(compile_kernel(CSRC / file, ["75"]))
    assert len(opcodes(texts)) > 20
    assert not [form for form in opcodes(texts) if "bf16" in form or form.startswith(("cp.async", "griddepcontrol"))]
    assert not missing(opcodes(texts))
    assert not unknown_registers(texts)


def test_an_unknown_form_is_an_error_that_names_it():
    assert find("add.s32") is not None
    assert find("add.sat.s32") is None
    text = (
        "\n{\n@%p1 tcgen05.mma.x a, b;\n@!p bra L; tcgen05.wait::ld.sync;\n}\nmov.u32 %r1, %clock;\nadd.s32 a, b, c;\n"
    )
    assert missing(opcodes([text])) == ["@%p1 tcgen05.mma.x a, b", "tcgen05.wait::ld.sync"]
    assert unknown_registers([text]) == {"clock"}

"""Instructions of a text, and those of them that come from csrc/device: for tests that count."""

import re
from collections.abc import Iterable

from tools.ptx.interpreter.block import SPECIAL
from tools.ptx.interpreter.instructions import find

from .build import CSRC

# An instruction begins a line, or follows another one, a brace or its guard.
INSTRUCTION = re.compile(r"(?:^|[;{}\n])[ \t]*(?:@!?%?\w+\s+)?([a-z][a-z0-9_]*(?:[.:][\w:.]+)?)(?=[ \t;])[^;\n]*")
SPECIAL_REGISTER = re.compile(
    r"%((?:n?tid|n?ctaid|n?clusterid|[a-z]+_[a-z]+|laneid|n?warpid|smid|clock|globaltimer)\b[.\w]*)"
)

# The compiler's own functions, as the beginning of a form.
INTRINSICS = {
    "__shfl_xor_sync": "shfl.sync.bfly",
    "__shfl_sync": "shfl.sync.idx",
    "__ballot_sync": "vote.sync.ballot",
    "__syncwarp": "bar.warp.sync",
    "__syncthreads()": "bar.sync",
    "atomicMax": "atom.global.max",
    "atomicAdd": "atom.global.add",
    "__ldcs": "ld.global.cs",
    "__stcs": "st.global.cs",
    '"wgmma.mma_async': "wgmma.mma_async",  # spelled out by macros
}


def opcodes(texts: Iterable[str]) -> dict[str, str]:
    """Opcodes with all modifiers, each with one instruction that has it. By their shape: to parse all kernels takes minutes."""
    return {m[1]: m[0].strip("{}; \t\n") for text in texts for m in INSTRUCTION.finditer(text)}


def missing(found: dict[str, str]) -> list[str]:
    """Instructions whose form has no meaning in the interpreter."""
    return [text for op, text in found.items() if find(op) is None]


def unknown_registers(texts: Iterable[str]) -> set[str]:
    return {m[1] for text in texts for m in SPECIAL_REGISTER.finditer(text)} - set(SPECIAL)


def forms_of_words() -> set[str]:
    """The words of csrc/device in PTX: forms, or their beginnings where a macro or the compiler completes them."""
    found = set()
    for file in (CSRC / "device").glob("*.cuh"):
        text = re.sub(r"//[^\n]*", "", file.read_text())
        for assembly in re.findall(r'asm(?: volatile)?\(\s*((?:"[^"]*"\s*)+)', text):
            found |= set(opcodes(["".join(re.findall(r'"([^"]*)"', assembly)).replace("\\n", "\n")]))
        found |= {form for call, form in INTRINSICS.items() if call in text}
    return found

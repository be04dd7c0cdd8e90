"""Wrong PTX that operators make, as if nvcc or csrc/device had said it: all instructions of one opcode in a kernel are changed alike."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..planting import Operator, exchanged
from .forms import INSTRUCTION, opcodes

REGISTER = r"%[a-z]+\d+"
TYPES = exchanged((".f16", ".bf16"))
ARITHMETIC = exchanged(("add", "sub"), ("min", "max"), ("shl", "shr")) | {"and": "or", "or": "and", "xor": "or"}
FUNCTIONS = r"^(?:@\S+\s+)?(?:sqrt|ex2|rcp|rsqrt|neg\.f|abs\.f|cvt\.f64)\S*(?= )"
INDEX = r"^((?:@\S+\s+)?(?:add|sub|mul|mad|shl|setp)\S* .*, )"  # what addresses and bounds are made with

# Name, pattern in one instruction, and the text in its place or a table of such texts.
OPERATORS: list[Operator] = [
    ("left out", r"^(?:@\S+\s+)?(?:bar|barrier|fence|membar|griddepcontrol|st|red|cp|wgmma|stmatrix)\b.*;", ";"),
    ("left out", r"^(?:@\S+\s+)?mbarrier\.(?:init|arrive).*;", ";"),
    ("no memory order", r"\.(?:acq_rel|acquire|release)(?=\.)", ".relaxed"),
    ("another guard", r"^@(?=[%\w])", "@!"),
    ("16 bytes further", rf"^((?!atom\S*\.inc).*)\[({REGISTER})\]", r"\1[\2+16]"),
    ("further", r"\+(\d+)\]", r"+1\1]"),
    ("another immediate", INDEX + r"(\d+);", r"\g<1>1\2;"),
    ("registers of a vector exchanged", rf"\{{({REGISTER}), ?({REGISTER})", r"{\2, \1"),
    ("sources exchanged", rf"^((?:sub|div|selp|shl|shr|mapa|cvt\.rn\.b?f16x2|prmt)\S* \S+), ({REGISTER}), ({REGISTER})", r"\1, \3, \2"),
    ("another operation", rf"^(?:{'|'.join(ARITHMETIC)})(?=\.)", ARITHMETIC),
    ("another operation", r"^(?:mul|div)(?=\.rn\.f)", {"mul": "add", "div": "mul"}),
    ("another operation", r"(?<=^atom.global)\.(?:add|max)|(?<=^atom.shared)\.add", {".add": ".max", ".max": ".min"}),
    ("no function", FUNCTIONS, "mov.f32"),
    ("another 16-bit type", r"\.b?f16(?![x\d])", TYPES),
    ("the lane itself", rf"^(shfl\.\S+ \S+, {REGISTER}), [^,;]+,", r"\1, 0,"),
    ("half of the warp", r"^((?:shfl|vote|bar\.warp)\.[^;]*?),? ?[^ ,;]+;", r"\1, 65535;"),
    ("parity 0", rf"(try_wait[^;]*), {REGISTER};", r"\1, 0;"),
    ("another number of the block or thread", r"%(?:n?ctaid|n?tid)\.x|%cluster_ctarank", "%tid.z"),
    ("other comparison", r"(?<=^setp\.)(?:lt|le|gt|ge|eq|ne)(?=\.)", exchanged(("lt", "le"), ("gt", "ge"), ("eq", "ne"))),
]  # fmt: skip


@dataclass(frozen=True)
class Change:
    opcode: str
    operator: str
    pattern: str
    new: str | dict[str, str]

    @property
    def why(self) -> str:
        return f"{self.opcode}: {self.operator}"

    def plant(self, text: str) -> tuple[str, int]:
        """The text with the bug, and in how many places."""
        pieces, at, places = [], 0, 0
        for match in INSTRUCTION.finditer(text):
            if match[1] == self.opcode:
                begin = match.start() + len(match[0]) - len(match[0].lstrip(";{}\n \t"))
                end = text.index(";", match.end(1)) + 1
                changed = self.of_instruction(text[begin:end])
                places += changed != text[begin:end]
                pieces += [text[at:begin], changed]
                at = end
        return "".join([*pieces, text[at:]]), places

    def of_instruction(self, text: str) -> str:
        new = self.new
        return re.sub(self.pattern, (lambda m: new[m[0]]) if isinstance(new, dict) else new, text, count=1)


def changes(texts: Iterable[str]) -> list[Change]:
    """The changes that the operators make of the instructions of some kernels: an example of each opcode tells which of them do."""
    examples = opcodes(texts)
    found = [Change(opcode, *operator) for opcode in sorted(examples) for operator in OPERATORS]
    return [
        change
        for change in found
        if change.of_instruction(examples[change.opcode] + ";") != examples[change.opcode] + ";"
    ]

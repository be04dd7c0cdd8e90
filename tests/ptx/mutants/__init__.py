"""Wrong PTX texts, as if nvcc or csrc/device had said them. Each list names the kernels it changes (KERNEL, a regular
expression), the cases that must notice (CASES, see runs_of() in mutate.py) and the architecture whose text it is."""

import re
from dataclasses import dataclass

from ..forms import opcodes


@dataclass(frozen=True)
class Mutant:
    why: str
    old: str  # a regular expression
    new: str
    nth: int | None = None  # which match is changed, from 1 on, or from the last, -1; None: all
    missed: str = ""  # why no case can notice

    def places(self, text: str) -> list[re.Match]:
        found = list(re.finditer(self.old, text))
        if self.nth is None:
            return found
        return found[self.nth - 1 :][:1] if self.nth > 0 else found[self.nth :][:1]

    def plant(self, text: str) -> tuple[str, int]:
        """The text with the bug, and in how many places."""
        if self.nth is None:
            return re.subn(self.old, self.new, text)
        for match in self.places(text):
            return text[: match.start()] + match.expand(self.new) + text[match.end() :], 1
        return text, 0

    def forms(self, text: str) -> set[str]:
        """The instructions that it changes."""
        found = set()
        for match in self.places(text):
            start = max(text.rfind(end, 0, match.start()) for end in ";{}\n") + 1
            end = match.end() if match[0].endswith(";") else text.index(";", match.end())
            found |= set(opcodes([text[start:end] + ";"]))
        return found

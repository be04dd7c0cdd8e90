"""Wrong PTX texts, as if nvcc or csrc/device had said them. Each list names the kernels it changes and the cases that must notice."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    why: str
    old: str  # a regular expression
    new: str
    nth: int | None = None  # which match is changed, from 1 on; None: all
    missed: str = ""  # why no case can notice

    def plant(self, text: str) -> tuple[str, int]:
        """The text with the bug, and in how many places."""
        if self.nth is None:
            return re.subn(self.old, self.new, text)
        for number, match in enumerate(re.finditer(self.old, text), 1):
            if number == self.nth:
                return text[: match.start()] + match.expand(self.new) + text[match.end() :], 1
        return text, 0

"""Bugs that no operator makes, for ``make mutants``: valid things in the wrong order or the wrong place.

A module has TRAPS: a file under csrc/, and the tests if not those of its family (families.py), what is replaced by what, why that is
wrong, and which occurrence it is if not the first. White space matches any white space.
"""

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from planting import Place


@dataclass(frozen=True)
class Trap:
    file: str
    tests: list[str]
    old: str
    new: str
    why: str
    nth: int = 1

    def place(self, text: str) -> Place:
        """Where the file's text is changed."""
        pattern = r"\s+".join(map(re.escape, self.old.split()))
        found = list(re.finditer(pattern, text))
        if len(found) < self.nth:
            sys.exit(f"{self.file} has {len(found)} times {self.old!r}, a trap asks for number {self.nth}: {self.why}")
        return Place(self.file, "trap", *found[self.nth - 1].span(), self.new)


def every() -> list[Trap]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    lists = [importlib.import_module(f".{name}", __package__).TRAPS for name in names]
    return [Trap(place.split()[0], place.split()[1:], *trap) for traps in lists for place, *trap in traps]

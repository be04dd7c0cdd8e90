"""Bugs that operators plant: an operator is a pattern over a text, which finds its places, and what it makes of a match."""

import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NEEDED_SHARE = 0.9

Operator = tuple[str, str, str | dict[str, str]]  # name, pattern, and the text in its place or a table of such texts


def exchanged(*pairs: tuple[str, str]) -> dict[str, str]:
    """A table in which each of two texts becomes the other."""
    return {old: new for a, b in pairs for old, new in ((a, b), (b, a))}


@dataclass(frozen=True)
class Place:
    file: str
    operator: str
    begin: int
    end: int
    new: str

    def planted(self, text: str) -> str:
        return text[: self.begin] + self.new + text[self.end :]

    def change(self, text: str) -> tuple[str, str, int]:
        """The text taken out, the text put in, and where, without what both have in common: equal for two changes that are the same."""
        old, new, begin = text[self.begin : self.end], self.new, self.begin
        while old and new and old[0] == new[0]:
            old, new, begin = old[1:], new[1:], begin + 1
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        return old, new, begin

    def line(self, text: str) -> str:
        """The line with the change marked in it. It names the place, wherever the line stands."""
        begin, end = text.rfind("\n", 0, self.begin) + 1, text.find("\n", self.end)
        marked = f"{text[begin : self.begin]}[[{text[self.begin : self.end]} => {self.new}]]{text[self.end : end]}"
        return " ".join(marked.split())


def blanked(text: str, patterns: Iterable[str]) -> str:
    """The text with a zero for each character that a pattern matches: no operator sees those."""
    for pattern in patterns:
        text = re.sub(pattern, lambda m: re.sub(r"[^\n]", "\0", m[0]), text, flags=re.MULTILINE | re.DOTALL)
    return text


def places(file: str, text: str, operators: Sequence[Operator], no_places: Sequence[str] = ()) -> list[Place]:
    """Every change that an operator makes, each once."""
    found, searched = {}, blanked(text, no_places)
    for name, pattern, new in operators:
        for match in re.finditer(pattern, searched, re.MULTILINE):
            made = new[match[0]] if isinstance(new, dict) else match.expand(new)
            if "\0" not in match[0] and made != match[0]:
                place = Place(file, name, *match.span(), made)
                found.setdefault(place.change(text), place)
    return list(found.values())


def in_turns(places: Iterable[Place], seed: int | None = None) -> list[Place]:
    """The places in an order that DRAW chooses, the operators in turns, so that those with few places come as often as others."""
    generator = random.Random(int(os.environ.get("DRAW", 0)) if seed is None else seed)
    drawn, turns, ranked = list(places), Counter(), []
    generator.shuffle(drawn)
    for i, place in enumerate(drawn):
        turns[place.operator] += 1
        ranked.append((turns[place.operator], i))
    return [drawn[i] for _, i in sorted(ranked)]


def too_few(caught: int, total: int) -> bool:
    """True if so few cannot be chance where NEEDED_SHARE of all are caught: two standard deviations less."""
    return caught < NEEDED_SHARE * total - 2 * (total * NEEDED_SHARE * (1 - NEEDED_SHARE)) ** 0.5

"""Schedules: which block, group and lanes go next, and when asynchronous operations complete.

Seed 0 runs the lowest program counter first, one cluster after the other, and completes copies as late as they may. Other seeds draw
groups, parts of groups, blocks and completions at random, each kind of seed with another habit.
"""

import random

import numpy as np

WHOLE = 1 << 30


class Schedule:
    def __init__(self, seed: int = 0):
        self.random = random.Random(seed)
        self.plain = seed == 0
        self.habit = ("warps", "lanes", "early", "ranked")[seed % 4]
        self.resident = 1 if self.plain else 2 + seed % 2  # clusters at a time
        self.order: dict[int, float] = {}

    def turn(self) -> int:
        """Instructions until another block may go on."""
        return 1 << 16 if self.plain else self.random.choice((50, 500, 5000))

    def length(self) -> int:
        """Instructions until another group may go on."""
        if self.plain:
            return 1 << 14
        return self.random.choice((20, 100, 1000)) if self.habit != "early" else WHOLE

    def choose(self, groups: dict) -> int:
        if self.plain or self.random.random() < 0.5:
            return min(groups)
        return self.random.choice(sorted(groups))

    def part(self, mask: np.ndarray, leave) -> np.ndarray:
        """A part of a group that goes on alone; `leave` puts the others back."""
        if self.plain or self.habit == "early" or self.random.random() < 0.7:
            return mask
        if self.habit == "lanes" and self.random.random() < 0.5:
            pick = np.array([self.random.random() < 0.5 for _ in range(mask.size)])
        else:
            pick = np.repeat([self.random.random() < 0.5 for _ in range(mask.size // 32)], 32)
        part = mask & pick
        if not part.any() or (part == mask).all():
            return mask
        leave(mask & ~part)
        return part

    def blocks(self, blocks: list) -> list:
        """The order in which blocks take turns."""
        if self.plain:
            return blocks
        if self.habit == "ranked":  # the same ones are ahead all the time
            return sorted(blocks, key=lambda b: self.order.setdefault(b.index, self.random.random()))[:1] + blocks
        return self.random.sample(blocks, len(blocks))

    def at_once(self) -> bool:
        """True if an asynchronous operation completes when it is issued."""
        return not self.plain and (self.habit == "early" or self.random.random() < 0.2)

    def now(self, pending: list) -> list:
        """Operations in flight that complete between two turns."""
        if self.plain or self.habit == "ranked":
            return []
        return [p for p in pending if self.random.random() < 0.2]

    def gives_up(self) -> bool:
        """True if a wait that may return false before its time does so."""
        return not self.plain and self.random.random() < 0.2

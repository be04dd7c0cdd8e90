"""The shared part of the fuzzers. A seed decides a case, so a failure is replayed by its seed:

python -m tests.reliability.fuzz_raw --seed 17               one case
python -m tests.reliability.fuzz_raw --seed 0 --cases 1000   many
python -m tests.reliability.fuzz_raw --seconds 900           as many as fit
"""

from __future__ import annotations

import argparse
import faulthandler
import inspect
import itertools
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from ..helpers.poison import embed

HALVES = torch.float16, torch.bfloat16
FLOATS = *HALVES, torch.float32
BAD = math.nan, math.inf, -math.inf


class Draw(random.Random):
    """Everything that a case draws. :attr:`notes` describe the case in the report of a failure."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.notes: list[str] = []

    def note(self, *words: object) -> None:
        self.notes.append(" ".join(map(str, words)))

    def flag(self, probability: float = 0.5) -> bool:
        return self.random() < probability

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=self.generator)).to(dtype)

    def placed(self, t: torch.Tensor) -> torch.Tensor:
        """These values somewhere else in memory, at times with NaN around them, or the first row alone, with stride 0."""
        kind = self.choice(
            ["row", "row", "column", "step", "offset", "channels_last", "expanded", "embedded", "embedded"]
        )
        if kind == "embedded" and t.ndim > 1 and t.is_floating_point():
            options = {"offset": self.randrange(9), "pad": self.randrange(9), "step": self.choice([1, 1, 2])}
            return embed(t, transposed=self.flag(), **options)[0]
        if kind == "column" and t.ndim > 1:
            order = self.sample(range(t.ndim), t.ndim)
            return t.permute(order).contiguous().permute(sorted(range(t.ndim), key=order.__getitem__))
        if kind == "step" and t.ndim:
            return torch.stack([t, t], dim=-1)[..., self.randrange(2)]
        if kind == "channels_last" and t.ndim == 4:
            return t.contiguous(memory_format=torch.channels_last)
        if kind == "expanded" and t.ndim and t.shape[0]:
            return t[:1].expand_as(t)
        if kind == "offset":
            begin = self.randrange(1, 9)
            buffer = t.new_zeros(begin + t.numel())
            return buffer[begin:].view(t.shape).copy_(t)
        return t.contiguous().clone()


Case = Callable[[Draw], None]


class Failure(AssertionError):
    pass


def check(case: Case, seed: int) -> None:
    """Run the case of a seed.

    Raises:
        Failure: it failed; the message says how to replay it, what was drawn and why it failed.
    """
    draw = Draw(seed)
    try:
        case(draw)
    except Exception as error:
        lines = (
            f"python -m tests.reliability.{Path(inspect.getsourcefile(inspect.unwrap(case))).stem} --seed {seed}",
            *draw.notes,
            f"{type(error).__name__}: {error}",
        )
        raise Failure("\n  ".join(lines)) from error


def seeds(first: int, cases: int | None, seconds: float | None) -> Iterable[int]:
    """``cases`` seeds, or those that begin within ``seconds``, or one."""
    end = time.monotonic() + (seconds or math.inf)
    numbers = itertools.count(first) if seconds and not cases else range(first, first + (cases or 1))
    return itertools.takewhile(lambda _: time.monotonic() < end, numbers)


def main(case: Case) -> None:
    """The command line of a fuzzer: prints every failure, and exits with 1 if there is one."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, help="how many seeds")
    parser.add_argument("--seconds", type=float, help="begin no case after so many")
    parser.add_argument("--verbose", action="store_true", help="print every seed, and tracebacks")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    count = failed = 0
    for seed in seeds(options.seed, options.cases, options.seconds):
        if options.verbose:
            print("seed", seed, flush=True)
        try:
            check(case, seed)
        except Failure as failure:
            failed += 1
            print(failure, flush=True)
            if options.verbose:
                traceback.print_exception(failure.__cause__)
        count += 1
    print(f"{count} cases, {failed} failed")
    sys.exit(failed > 0)

"""The bugs that ``make mutants`` plants, one at a time: one file for the kernels of one test program.

A list module has ``MUTANTS`` and ``TEST``, the program that must fail, or a pytest file under ``tests``.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """In ``file`` (under csrc/), the ``nth`` occurrence of ``old`` becomes ``new``. White space in ``old`` matches any white space.

    ``missed`` explains why no test can notice, if none can; such a mutant counts as missed all the same. ``test`` takes the place of
    the list's ``TEST``.
    """

    file: str
    old: str
    new: str
    why: str
    nth: int = 1
    missed: str = ""
    test: str = ""


def in_cpu_kernel(file: str, test: str, *bugs: tuple) -> list[Mutant]:
    """A mutant for each (old, new, why) in a CPU kernel, which tests/ops/test_{test}.py must catch. Not in code for
    one instruction set, which no test runs on another machine."""
    return [Mutant(file, *bug, test=f"ops/test_{test}.py") for bug in bugs]

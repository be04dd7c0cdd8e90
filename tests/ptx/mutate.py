"""Mutation test of PTX execution: plants one wrong text at a time in what nvcc made, and counts how many the cases notice.

    python -m tests.ptx.mutate                     all lists in mutants/
    python -m tests.ptx.mutate gemm_sm90           one list
    python -m tests.ptx.mutate gemm_sm90 --only 3,7
    python -m tests.ptx.mutate --every 4           one in four of each list

Fails if fewer than 90 % are caught, if a miss is not explained in the list, or if a text is not there to be changed. The last line
is "N of M caught".
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

NEEDED_SHARE = 0.9
SEEDS = (0, 1, 3)


def planted_lists(names: Sequence[str] = ()) -> list[tuple[str, ModuleType]]:
    """The files in mutants/."""
    names = names or sorted(p.stem for p in (Path(__file__).parent / "mutants").glob("[!_]*.py"))
    return [(name, importlib.import_module(f".mutants.{name}", __package__)) for name in names]


class Planted:
    """The rewriting of PTX while a mutant is tried."""

    def __init__(self, mutant, kernel: str):
        self.mutant, self.kernel, self.places, self.texts = mutant, kernel, 0, {}

    def __call__(self, name: str, text: str) -> str:
        if not re.search(self.kernel, name):
            return text
        if name not in self.texts:
            changed, places = self.mutant.plant(text)
            if places and changed == text:
                raise AssertionError(f"the text stays as it is: {self.mutant.why}")
            self.places += places
            self.texts[name] = changed
        return self.texts[name]


def notice(runs, seeds=SEEDS) -> str | None:
    """The first case that goes wrong."""
    import torch

    from .preloaded import machine

    it = machine()
    for seed in seeds:
        for run in runs:
            it.seed, it.error = seed, None
            try:
                for got, want in run():
                    if not torch.equal(got.nan_to_num(nan=1e30), want.nan_to_num(nan=1e30)):
                        return "another result"
            except Exception as error:
                return str(it.error or error) or "another result"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", help="names of files in mutants/ (default: all)")
    parser.add_argument("--only", help="comma-separated numbers of the mutants to try")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try one mutant in N of each list")
    arguments = parser.parse_args()
    if "AK_PTX_LIBRARY" not in os.environ:
        from .run import environment

        return subprocess.run([sys.executable, "-m", "tests.ptx.mutate", *sys.argv[1:]], env=environment()).returncode

    from .preloaded import machine

    it = machine()  # before the package is imported
    from .mutant_runs import runs_of

    only = {int(number) for number in arguments.only.split(",")} if arguments.only else None
    caught, total, faults = 0, 0, []
    for name, module in planted_lists(arguments.lists):
        runs = runs_of(module.CASES)
        wrong = notice(runs)
        if wrong:
            sys.exit(f"{name}, nothing planted: {wrong}")
        for i, mutant in enumerate(module.MUTANTS):
            if (only is not None and i not in only) or i % arguments.every:
                continue
            it.rewrite = planted = Planted(mutant, module.KERNEL)
            detail = notice(runs)
            it.rewrite = None
            it.forget()
            total += 1
            caught += detail is not None
            outcome = "caught" if detail else "missed"
            if planted.places == 0:
                outcome = "no place"
            print(
                f"{outcome:8} {name} {i}: {mutant.why}: {(detail or mutant.missed or 'NOT EXPLAINED')[:200]}",
                flush=True,
            )
            if planted.places == 0 or (detail is None) != bool(mutant.missed):
                faults.append(f"{name} {i}")
    if faults:
        print("to be looked at: " + ", ".join(faults))
    print(f"{caught} of {total} caught")
    return 1 if faults or caught < NEEDED_SHARE * total else 0


if __name__ == "__main__":
    sys.exit(main())

"""Mutation test of PTX execution: plants one wrong text at a time in what nvcc made, and counts how many the cases notice.

    python -m tests.ptx.mutate                       all traps, and 6 changes by operators in each family that DRAW chooses
    python -m tests.ptx.mutate gemm_sm90 --each 30   one family (families.py); --each 0: its traps alone
    python -m tests.ptx.mutate norm --at shfl        the changes whose title has that text

Operators (operators.py) change all instructions of one opcode that a kernel has; traps (traps.py) are wrong texts that none of them makes.
Fails if a trap is missed or has no text to change, or if fewer than 90 % of the operators' changes are caught, beyond chance. The last
line is "N of M caught".
"""

import argparse
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from ..planting import too_few
from .families import CHANGE_NOTHING, FAMILIES, Family
from .operators import Change, changes
from .traps import TRAPS

SEEDS = (0, 1, 3)


def texts_of(family: Family, sources) -> list[str]:
    """Some of the kernels of a family, which hold all of its instructions between them."""
    from .forms import opcodes

    texts, found = [], set()
    for source in (s for s in sources if s.fits(family.capability)):
        for kernel, text in source.kernels.items():
            if re.search(family.kernel, kernel) and not (held := set(opcodes([text]))) <= found:
                texts.append(text)
                found |= held
    return texts


def drawn_changes(family: Family, sources) -> list[Change]:
    """The changes that the operators make of a family's kernels, in the order in which they are tried."""
    found = changes(texts_of(family, sources))
    random.Random(int(os.environ.get("DRAW", 0))).shuffle(found)
    return found


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


def try_mutant(mutant, family: Family, runs) -> tuple[str, str]:
    """("caught", what was noticed), ("missed", ""), or ("no bug", "") if no kernel that runs has the text, or the new text is no PTX."""
    from .preloaded import machine

    it = machine()
    it.rewrite = planted = Planted(mutant, family.kernel)
    detail = notice(runs)
    it.rewrite = None
    it.forget()
    if planted.places == 0 or (detail or "").startswith("no meaning for"):
        return "no bug", ""
    return ("caught" if detail else "missed"), detail or ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names in families.py (default: all)")
    parser.add_argument("--each", type=int, default=6, metavar="N", help="changes by operators in each family")
    parser.add_argument("--at", default="", metavar="TEXT", help="only changes whose title has this text")
    arguments = parser.parse_args()
    if "AK_PTX_LIBRARY" not in os.environ:
        from .run import environment

        return subprocess.run([sys.executable, "-m", "tests.ptx.mutate", *sys.argv[1:]], env=environment()).returncode

    from .preloaded import machine

    machine()  # before the package is imported
    from tools.ptx.sources import sources_in

    from .mutant_runs import runs_of

    sources = sources_in(Path(os.environ["AK_PTX_LIBRARY"]))
    caught, total, faults = Counter(), Counter(), []
    for name in arguments.families or FAMILIES:
        family = FAMILIES[name]
        runs = runs_of(family.cases)
        wrong = notice(runs)
        if wrong:
            sys.exit(f"{name}, nothing planted: {wrong}")
        left = arguments.each
        for mutant in [*TRAPS.get(name, []), *drawn_changes(family, sources)]:
            kind = "operator" if isinstance(mutant, Change) else "trap"
            if (
                (name, mutant.why) in CHANGE_NOTHING
                or arguments.at not in mutant.why
                or (kind == "operator" and left == 0)
            ):
                continue
            outcome, detail = try_mutant(mutant, family, runs)
            if kind == "operator":
                if outcome == "no bug":
                    continue
                left -= 1
            elif outcome != "caught":
                faults.append(f"{name}: {mutant.why}")
            total[kind] += 1
            caught[kind] += outcome == "caught"
            print(f"{outcome:8} {name} {mutant.why}: {detail[:200]}", flush=True)
    if faults:
        print("to be looked at: " + ", ".join(faults))
    print(f"{caught.total()} of {total.total()} caught")
    return 1 if faults or too_few(caught["operator"], total["operator"]) else 0


if __name__ == "__main__":
    sys.exit(main())

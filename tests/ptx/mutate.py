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
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

NEEDED_SHARE = 0.9
SEEDS = (0, 1, 3)


def planted_lists(names: Sequence[str] = ()) -> list[tuple[str, ModuleType]]:
    """The files in mutants/."""
    names = names or sorted(p.stem for p in (Path(__file__).parent / "mutants").glob("[!_]*.py"))
    return [(name, importlib.import_module(f".mutants.{name}", __package__)) for name in names]


class Planted:
    """What machine().rewrite does while a mutant is tried."""

    def __init__(self, mutant, kernel: str):
        self.mutant, self.kernel, self.places, self.texts = mutant, kernel, 0, {}

    def __call__(self, name: str, text: str) -> str:
        if self.kernel not in name:
            return text
        if name not in self.texts:
            changed, places = self.mutant.plant(text)
            if places and changed == text:
                raise AssertionError(f"the text stays as it is: {self.mutant.why}")
            self.places += places
            self.texts[name] = changed
        return self.texts[name]


def gemm_runs(kernel: str) -> list[Callable[[], Iterator]]:
    """Functions that yield pairs of a result and what it must be."""
    import torch

    import amp_kernels as ak

    from .gemm_cases import Case, cases, integers, operands, run
    from .preloaded import set_chip

    capability = int(kernel[2:])

    def exact(case: Case, dtype=torch.float16):
        a, b = operands(case, dtype, 5)
        with ak.backend("cpu"):
            want = run(case, a, b)

        def go():
            set_chip(capability, case.sm_count)
            yield run(case, a.cuda(), b.cuda()).cpu(), want

        return go

    def batched(m=72, n=136, k=72):
        generator = torch.Generator().manual_seed(1)
        a, b = integers(generator, 2, m, k).half(), integers(generator, 2, k, n).half()
        want = (a.double() @ b.double()).float()
        plan_of = (a, b.mT.contiguous().mT)

        def go():
            set_chip(capability, 2)
            yield ak.ops.gemm.gemm(*(t.cuda() for t in plan_of), out_dtype=torch.float32).cpu(), want
            yield ak.ops.gemm.gemm(a.cuda(), b.cuda()).cpu().float(), want

        return go

    def accumulated():
        generator = torch.Generator().manual_seed(2)
        a, b, c = integers(generator, 128, 64).half(), integers(generator, 64, 64).half(), integers(generator, 128, 64)
        want = c + a.float() @ b.float()

        def go():
            set_chip(capability, 2)
            out = c.cuda()
            ak.ops.gemm.gemm_accumulate_(out, a.cuda(), b.cuda())
            yield out.cpu(), want

        return go

    def chained():
        generator = torch.Generator().manual_seed(3)
        a, b = integers(generator, 64, 64).sign().half(), integers(generator, 64, 64).sign().half()
        want = (a.double() @ b.double()) @ b.double()

        def go():
            set_chip(capability, 2)
            on_a, on_b = a.cuda(), b.cuda()
            first = ak.ops.gemm.gemm(on_a, on_b)  # nothing between the two kernels
            yield ak.ops.gemm.gemm(first, on_b, out_dtype=torch.float32).cpu().double(), want

        return go

    def apart(gap, n=56, shared=None):
        """Rows apart from each other, columns that no vector ends with; with less shared memory, fewer stages."""
        generator = torch.Generator().manual_seed(4)
        wide, b = integers(generator, 40, 200 + gap).half(), integers(generator, 200, n).half()
        want = (wide[:, :200].float() @ b.float()).half()

        def go():
            it = set_chip(capability, 2)
            if shared:
                it.set_chip(capability, 2, shared)
            yield ak.ops.gemm.gemm(wide.cuda()[:, :200], b.cuda()).cpu(), want

        return go

    picked = {}
    for case in cases():
        if case.kernel == kernel:
            picked.setdefault((case.tile, case.splits, case.swapped), []).append(case)
    runs = [
        exact(group[i % len(group)], (torch.float16, torch.bfloat16)[i % 2]) for i, group in enumerate(picked.values())
    ]
    small = [exact(group[i]) for group in picked.values() for i in range(0, len(group), 3) if group[i].m <= 96]
    # Stages that are filled more than once, with and without a cluster.
    long = [replace(c, k=1024) for c in cases() if c.kernel == "sm90" and c.tile in (0, 2) and not c.splits]
    special = [accumulated(), batched(), chained(), *(exact(c) for c in long[::3] if c.kernel == kernel)]
    if kernel == "sm80":
        special += [apart(8), apart(2), apart(1, n=55), apart(4), apart(1, shared=130 * 1024)]
    return special + runs + small[:8]


def op_runs(names: list[str]) -> list[Callable[[], Iterator]]:
    from amp_kernels._dispatch.library import REGISTRY

    from .executed_step import compare
    from .preloaded import set_chip

    def go_for(name):
        def go():
            set_chip(80, 3)
            yield from compare(REGISTRY[name])

        return go

    return [go_for(name) for name in names]


def runs_of(cases: str) -> list[Callable[[], Iterator]]:
    if cases in ("sm80", "sm90"):
        return gemm_runs(cases)
    return op_runs({"check_and_norm": ["check_and_norm"], "update": ["adamw_", "lion_", "sgd_", "lamb_"]}[cases])


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
                return str(it.error or error)
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

    it = machine()
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

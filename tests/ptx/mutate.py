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


def gemm_runs(kernel: str) -> list[Callable[[], Iterator]]:
    """Functions that yield pairs of a result and what it must be."""
    import torch

    import amp_kernels as ak

    from .gemm_cases import Case, cases, check_prefetched, in_turns, integers, operands, run
    from .preloaded import machine, set_chip

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
            yield ak._raw.gemm.gemm(*(t.cuda() for t in plan_of), out_dtype=torch.float32).cpu(), want
            yield ak._raw.gemm.gemm(a.cuda(), b.cuda()).cpu().float(), want

        return go

    def accumulated():
        generator = torch.Generator().manual_seed(2)
        a, b, c = integers(generator, 128, 64).half(), integers(generator, 64, 64).half(), integers(generator, 128, 64)
        want = c + a.float() @ b.float()

        def go():
            set_chip(capability, 2)
            out = c.cuda()
            ak._raw.gemm.gemm_accumulate_(out, a.cuda(), b.cuda())
            yield out.cpu(), want

        return go

    def chained():
        generator = torch.Generator().manual_seed(3)
        a, b = integers(generator, 64, 64).sign().half(), integers(generator, 64, 64).sign().half()
        want = (a.double() @ b.double()) @ b.double()

        def go():
            set_chip(capability, 2)
            on_a, on_b = a.cuda(), b.cuda()
            first = ak._raw.gemm.gemm(on_a, on_b)  # nothing between the two kernels
            yield ak._raw.gemm.gemm(first, on_b, out_dtype=torch.float32).cpu().double(), want

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
            yield ak._raw.gemm.gemm(wide.cuda()[:, :200], b.cuda()).cpu(), want

        return go

    def beside(out):
        """More boxes than take turns, and the last one not all there."""
        generator = torch.Generator().manual_seed(5)
        a, b = integers(generator, 72, 64).half(), integers(generator, 64, 200).half()
        residual = integers(generator, 72, 200).to(out)
        want = (a.float() @ b.float() + residual.float()).to(out)

        def go():
            set_chip(capability, 1)
            there = residual.cuda()
            yield ak._raw.gemm.gemm(a.cuda(), b.cuda(), residual=there, out_dtype=out).cpu(), want
            check_prefetched(machine().recent[-1], there)

        return go

    def derivative():
        generator = torch.Generator().manual_seed(6)
        a, b = integers(generator, 72, 64).half(), integers(generator, 64, 200).half()
        z = integers(generator, 72, 200).half()
        want = torch.where(z > 0, a.float() @ b.float(), 0)

        def go():
            set_chip(capability, 1)
            dz, sums = ak._raw.gemm.gemm_dact(a.cuda(), b.cuda(), z.cuda(), activation="relu", bias_grad=True)
            yield dz.cpu(), want.half()
            yield sums.cpu(), want.sum(0)

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
    special = [accumulated(), batched(), chained(), *(exact(c) for c in [*long[::3], in_turns()] if c.kernel == kernel)]
    special += [beside(torch.float16), beside(torch.float32), derivative()]
    if kernel == "sm80":
        special += [apart(8), apart(2), apart(1, n=55), apart(4), apart(1, shared=130 * 1024)]
    return special + runs + small[:8]


def checked(case, sm_count: int, *how, **options) -> Callable[[], Iterator]:
    """A product whose result executed() checks; what is wrong with it is an exception."""
    import torch

    from .executed_gemm_edges import executed
    from .preloaded import machine

    def go():
        executed(case, torch.float16, sm_count, machine().seed, *how, **options)
        yield from ()

    return go


def repacked_runs() -> list[Callable[[], Iterator]]:
    """Products whose operands are copied first."""
    import torch

    import amp_kernels as ak

    from .executed_gemm_edges import GemmCase
    from .gemm_cases import copied, integers
    from .preloaded import set_chip

    def chained():
        generator = torch.Generator().manual_seed(6)
        a, b = integers(generator, 72, 64).sign().half(), integers(generator, 64, 201).sign().half()
        w = integers(generator, 201, 40).sign().half()
        want = (a.float() @ b.float()) @ w.float()

        def go():
            set_chip(90, 1)
            on_a, on_b, on_w = a.cuda(), b.cuda(), w.cuda()
            first = ak._raw.gemm.gemm(on_a, on_b)  # nothing between it and the copy
            yield ak._raw.gemm.gemm(first, on_w, out_dtype=torch.float32).cpu(), want

        return go

    # More chunks than threads, and every third of the others.
    return [chained(), checked(GemmCase("plain", 131, 40, 521), 1), *(checked(*problem) for problem in copied()[::3])]


def phased_runs() -> list[Callable[[], Iterator]]:
    """Products in phases."""
    import torch

    import amp_kernels as ak

    from .executed_gemm_edges import GemmCase
    from .gemm_cases import integers, phased
    from .preloaded import set_chip

    def scaled():
        generator = torch.Generator().manual_seed(7)
        a, b = integers(generator, 1000, 37).half(), integers(generator, 1000, 19).half()
        want = 0.5 * (a.float().T @ b.float())

        def go():
            set_chip(80, 4)
            yield ak._raw.gemm.gemm(a.cuda().T, b.cuda(), alpha=0.5, out_dtype=torch.float32).cpu(), want

        return go

    two = GemmCase("fp32", 36, 40, 2003, True, True)
    problems = [(two, 2, 80), *phased()]
    return [scaled(), *(checked(case, sm_count, capability=capability) for case, sm_count, capability in problems)]


def op_runs(names: Sequence[str]) -> list[Callable[[], Iterator]]:
    """The ops' samples, against what the emulator makes of them."""
    import torch

    import amp_kernels as ak
    from amp_kernels._dispatch.library import REGISTRY

    from .executed_step import call, tensors
    from .preloaded import set_chip

    def samples(op, device):
        yield from op.samples(device)
        if op.name == "unscale_":  # all blocks find something
            bad = [torch.full((5000,), torch.inf, device=device) for _ in range(8)]
            yield (bad, torch.zeros((), device=device), torch.ones((), device=device)), {}
        if op.name == "exponent_histogram":  # the block that comes last has not the largest
            yield ([torch.exp2(-torch.arange(40_000.0) / 1000).to(device)],), {}

    def go_for(op):
        with ak.backend("emulate"):
            wanted = [[*tensors(call(op, args, kwargs))] for args, kwargs in samples(op, "cpu")]

        def go():
            set_chip(90 if op.name.startswith("grouped") else 80, 2)  # the emulator's number of SMs
            for (args, kwargs), want in zip(samples(op, "cuda"), wanted, strict=True):
                with ak.backend("cuda"):
                    yield from zip((t.cpu() for t in tensors(call(op, args, kwargs))), want, strict=True)

        return go

    return [go_for(REGISTRY[name]) for name in names]


def shared_row_runs() -> list[Callable[[], Iterator]]:
    """Rows that the blocks of a cluster share."""
    import torch

    import amp_kernels as ak

    from .preloaded import set_chip
    from .shared_rows import shared_rows

    backward = ak._raw.norm_backward.norm_backward
    set_chip(90, 4)
    arguments, exact = shared_rows(8200, torch.float32, rows=5)

    def go():
        set_chip(90, 4)
        rows, sums, _ = ak.backend("cuda")(backward)(*arguments, parameters=1)
        yield sums[0].double().cpu(), exact[1].cpu()
        yield ((rows.double() - exact[0]).abs() < 1e-2).all().cpu(), torch.tensor(True)

    return [go]


def symmetric_runs() -> list[Callable[[], Iterator]]:
    """A symmetric product on Hopper, of three tiles, with operands that make the two triangles differ."""
    import torch

    import amp_kernels as ak
    from amp_kernels._dispatch.library import REGISTRY

    from .preloaded import set_chip

    syrk, generator = REGISTRY["syrk"], torch.Generator().manual_seed(0)
    operands = [torch.randint(-2, 3, (136, 72), generator=generator).half() for _ in range(2)]
    with ak.backend("cpu"):
        want = syrk(*operands)

    def go():
        set_chip(90, 2)
        with ak.backend("cuda"):
            yield syrk(*(operand.cuda() for operand in operands)).cpu(), want

    return [go]


def runs_of(cases: str | Sequence[str]) -> list[Callable[[], Iterator]]:
    """The runs of a list's cases: an architecture's products, those with copied operands or in phases, rows shared by a cluster, or ops
    by name."""
    others = {
        "repacked": repacked_runs,
        "phased": phased_runs,
        "shared rows": shared_row_runs,
        "symmetric": symmetric_runs,
    }
    if isinstance(cases, str) and cases in others:
        return others[cases]()
    return gemm_runs(cases) if isinstance(cases, str) else op_runs(cases)


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

"""The cases that a list of planted bugs names, in a process in which the fake CUDA runtime is preloaded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY

from ..ops import raw
from .executed_gemm_edges import GemmCase, executed
from .executed_step import call, tensors
from .gemm_cases import Case, cases, check_prefetched, copied, in_turns, integers, narrow, operands, phased, run
from .preloaded import machine, set_chip
from .shared_rows import shared_rows


def exact(capability: int, case: Case, dtype=torch.float16):
    a, b = operands(case, dtype, 5)
    with ak.backend("cpu"):
        want = run(case, a, b)

    def go():
        set_chip(capability, case.sm_count)
        yield run(case, a.cuda(), b.cuda()).cpu(), want

    return go


def batched(capability: int, m=72, n=136, k=72):
    generator = torch.Generator().manual_seed(1)
    a, b = integers(generator, 2, m, k).half(), integers(generator, 2, k, n).half()
    want = (a.double() @ b.double()).float()
    plan_of = (a, b.mT.contiguous().mT)

    def go():
        set_chip(capability, 2)
        yield raw.gemm(*(t.cuda() for t in plan_of), out_dtype=torch.float32).cpu(), want
        yield raw.gemm(a.cuda(), b.cuda()).cpu().float(), want

    return go


def accumulated(capability: int):
    generator = torch.Generator().manual_seed(2)
    a, b, c = integers(generator, 128, 64).half(), integers(generator, 64, 64).half(), integers(generator, 128, 64)
    want = c + a.float() @ b.float()

    def go():
        set_chip(capability, 2)
        out = c.cuda()
        raw.gemm_accumulate_(out, a.cuda(), b.cuda())
        yield out.cpu(), want

    return go


def chained(capability: int):
    generator = torch.Generator().manual_seed(3)
    a, b = integers(generator, 64, 64).sign().half(), integers(generator, 64, 64).sign().half()
    want = (a.double() @ b.double()) @ b.double()

    def go():
        set_chip(capability, 2)
        on_a, on_b = a.cuda(), b.cuda()
        first = raw.gemm(on_a, on_b)  # nothing between the two kernels
        yield raw.gemm(first, on_b, out_dtype=torch.float32).cpu().double(), want

    return go


def apart(capability: int, gap, n=56, shared=None):
    """Rows apart from each other, columns that no vector ends with; with less shared memory, fewer stages."""
    generator = torch.Generator().manual_seed(4)
    wide, b = integers(generator, 40, 200 + gap).half(), integers(generator, 200, n).half()
    want = (wide[:, :200].float() @ b.float()).half()

    def go():
        it = set_chip(capability, 2)
        if shared:
            it.set_chip(capability, 2, shared)
        yield raw.gemm(wide.cuda()[:, :200], b.cuda()).cpu(), want

    return go


def beside(capability: int, out):
    """More boxes than take turns, and the last one not all there."""
    generator = torch.Generator().manual_seed(5)
    a, b = integers(generator, 72, 64).half(), integers(generator, 64, 200).half()
    residual = integers(generator, 72, 200).to(out)
    want = (a.float() @ b.float() + residual.float()).to(out)

    def go():
        set_chip(capability, 1)
        there = residual.cuda()
        yield raw.gemm(a.cuda(), b.cuda(), residual=there, out_dtype=out).cpu(), want
        check_prefetched(machine().recent[-1], there)

    return go


def derivative(capability: int):
    generator = torch.Generator().manual_seed(6)
    a, b = integers(generator, 72, 64).half(), integers(generator, 64, 200).half()
    z = integers(generator, 72, 200).half()
    want = torch.where(z > 0, a.float() @ b.float(), 0)

    def go():
        set_chip(capability, 1)
        dz, sums = raw.gemm_dact(a.cuda(), b.cuda(), z.cuda(), activation="relu", bias_grad=True)
        yield dz.cpu(), want.half()
        yield sums.cpu(), want.sum(0)

    return go


def gemm_runs(kernel: str) -> list[Callable[[], Iterator]]:
    """Functions that yield pairs of a result and what it must be."""
    capability = int(kernel[2:])
    picked = {}
    for case in cases():
        if case.kernel == kernel:
            picked.setdefault((case.tile, case.splits, case.swapped), []).append(case)
    runs = [
        exact(capability, group[i % len(group)], (torch.float16, torch.bfloat16)[i % 2])
        for i, group in enumerate(picked.values())
    ]
    small = [
        exact(capability, group[i]) for group in picked.values() for i in range(0, len(group), 3) if group[i].m <= 96
    ]
    # Stages that are filled more than once, with and without a cluster.
    long = [replace(c, k=1024) for c in cases() if c.kernel == "sm90" and c.tile in (0, 2) and not c.splits]
    special = [
        accumulated(capability),
        batched(capability),
        chained(capability),
        *(exact(capability, c) for c in [*long[::3], in_turns()] if c.kernel == kernel),
    ]
    special += [beside(capability, torch.float16), beside(capability, torch.float32), derivative(capability)]
    if kernel == "sm80":
        special += [
            apart(capability, 8),
            apart(capability, 2),
            apart(capability, 1, n=55),
            apart(capability, 4),
            apart(capability, 1, shared=130 * 1024),
        ]
    return special + runs + small[:8]


def checked(case, sm_count: int, *how, **options) -> Callable[[], Iterator]:
    """A product whose result executed() checks; what is wrong with it is an exception."""

    def go():
        executed(case, torch.float16, sm_count, machine().seed, *how, **options)
        yield from ()

    return go


def repacked_runs() -> list[Callable[[], Iterator]]:
    """Products whose operands are copied first."""

    def chained():
        generator = torch.Generator().manual_seed(6)
        a, b = integers(generator, 72, 64).sign().half(), integers(generator, 64, 201).sign().half()
        w = integers(generator, 201, 40).sign().half()
        want = (a.float() @ b.float()) @ w.float()

        def go():
            set_chip(90, 1)
            on_a, on_b, on_w = a.cuda(), b.cuda(), w.cuda()
            first = raw.gemm(on_a, on_b)  # nothing between it and the copy
            yield raw.gemm(first, on_w, out_dtype=torch.float32).cpu(), want

        return go

    # More chunks than threads, and every third of the others.
    return [chained(), checked(GemmCase("plain", 131, 40, 521), 1), *(checked(*problem) for problem in copied()[::3])]


def narrow_runs() -> list[Callable[[], Iterator]]:
    """Products with an n-major B in tiles of 16 and 32 columns."""
    return [checked(*problem) for problem in narrow()]


def phased_runs() -> list[Callable[[], Iterator]]:
    """Products in phases."""

    def scaled():
        generator = torch.Generator().manual_seed(7)
        a, b = integers(generator, 1000, 37).half(), integers(generator, 1000, 19).half()
        want = 0.5 * (a.float().T @ b.float())

        def go():
            set_chip(80, 4)
            yield raw.gemm(a.cuda().T, b.cuda(), alpha=0.5, out_dtype=torch.float32).cpu(), want

        return go

    two = GemmCase("fp32", 36, 40, 2003, True, True)
    problems = [(two, 2, 80), *phased()]
    return [scaled(), *(checked(case, sm_count, capability=capability) for case, sm_count, capability in problems)]


def op_runs(names: Sequence[str]) -> list[Callable[[], Iterator]]:
    """The ops' samples, against what the emulator makes of them."""

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
    backward = ak._raw.norm_backward.op
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
        "narrow": narrow_runs,
        "repacked": repacked_runs,
        "phased": phased_runs,
        "shared rows": shared_row_runs,
        "symmetric": symmetric_runs,
    }
    if isinstance(cases, str) and cases in others:
        return others[cases]()
    return gemm_runs(cases) if isinstance(cases, str) else op_runs(cases)

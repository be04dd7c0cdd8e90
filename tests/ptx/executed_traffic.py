"""Traffic of the kernels, counted by the interpreter (docs/ptx.md): bytes of the 32-byte sectors that accesses of global memory touch over
the bytes that they use, and bank conflicts of shared memory, within the budgets below."""

import contextlib
import itertools
import re
from dataclasses import dataclass

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw.check_and_norm import check_and_norm
from amp_kernels._raw.exponent_histogram import exponent_histogram
from amp_kernels._raw.unscale import unscale_
from tools.ptx.interpreter.traffic import Count, Traffic, counted

from ..ops import raw
from .executed_gemm_edges import GemmCase, executed
from .gemm_cases import Case, cases, in_turns, operands, phased, run
from .preloaded import machine, set_chip
from .test_ptx import shipped, template

machine()
F16, F32 = torch.bfloat16, torch.float32


def ones(*size, dtype=F16, grad=False):
    return torch.ones(*size, dtype=dtype, device="cuda", requires_grad=grad)


def norm(columns: int, dtype=F16, rows: int = 8):
    x, weight = ones(rows, columns, dtype=dtype, grad=True), ones(columns, dtype=dtype, grad=True)
    y = ak.layer_norm(x, (columns,), weight, weight)
    y.backward(torch.ones_like(y))


def loss(columns: int):
    x = ones(4, columns, grad=True)
    ak.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device="cuda"), reduction="sum").backward()


def step(name: str, **options):
    param = torch.nn.Parameter(ones(64, 256))
    param.grad = torch.ones_like(param)
    getattr(ak.optim, name)([param], lr=0.1, **options).step()


def embedding():
    weight = ones(64, 256, grad=True)
    y = ak.embedding(torch.arange(256, device="cuda") % 48, weight)
    y.backward(torch.ones_like(y))


def rotary():
    q, k = (ones(2, 4, 64, 128, grad=True) for _ in range(2))
    for weights in ({}, {"q_weight": ones(128, grad=True), "k_weight": ones(128, grad=True)}):
        y, z = ak.rotary(q, k, *(ones(64, 128) for _ in range(2)), **weights)
        (y.float().sum() + z.float().sum()).backward()


def routing():
    places = torch.arange(64, dtype=torch.int32, device="cuda").view(32, 2)
    REGISTRY["spread_rows"](ones(32, 512), places, weights=ones(32, 2, dtype=F32))
    REGISTRY["combine_rows"](ones(64, 512), places, weights=ones(32, 2, dtype=F32))


def in_order():
    with ak.batch_invariant():
        embedding()
        norm(256, rows=128)


def products(kernel: str):
    """The smallest problem of every tile, and one that is split."""
    found: dict[tuple, Case] = {}
    for case in sorted((c for c in cases() if c.kernel == kernel), key=lambda c: c.m * c.n * c.k):
        found.setdefault(("splits",) if case.splits else (case.tile,), case)
    for case in found.values():
        set_chip(int(kernel[2:]), case.sm_count)
        run(case, *(t.cuda() for t in operands(case, torch.float16, 0)))


def grouped():
    set_chip(80, 2)
    offs = torch.tensor([64, 128], dtype=torch.int32, device="cuda")
    ak.grouped_mm(ones(128, 64), ones(2, 64, 128), offs=offs)


def phases():
    case, sm_count, capability = phased()[0]
    executed(case, torch.float16, sm_count, 0, capability=capability)


CALLS = {
    "check_and_norm": lambda: check_and_norm([ones(2**14)]),
    "check_and_norm per tensor": lambda: check_and_norm([ones(2**14)], per_tensor=True),
    "unscale": lambda: unscale_([ones(2**14)], ones((), dtype=F32), ones((), dtype=F32)),
    "histogram": lambda: exponent_histogram([ones(2**13)]),
    "cast": lambda: REGISTRY["cast_"]([ones(2**14)], [ones(2**14, dtype=F32)]),
    "column_sums": lambda: REGISTRY["column_sums"](ones(256, 512)),
    "activation": lambda: REGISTRY["activation_forward"](ones(64, 512), activation="gelu"),
    "activation's backward": lambda: REGISTRY["activation_backward"](ones(64, 512), ones(64, 512), activation="gelu"),
    "and sums": lambda: REGISTRY["activation_backward"](ones(256, 512), ones(256, 512), activation="gelu", bias_grad=True),
    "swiglu": lambda: REGISTRY["activation_forward"](ones(64, 512), activation="swiglu"),
    "swiglu's backward": lambda: REGISTRY["activation_backward"](ones(64, 256), ones(64, 512), activation="swiglu"),
    "embedding": embedding,
    "rotary": rotary,
    "routing": routing,
    "in order": in_order,
    "grouped": grouped,
    "sm80": lambda: products("sm80"),
    "sm90": lambda: products("sm90"),
    "copied": lambda: executed(GemmCase("plain", 131, 40, 521), torch.float16, 1, 0),
    "phases": phases,
    **{f"norm {n} {dtype}": lambda n=n, dtype=dtype: norm(n, dtype) for n in (768, 2048) for dtype in (F16, F32)},
    "norm, long": lambda: ak.layer_norm(ones(2, 9216), (9216,)),
    "norm, unaligned": lambda: norm(1001),
    **{f"loss {n}": lambda n=n: loss(n) for n in (1024, 16384)},
    **{f"{name} {options}": lambda name=name, options=options: step(name, **options)
       for name in ("AdamW", "SGD", "Lion", "LAMB", "Muon") for options in ({}, {"state_dtype": "8bit"})
       if (name, len(options)) != ("Muon", 1)},
}  # fmt: skip
FEW = 4096  # bytes of a kind, below which a kernel's accesses are flags, scales and ends of sums


@dataclass(frozen=True)
class Most:
    """Limits of a kernel, of all its instances and calls above together."""

    loads: float = 1.1  # bytes of sectors over the bytes used
    stores: float = 1.05
    boxes: float = 1.1
    conflicts: float = 0.0  # of the wavefronts
    why: str = ""


HALVES = "two words of 16 bytes of each of its 8 elements of 4 bytes: a sector is touched twice"
MOST = {
    "activation_backward_sums_kernel": Most(conflicts=0.34, why="partial sums, once a block"),
    "column_sums_kernel": Most(conflicts=0.34, why="partial sums, once a block"),
    "combine_rows_kernel": Most(loads=1.15, why="a weight for each row"),
    "embedding_in_order_kernel": Most(loads=1.4, stores=2, why="fp32 sums: " + HALVES),
    "embedding_joints_kernel": Most(loads=1.9, why="fp32 partial sums: " + HALVES),
    "embedding_pieces_kernel": Most(stores=1.6, why="fp32 partial sums: " + HALVES),
    "gemm_repack_kernel": Most(loads=6.1, why="odd lines, by elements"),
    "gemm_add_phases_kernel": Most(loads=1.5, why="unaligned rows"),
    "gemm_sm80_kernel": Most(stores=1.3, why="narrow tiles"),
    "gemm_sm90_kernel": Most(
        boxes=1.2, loads=2, conflicts=0.03, why="fp32 results and narrow tiles, behind the main loop"
    ),
    "lamb_moments_kernel": Most(loads=1.25, why="with 8-bit moments " + HALVES),
    "norm_backward_kernel": Most(loads=1.4, stores=1.3, why="unaligned rows"),
    "norm_forward_kernel": Most(loads=1.2, stores=1.5, why="unaligned rows"),
    "rotary_gradient_kernel": Most(conflicts=0.45, why="sums of the weights' gradients, once a block"),
    "unit_sums_kernel": Most(loads=1.3, why="a thread has a column of 16 bits, and each row's mean and rstd"),
    "update8_kernel": Most(loads=1.7, stores=1.7, why=HALVES),
}
# Kernels that the calls above do not start.
ELSEWHERE = {
    "judge_units_kernel": "one warp a unit",
    "norm_backward_sums_kernel": "rows too long for the registers of a block: minutes here",
    "norm_forward_resident_kernel": "the same",
    "update_scale_kernel": "one warp",
}


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    """Of all calls, each in schedule 0."""
    machine().seed = 0
    with counted(machine().device) as found:
        for call in CALLS.values():
            set_chip(90, 2)
            call()
    return found


def by_kernel(traffic: Traffic) -> dict[tuple[str, str], Count]:
    found: dict[tuple[str, str], Count] = {}
    for (name, kind, _), count in traffic.counts.items():
        found.setdefault((template(name), kind), Count()).add(count)
    return found


def beyond(traffic: Traffic) -> list[str]:
    """The counts above their budgets."""
    wrong = []
    for (kernel, kind), count in by_kernel(traffic).items():
        most = MOST.get(kernel, Most())
        limit = most.boxes if kind.startswith("boxes") else most.conflicts if kind == "shared" else vars(most)[kind]
        found = count.conflicts / max(count.wavefronts, 1) if kind == "shared" else count.waste * (count.used >= FEW)
        if found > limit:
            wrong.append(f"{kernel}, {kind}: {found:.2f}, at most {limit}")
    return wrong


def test_no_kernel_moves_more_than_its_budget(traffic):
    assert not beyond(traffic)
    assert {kernel for kernel, _ in by_kernel(traffic)} == shipped() - set(ELSEWHERE)


LOOPS = [("gemm_sm80_kernel", "ldmatrix"), ("gemm_sm80_kernel", "cp.async"), ("gemm_sm90_kernel", "stmatrix")]


@pytest.mark.parametrize(("kernel", "op"), LOOPS)
def test_no_bank_conflict_in_a_main_loop(traffic, kernel, op):
    """On Hopper TMA and wgmma have shared memory to themselves; 16-bit results leave by stmatrix."""
    found = traffic.of(kernel, "shared", op)
    assert found.wavefronts > 1000
    assert found.conflicts == 0


def test_a_swizzle_that_is_missing_on_both_sides_is_noticed():
    """Chunks that neither the copy nor ldmatrix exchanges give the same result, four times as slowly."""
    case = min((c for c in cases() if c.kernel == "sm80"), key=lambda c: c.m * c.n * c.k)
    it = set_chip(80, case.sm_count)
    it.seed, (a, b) = 0, operands(case, torch.float16, 0)

    def loads(rewrite) -> tuple[torch.Tensor, Count]:
        it.rewrite = rewrite
        try:
            with counted(it.device) as found:
                result = run(case, a.cuda(), b.cuda()).cpu()
        finally:
            it.rewrite = None
            it.forget()
        return result, found.of("gemm_sm80_kernel", "shared", "ldmatrix")

    def without(chunks):
        """The text with one operand of each exclusive or, perhaps the chunk, in place of the result."""
        operand = r"xor\.b32 (%r\d+), (%r\d+), (%r\d+);"

        def rewritten(name, text):
            left = iter(chunks)
            return re.sub(operand, lambda m: f"mov.b32 {m[1]}, {m[2 + next(left)]};", text)

        return rewritten

    right, swizzled = loads(None)
    assert swizzled.conflicts == 0
    for chunks in itertools.product((0, 1), repeat=4):
        with contextlib.suppress(RuntimeError):
            result, planted = loads(without(chunks))
            if torch.equal(result, right):
                break
    assert torch.equal(result, right)
    assert planted.wavefronts == 4 * swizzled.wavefronts


def test_a_kernel_beyond_its_budget_is_named(traffic):
    wasteful = Traffic()
    name, kind, text = next(key for key in traffic.counts if template(key[0]) == "unscale_kernel" and key[1] == "loads")
    wasteful.counts[name, kind, text] = Count(accesses=64, used=FEW, sectors=2 * FEW // 32)
    wasteful.counts[name, "shared", text] = Count(accesses=64, wavefronts=128, conflicts=64)
    assert beyond(wasteful) == ["unscale_kernel, loads: 2.00, at most 1.1", "unscale_kernel, shared: 0.50, at most 0.0"]


@pytest.mark.parametrize(
    ("more", "sectors", "lines", "slower"), [(0, 4, 1, 1.0), (16, 4, 1.75, 1.19), (8, 4.5, 1.875, 1.27)]
)
def test_rows_across_lines_are_what_made_one_product_slow(more, sectors, lines, slower):
    """4096x4096x4096 with rows of 8,208 bytes took 1.40 times as long as with 8,192 in tiles of 128 x 128, 23328x1152x4304 with 8,608
    1.19 times (docs/ptx.md). Here rows are as far behind a line. An SM takes a line of L2 in two cycles, or a part of one."""
    case = in_turns()
    it = set_chip(90, case.sm_count)
    it.seed = 0
    a, b = (torch.ones(rows, 128 + more, dtype=torch.float16).cuda()[:, :128] for rows in (case.m, case.n))
    with counted(it.device) as found:
        raw.gemm(a, b.T)
    boxes = found.of("gemm_sm90_kernel", "boxes in")
    assert (boxes.sectors / boxes.accesses, boxes.lines / boxes.accesses) == (sectors, lines)
    assert boxes.waste == sectors / 4

    def step(rows: int, wgmma: int) -> float:
        """Cycles of a k step: `rows` of 128 bytes that the block loads itself, and its products."""
        return max(wgmma, 2 * rows * lines) / max(wgmma, 2 * rows)

    # 128 x 128 with a cluster of two, which share one operand; 128 x 256 with a cluster of two. 27 cycles hand a stage over.
    assert round(step(64 + 128, 512 + 2 * 27), 2) == slower
    assert step(128 + 128, 1024 + 2 * 27) == 1

"""Triton kernels beside products and updates, compiled for GPUs that are not there: they compute in fp32, read and write 16 bytes at a
time, spill nothing and leave room for the programs that share an SM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch

from amp_kernels._triton import (
    _tables,
    cast,
    check_and_norm,
    column_sums,
    cross_entropy_rows,
    embedding_accumulate,
    exponent_histogram,
    norm_backward,
    norm_forward,
    rotary,
    routing,
)

from . import aot

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ARCHS = (80, 90, 100, 120)
LOAD, STORE, DOUBLES, LOAD_FP64 = r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32", r"\.f64", r"ld\.global\.v2\.b64"
#: fp16 and bf16 take one 16-byte load for a thread's eight elements, fp32 two, fp64 four. A lost alignment hint or a masked main loop
#: makes all of them scalar.
OF_A_LIST = {LOAD: 4, LOAD_FP64: 4}


@dataclass(frozen=True)
class Rules:
    """``exactly``, ``least``: how often a pattern occurs in the PTX of the first kernel, and of each. ``never``: in none.

    ``programs``: those that share an SM, of 128 threads each.
    """

    kernels: int = 1
    exactly: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    never: str = DOUBLES
    registers: int = 255
    programs: int = 1
    stack: int = 0
    shared: int = 166_912


def cases():
    """(name, architecture, launch, rules)."""
    for arch in ARCHS:
        for to, of, seed in ((BF16, F32, None), (F32, F16, None), (F16, F32, 3)):
            # A program of 128 threads takes 2,048 elements at a time: 16 a thread. One launch for a list of one pair of dtypes.
            least = {r"ld\.global\.cg\.v4\.b32": of.itemsize, r"st\.global\.cs\.v4\.b32": to.itemsize}
            rules = Rules(least=least, never=rf"{DOUBLES}|\.ftz", programs=cast.PROGRAMS_PER_SM)
            yield (
                f"cast of {of} to {to}",
                arch,
                lambda to=to, of=of, seed=seed: cast.cast_(*lists(to, of), seed=seed),
                rules,
            )
        # Triton 3.8 spills a value in the loop over runs, outside of those over elements.
        rules = Rules(exactly=OF_A_LIST, programs=exponent_histogram.PROGRAMS_PER_SM, never="nothing", stack=8)
        yield "histogram", arch, lambda: exponent_histogram.exponent_histogram(lists(BF16)[0]), rules
        for columns in (768, 4096, 8192, 131_072):
            # A scalar argument that became float64: Liger-Kernel#1358.
            rules = Rules(
                2, least={r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64": 1}, never=rf"{DOUBLES}|atom|red\.global"
            )
            yield f"norm of {columns}", arch, lambda columns=columns: norms(columns), rules
    for arch in ARCHS[:3]:
        for tensors, scaled in ((1, False), (161, True), (_tables.TENSORS_PER_TABLE, True)):
            for per_tensor in (False, True):
                # Two saved registers outside of the loops are tolerated, spills within them are more.
                rules = Rules(
                    2, OF_A_LIST, never="nothing", programs=check_and_norm.PROGRAMS_PER_SM, stack=16, shared=4096
                )
                call = lambda n=tensors, s=scaled, each=per_tensor: check_and_norm.check_and_norm(  # noqa: E731
                    lists(BF16, count=n)[0], torch.ones(()) if s else None, per_tensor=each
                )
                yield f"check_and_norm of {tensors}, per tensor {per_tensor}", arch, call, rules
    for arch in ARCHS:  # first and second elements of pairs
        rules = Rules(2, least={LOAD: 2, STORE: 2}, never=rf"{DOUBLES}|atom|red\.global", registers=240)
        yield "rotary", arch, rotate, rules
    for arch, dtype, frequency in (*((arch, BF16, False) for arch in ARCHS), (90, F32, True)):
        rules = Rules(2, least={LOAD: 1, STORE: 1}, registers=64)
        yield f"embedding of {dtype}", arch, lambda dtype=dtype, f=frequency: embed(dtype, f), rules
    for arch, dtype in (*((arch, BF16) for arch in ARCHS), (90, F32)):
        # A program of 128 threads takes 32 rows of 128 columns at a time: 32 elements a thread.
        rules = Rules(2, exactly={LOAD: 2 * dtype.itemsize}, registers=80, shared=4096)
        yield f"column_sums of {dtype}", arch, lambda dtype=dtype: sum_columns(dtype), rules
        rules = Rules(2, least={LOAD: 1, STORE: 1}, registers=64)
        yield f"routing of {dtype}", arch, lambda dtype=dtype: route(dtype), rules
    smooth = {"label_smoothing": 0.1, "z_loss": 1e-4}
    for arch, dtype, target, options in (
        *((arch, BF16, None, smooth) for arch in ARCHS),
        *((90, BF16, BF16, {}), (90, BF16, None, {}), (80, F32, None, {})),
    ):
        # A thread takes 16 elements of a block, of which two words of 16 bits, or four of fp32, are 16 bytes each.
        walks, words = 2 if target is None and not options else 3, 16 * dtype.itemsize // 16
        rules = Rules(exactly={LOAD: walks * words, STORE: words}, registers=128, shared=4096)
        call = lambda dtype=dtype, target=target, options=options: loss(dtype, target, options)  # noqa: E731
        yield f"loss of {dtype}, {target}, {list(options)}", arch, call, rules


def lists(*dtypes, count=161):
    return [[torch.zeros(8, dtype=dtype)] * count for dtype in dtypes]


def norms(columns):
    x, residual, weight = torch.zeros(2, columns, dtype=BF16), torch.zeros(2, columns), torch.ones(columns)
    statistic = torch.zeros(2)
    norm_forward.norm_forward(x, weight, weight, residual, eps=0.1, centred=True, out_dtype=BF16)
    options = {"parameters": 2, "branch_dtype": BF16, "strips": 1}
    norm_backward._run(x, residual, statistic, statistic, weight, residual, **options)


def rotate():
    q, k = torch.zeros(1, 4, 32, 128, dtype=BF16), torch.zeros(1, 4, 8, 128, dtype=BF16)
    cos, weight = torch.zeros(4, 128, dtype=BF16), torch.ones(128, dtype=BF16)
    options = {"eps": 1e-6, "interleaved": False, "out_dtype": BF16}
    rotary.rotary_forward(q, k, cos, cos, weight, weight, **options)
    rotary.rotary_backward(q, k, cos, cos, q, k, weight, weight, **options)


def embed(dtype, frequency):
    index = torch.zeros(100, dtype=torch.int64)
    table, grad = torch.zeros(4, 768), torch.zeros(100, 768, dtype=dtype)
    embedding_accumulate.embedding_accumulate_(table, grad, index, index, scale_by_frequency=frequency)


def sum_columns(dtype):
    column_sums.column_sums(torch.zeros(100, 768, dtype=dtype))


def route(dtype):
    places, rows = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(8, 4096, dtype=dtype)
    routing.spread_rows(torch.zeros(4, 4096, dtype=dtype), places, torch.zeros(4, 2), rows)
    routing.combine_rows(rows, places, torch.zeros(4, 2))


def loss(dtype, target, options):
    logits = torch.zeros(3, 50257, dtype=dtype)
    y = torch.zeros(3, dtype=torch.int64) if target is None else logits.to(target)
    call = logits, y, None, torch.ones(3), torch.zeros(3), torch.empty_like(logits)
    cross_entropy_rows.cross_entropy_rows_(*call, **options)


@pytest.mark.parametrize(
    ("arch", "launch", "rules"), [pytest.param(*case, id=f"{name}-{case[0]}") for name, *case in cases()]
)
def test_machine_code(arch: int, launch: Callable[[], None], rules: Rules):
    with aot.compiling_for(arch) as kernels:
        launch()
    assert len(kernels) == rules.kernels
    for pattern, count in rules.exactly.items():
        assert aot.count(pattern, kernels[0]) == count, pattern
    for kernel in kernels:
        assert not aot.count(rules.never, kernel)
        for pattern, count in rules.least.items():
            assert aot.count(pattern, kernel) >= count, pattern
        used = aot.usage(kernel)
        assert used.stack <= rules.stack, used
        assert used.registers <= rules.registers, used
        assert -(-used.registers // 8) * 8 * 128 * rules.programs <= 65_536, used  # allocated in eights
        assert used.shared <= rules.shared, used

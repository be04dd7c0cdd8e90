"""The CUDA GEMM kernels on the GPU: every tile, split, swap, layout and epilogue that the planner chooses, exactly; NaN around the
operands; reruns, sizes beyond 2^31, graphs. Operands are small integers, so every sum is exact and one lost product shows."""

import itertools

import pytest
import torch

import amp_kernels as ak
from amp_kernels._raw.gemm import gemm_op
from amp_kernels._raw.syrk import mirrored
from amp_kernels._raw.syrk import op as syrk

from ..helpers.bounds import assert_within, reference_and_bound
from ..helpers.generators import HALF_DTYPES
from ..helpers.poison import assert_only_written, embed, poisoned_allocations
from ..ops.raw import gemm, gemm_accumulate_, gemm_dact
from . import launches
from .gemm_cases import CASES, SYMMETRIC, GemmCase

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _cuda_kernels():
    with ak.backend("cuda"):
        yield


def integers(*shape: int, dtype: torch.dtype, limit: int = 2) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randint(-limit, limit + 1, shape, generator=generator, device=DEVICE).to(dtype)


def operands(case: GemmCase, dtype: torch.dtype, offset: int = 0, batch: tuple[int, ...] = ()):
    """A and B in the case's layouts, with NaN after each row and past the last one, and their exact product."""
    a, b = (integers(*batch, *shape, dtype=dtype) for shape in ((case.m, case.k), (case.k, case.n)))
    exact = a.double() @ b.double()
    a, _ = embed(a, transposed=case.m_major_a, offset=offset, pad=8)
    b, _ = embed(b, transposed=not case.n_major_b, offset=offset, pad=8)
    return a, b, exact


def run(case: GemmCase, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """The call of the case, with new operands of its epilogue."""
    batch = a.shape[:-2]
    if case.kind == "accumulate":
        c = integers(*batch, case.m, case.n, dtype=torch.float32, limit=1000)
        return [gemm_accumulate_(c, a, b)]
    if case.kind == "dact":
        z = integers(*batch, case.m, case.n, dtype=a.dtype)
        return list(gemm_dact(a, b, z, activation="relu", bias_grad=True))
    if case.kind in ("gelu", "swiglu"):
        bias = integers(case.n, dtype=torch.float32, limit=9)
        return list(gemm(a, b, bias, activation=case.kind, preact=True))
    return [gemm(a, b, out_dtype=torch.float32 if case.kind == "fp32" else None)]


def check(case: GemmCase, a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> None:
    batch = a.shape[:-2]
    with poisoned_allocations():
        results = run(case, a, b)
    if case.kind in ("plain", "fp32"):
        assert torch.equal(results[0], exact.to(results[0].dtype))
    elif case.kind == "accumulate":
        before = integers(*batch, case.m, case.n, dtype=torch.float32, limit=1000)
        assert torch.equal(results[0].double(), before + exact)
    elif case.kind == "dact":
        z = integers(*batch, case.m, case.n, dtype=a.dtype)
        expected = torch.where(z > 0, exact, 0.0)
        assert torch.equal(results[0], expected.to(a.dtype))
        assert torch.equal(results[1].double(), expected.flatten(0, -2).sum(0))
    else:
        bias = integers(case.n, dtype=torch.float32, limit=9)
        assert torch.equal(results[1], (exact + bias).to(a.dtype))
        bound = reference_and_bound(a, b, bias, activation=case.kind, out_dtype=a.dtype)
        assert_within(results[0], *bound)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("batch", "n", "by_columns"), SYMMETRIC)
def test_symmetric_products_in_every_tile(batch, n, by_columns, dtype):
    """A and B differ, so every element says which triangle it was computed in."""
    a, b, c = (integers(batch, n, columns, dtype=dtype) for columns in (72, 72, n))
    b = b.flip(1)
    expected = a.double() @ b.double().mT * 0.5 - 2 * c.double() + 3 * torch.eye(n, device=DEVICE).double()
    a, b = (embed(x, transposed=by_columns, offset=0, pad=8)[0] for x in (a, b))
    with poisoned_allocations():
        out = syrk(a, b, c, alpha=0.5, beta=-2.0, diagonal=3.0)
    assert torch.equal(out, mirrored(expected).to(dtype))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_plan(case, dtype):
    check(case, *operands(case, dtype))


@pytest.mark.parametrize("kind", ["plain", "accumulate", "swiglu", "dact"])
def test_batches(kind):
    """More tiles than multiprocessors, and a batch that stands still."""
    for m, n, k in ((72, 144, 200), (129, 66, 73)):
        case = GemmCase(kind, m, n, k, m_major_a=True, n_major_b=True)
        a, b, exact = operands(case, torch.bfloat16, batch=(150,))
        check(case, a, b, exact)
        a = a[:1].expand_as(a)
        check(case, a, b, a.double() @ b.double())


@pytest.mark.parametrize("offset", range(1, 9))
def test_offsets(offset):
    """Operands that begin so many elements after an aligned address, long enough to fill the kernels' pipelines."""
    for kind, layout in itertools.product(("plain", "dact"), itertools.product((False, True), repeat=2)):
        for m, n, k in ((136, 264, 520), (135, 262, 521)):
            case = GemmCase(kind, m, n, k, *layout)
            check(case, *operands(case, torch.float16, offset))


EDGES = (1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257)


@pytest.mark.parametrize("n_major_b", [False, True])
@pytest.mark.parametrize("m_major_a", [False, True])
def test_edge_sizes(m_major_a, n_major_b):
    """Each size against a few of the others, plain and accumulated."""
    others = (8, 65, 256)
    for x, y, z in itertools.product(EDGES, others, others):
        for m, n, k in {(x, y, z), (y, x, z), (y, z, x)}:
            for kind in ("plain", "accumulate"):
                case = GemmCase(kind, m, n, k, m_major_a, n_major_b)
                check(case, *operands(case, torch.bfloat16))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.0, 0.0), (-0.5, 2.0)])
def test_accumulation_writes_nothing_beside_c(transposed, alpha, beta):
    """c with gaps, aligned and not, of tiles' sizes and others; with beta = 0 the NaN in it is not read."""
    for (m, n, k), pad in itertools.product(((264, 520, 1096), (131, 262, 201), (128, 128, 128)), (0, 3, 8)):
        case = GemmCase("accumulate", m, n, k, m_major_a=True, n_major_b=True)
        a, b, exact = operands(case, torch.bfloat16)
        before = integers(m, n, dtype=torch.float32, limit=1000)
        start = before if beta else torch.full_like(before, torch.nan)
        c, buffer = embed(start, transposed=transposed, pad=pad)
        gemm_accumulate_(c, a, b, alpha=alpha, beta=beta)
        assert torch.equal(c.double(), alpha * exact + beta * before)
        assert_only_written(buffer, c)


def test_sums_over_micro_batches_are_exact():
    """A main_grad over 64 micro-batches, of which each alone would be rounded in 16 bits."""
    for m, n in ((768, 520), (131, 67)):
        main = torch.full((m, n), torch.nan, device=DEVICE)
        total = torch.zeros(m, n, dtype=torch.float64, device=DEVICE)
        for i in range(64):
            dz, x = integers(200 + i, m, dtype=torch.bfloat16), integers(200 + i, n, dtype=torch.bfloat16, limit=7)
            gemm_accumulate_(main, dz.t(), x, beta=0.0 if i == 0 else 1.0)
            total += dz.double().t() @ x.double()
        assert torch.equal(main.double(), total)


RERUN = [
    GemmCase("plain", 264, 2056, 4104),
    GemmCase("fp32", 72, 3080, 4104),
    GemmCase("accumulate", 768, 768, 8200, True, True),
    GemmCase("swiglu", 520, 3080, 1096),
    GemmCase("dact", 1032, 1544, 520, False, True),
    GemmCase("plain", 8, 5128, 4104, True),
    GemmCase("plain", 257, 1025, 1097),
    GemmCase("dact", 257, 1025, 1097),
]


@pytest.mark.parametrize("case", RERUN, ids=str)
def test_fifty_reruns_are_bitwise_equal(case):
    """Normal numbers, whose sum depends on the order."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        shape = (columns, rows) if transposed else (rows, columns)
        t = torch.randn(shape, generator=generator, device=DEVICE).bfloat16()
        return t.t() if transposed else t

    a, b = normal(case.m, case.k, case.m_major_a), normal(case.k, case.n, not case.n_major_b)
    first = run(case, a, b)
    for _ in range(50):
        assert all(torch.equal(x, y) for x, y in zip(first, run(case, a, b), strict=True))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_a_row_does_not_depend_on_the_batch(dtype):
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(4096, 1096, generator=generator, device=DEVICE).to(dtype)
    for n in (264, 261):
        weight = torch.randn(n, 1096, generator=generator, device=DEVICE).to(dtype)
        whole = gemm(x, weight.t(), batch_invariant=True)
        for rows in (1, 2, 7, 8, 63, 64, 65, 128, 1000, 4095):
            assert torch.equal(gemm(x[:rows], weight.t(), batch_invariant=True), whole[:rows])
            assert torch.equal(gemm(x[-rows:], weight.t(), batch_invariant=True), whole[-rows:])


@pytest.mark.parametrize("columns", [32_768, 32_769])
def test_a_result_of_more_than_two_to_the_31_elements(columns):
    rows = 2**16 + 100
    _needs_memory(12)
    values = (torch.arange(rows, device=DEVICE) % 7).bfloat16()
    a, b = values[:, None].expand(rows, 16).contiguous(), torch.ones(16, columns, device=DEVICE).bfloat16()
    b[:, -1] = 3
    out = gemm(a, b)
    for part in range(0, rows, 8192):
        piece = slice(part, part + 8192)
        assert (out[piece, :-1] == 16 * values[piece, None]).all()
        assert (out[piece, -1] == 48 * values[piece]).all()


@pytest.mark.parametrize("k", [2**14 + 8, 2**14 + 9])
def test_an_operand_of_more_than_two_to_the_31_elements(k):
    _needs_memory(12)
    a = torch.zeros(2**17 + 64, k, dtype=torch.bfloat16, device=DEVICE)
    a[-1] = 1
    c = gemm(a, torch.ones(k, 32, dtype=torch.bfloat16, device=DEVICE), out_dtype=torch.float32)
    assert (c[-1] == k).all()
    assert (c[:-1] == 0).all()


def _needs_memory(gibibytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < gibibytes * 2**30:
        pytest.fail(f"this test needs {gibibytes} GiB of free GPU memory")


GRAPHED = [
    GemmCase("plain", 264, 2056, 4104),  # splits: scratch and counters
    GemmCase("dact", 264, 400, 1096),
    GemmCase("swiglu", 131, 262, 1097),
    GemmCase("fp32", 264, 400, 200, True, True),
]


@pytest.mark.parametrize("case", GRAPHED, ids=str)
def test_graphs_and_other_streams(case):
    """A replay computes with what then stands in the operands; a call neither waits nor leaves the current stream."""
    a, b, _ = operands(case, torch.bfloat16)
    extra = integers(case.m, case.n, dtype=torch.bfloat16)
    bias = integers(case.n, dtype=torch.float32, limit=9)

    def call():
        if case.kind == "dact":
            return gemm_dact(a, b, extra, activation="relu", bias_grad=True)
        if case.kind == "swiglu":
            return gemm(a, b, bias, activation="swiglu", preact=True)
        return (gemm(a, b, out_dtype=torch.float32 if case.kind == "fp32" else None),)

    call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with launches.no_waits(), torch.cuda.stream(stream):
        beside = call()
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(x, y) for x, y in zip(beside, call(), strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for factor in (-1, 2):
        a.mul_(factor)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, call(), strict=True))


def test_all_of_this_ran_on_the_cuda_kernels():
    assert ak._dispatch.policy.select(gemm_op, torch.empty(0, device=DEVICE)) == "cuda"

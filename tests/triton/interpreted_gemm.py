"""The Triton GEMM in the interpreter; run by test_interpreted.py with TRITON_INTERPRET=1.

Most tests use a tile of 16 x 32 x 16, so that a few dozen rows and columns already make several tiles, groups of tiles and steps.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw.gemm import gemm, gemm_accumulate_
from amp_kernels._triton import gemm as host
from amp_kernels._triton._autotune import GemmConfig
from amp_kernels.testing.backends import check_backend
from amp_kernels.testing.generators import EXACT_INTEGERS, HALF_DTYPES, LAYOUTS, OUT_DTYPES, integers
from amp_kernels.testing.poison import assert_only_written, embed, poisoned_allocations

CONFIG = GemmConfig(16, 32, 16, num_warps=4, num_stages=2, group_m=2)
TMA = GemmConfig(16, 32, 16, num_warps=4, num_stages=2, group_m=2, tma=True)


@pytest.fixture(autouse=True)
def _backend():
    with ak.backend("triton"):
        yield


def rng(*seed):
    return torch.Generator().manual_seed(hash(seed) % 2**31)


def exact_operands(shape_a, shape_b, dtype, layouts=("row", "row"), limit=2):
    generator = rng(*shape_a, *shape_b)
    return tuple(
        integers(*shape, limit=limit, dtype=dtype, generator=generator, layout=layout)
        for shape, layout in zip((shape_a, shape_b), layouts, strict=True)
    )


@pytest.mark.parametrize("name", ["gemm", "gemm_dact", "gemm_accumulate_"])
def test_samples_of_the_op(name):
    assert check_backend(REGISTRY[name], "triton", "cpu") > 0


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="-".join)
def test_layouts_are_read_in_place(layouts):
    """Sums of small integers, bit for bit, with NaN in the padding of the operands."""
    number = list(itertools.product(LAYOUTS, LAYOUTS)).index(layouts)
    shape, dtype = ((2,), ())[number % 2], HALF_DTYPES[number // 2 % 2]
    a, b = exact_operands((*shape, 37, 41), (*shape, 41, 70), dtype, layouts)
    assert EXACT_INTEGERS[a.dtype] >= 41 * 2 * 2
    c, buffer = embed(torch.full((*shape, 37, 70), math.nan, dtype=a.dtype))
    host.run(c, a, b, config=GemmConfig(32, 64, 32, num_warps=4, num_stages=2))
    assert torch.equal(c.double(), a.double() @ b.double())
    assert_only_written(buffer, c)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_sizes_around_tiles_and_vectors(dtype, out_dtype):
    sizes = [(1, 1, 1), (7, 9, 8), (8, 7, 9), (64, 65, 63), (65, 64, 16), (17, 33, 17), (1, 8, 64), (63, 1, 65)]
    with poisoned_allocations():
        for m, n, k in [*sizes, (0, 5, 3), (5, 0, 3), (0, 0, 0), (5, 3, 0)]:
            a, b = exact_operands((m, k), (k, n), dtype, limit=1)
            assert torch.equal(gemm(a, b, out_dtype=out_dtype).double(), a.double() @ b.double())


@pytest.mark.parametrize("group_m", [1, 3, 8])
def test_every_tile_of_every_batch_is_computed_once(group_m):
    a, b = exact_operands((2, 110, 4), (2, 4, 40), torch.float16)
    c = torch.full((2, 110, 40), math.nan)
    host.run(c, a, b, config=GemmConfig(16, 16, 16, num_warps=4, num_stages=2, group_m=group_m))
    assert torch.equal(c.double(), a.double() @ b.double())


@pytest.mark.parametrize("a_layout", ["row", "column"])
@pytest.mark.parametrize("b_layout", ["row", "column"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_tma_descriptors(a_layout, b_layout, shape, monkeypatch):
    described = []
    descriptor = host._descriptor
    monkeypatch.setattr(host, "_descriptor", lambda *args: described.append(descriptor(*args)) or described[-1])
    a, b = exact_operands((*shape, 40, 48), (*shape, 48, 72), torch.bfloat16, (a_layout, b_layout))
    c = torch.full((*shape, 40, 72), math.nan)
    host.run(c, a, b, config=TMA)
    assert torch.equal(c.double(), a.double() @ b.double())
    assert len(described) == 2


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="-".join)
def test_unaligned_operands_are_copied_for_tma(layouts, monkeypatch):
    """Sums of small integers, with NaN in the operands' padding and in that of the copies."""
    described = []
    descriptor = host._descriptor
    monkeypatch.setattr(host, "_descriptor", lambda *args: described.append(descriptor(*args)) or described[-1])
    shape = ((2,), ())[layouts[0] == layouts[1]]
    a, b = exact_operands((*shape, 37, 41), (*shape, 41, 70), torch.float16, layouts)
    c = torch.full((*shape, 37, 70), math.nan)
    with poisoned_allocations():
        host.run(c, a, b, config=TMA)
    assert torch.equal(c.double(), a.double() @ b.double())
    assert len(described) == 2
    assert all(stride % 8 == 0 for box in described for stride in box.strides[:-1])


@pytest.mark.parametrize("transposed", [False, True])
def test_lines_of_copies_start_where_those_of_the_cuda_kernels_do(transposed):
    _host = pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")
    for width, pitch in ((41, 48), (505, 512), (511, 512), (512, 512), (513, 576), (577, 640)):
        assert _host.gemm_repack_pitch(width) == pitch
        x = torch.randn(1, 3, width, dtype=torch.float32).half()
        copy = host._for_tma(x.mT if transposed else x, 5)
        copy = copy.mT if transposed else copy
        assert torch.equal(copy, x)
        assert copy.stride() == (3 * pitch, pitch, 1)


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("n", [24, 20])
def test_gates_and_values_through_tma(layout, n, monkeypatch):
    """Values of a row-major b that begin within 16 bytes are no TMA box."""
    described = []
    descriptor = host._descriptor
    monkeypatch.setattr(host, "_descriptor", lambda *args: described.append(descriptor(*args)) or described[-1])
    a, b = exact_operands((40, 48), (48, 2 * n), torch.bfloat16, ("row", layout))
    c = torch.full((40, n), math.nan)
    host.run(c, a, b, activation="swiglu", config=replace(TMA, b_tiles=2))
    expected = gemm(a, b, activation="swiglu", out_dtype=torch.float32)
    assert torch.equal(c, expected)
    assert len(described) == (0 if (layout, n) == ("row", 20) else 2)


def test_only_what_tma_can_address_goes_through_it():
    def fits(t, column_major):
        return host._fits_tma(host._layout(t), column_major)

    x = torch.zeros(3, 16, 24, dtype=torch.float16)
    assert fits(x, False)
    assert fits(x.mT, True)
    assert fits(x[:1, :, :21], False), "a tail of the contiguous dimension is clipped"
    for no in (
        x[:, :, 1:],  # address
        x[:, :, ::2],  # no contiguous dimension
        x.mT,  # of the other order
        x[:, :, :0],  # nothing
        x[:1].expand(3, 16, 24),  # one matrix for all batches
        x[:, :1].expand(3, 16, 24),  # one row for all
        torch.zeros(3, 16, 20, dtype=torch.float16),  # rows that do not begin at 16 bytes
        torch.zeros(3 * 388, dtype=torch.float16).as_strided((3, 16, 24), (388, 24, 1)),  # matrices that do not
    ):
        assert not fits(no, False)


def test_access_widths():
    """The width of an access: bounded by the address, the strides and the extent of the contiguous dimension."""
    x = torch.zeros(4, 64, 64, dtype=torch.float16)

    def order(t):
        return host._order(host._layout(t))

    assert order(x) == (False, 8)
    assert order(x.mT) == (True, 8)
    assert order(x[:, :, 4:]) == (False, 4)
    assert order(x[:, :, 1:]) == (False, 1)
    for offset, vec in ((1, 1), (2, 2), (4, 4), (8, 8)):
        assert order(x.flatten()[offset:][: 64 * 64].view(1, 64, 64)) == (False, vec), "the address alone"
    assert order(x[:, :, :62]) == (False, 2)
    assert order(x[:, :33]) == (False, 8)
    assert order(x[:, :, ::2]) == (False, 1)
    assert order(x.flatten()[: 3 * 62 * 62].view(3, 62, 62)) == (False, 2)
    assert order(x.float()) == (False, 4)
    assert order(x[:1, :, :1]) == (False, 1)
    assert order(torch.zeros(1, 64, 1, dtype=torch.float16)) == (True, 8), "a column is contiguous along its rows"
    assert order(x[0, 0].as_strided((1, 1, 64), (7, 5, 1))) == (False, 8), "strides of single rows do not count"


def test_one_rounding_to_nearest_even():
    """1 + 2^-8 is a tie between two bf16 numbers, and 1 + 2^-8 + 2^-16 is not: it must not become one by an earlier rounding."""
    ones = torch.ones(1, 3, dtype=torch.bfloat16)
    column = torch.tensor([[1.0], [2.0**-8], [0.0]], dtype=torch.bfloat16)
    for third, expected in ((0.0, 1.0), (2.0**-16, 1 + 2.0**-7), (-(2.0**-16), 1.0)):
        column[2] = third
        assert gemm(ones, column).item() == expected


def test_k_zero_is_the_activation_of_the_bias():
    for config in (CONFIG, TMA):
        c = torch.full((3, 40), math.nan)
        bias = torch.linspace(-3, 3, 40)
        a, b = torch.empty(3, 0, dtype=torch.float16), torch.empty(0, 40, dtype=torch.float16)
        host.run(c, a, b, bias, activation="relu", config=config)
        assert torch.equal(c, bias.relu().expand(3, 40))


def test_infinity_and_nan_pass_and_overflow_is_infinite():
    a = torch.tensor([[math.inf, 1], [math.nan, 1], [60000.0, 60000.0], [1, 1]], dtype=torch.float16)
    b = torch.ones(2, 1, dtype=torch.float16)
    got = gemm(a, b).flatten().tolist()
    assert got[0] == got[2] == math.inf
    assert math.isnan(got[1])
    assert got[3] == 2
    cancelling = torch.tensor([65504.0, -65504.0], dtype=torch.float16).repeat(512)
    assert gemm(cancelling[None], torch.ones(1024, 1, dtype=torch.float16)).item() == 0


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 0.0), (-2.0, 0.25), (0.0, 1.0)])
def test_accumulate(alpha, beta, column_major):
    for shape in ((), (2,)):
        a, b = exact_operands((*shape, 21, 18), (*shape, 18, 36), torch.float16)
        start = torch.randint(-8, 9, (*shape, 21, 36), generator=rng(alpha, beta)).float()
        expected = alpha * (a.double() @ b.double()) + beta * start.double()
        c, buffer = embed(start if beta else torch.full_like(start, math.nan), transposed=column_major, offset=1)
        assert gemm_accumulate_(c, a, b, alpha=alpha, beta=beta) is c
        assert torch.equal(c.double(), expected)
        assert_only_written(buffer, c)


def test_accumulate_without_terms_scales():
    c = torch.full((3, 4), 6.0)
    empty = torch.empty(3, 0, dtype=torch.bfloat16), torch.empty(0, 4, dtype=torch.bfloat16)
    gemm_accumulate_(c, *empty, beta=0.5)
    assert (c == 3).all()
    gemm_accumulate_(c, *empty, beta=0.0)
    assert (c == 0).all()


@pytest.mark.parametrize("operand_name", ["a", "b", "c"])
@pytest.mark.parametrize(("rows", "stride"), [(33, 2**26), (9, 2**28)])
def test_more_than_2_to_31_elements(operand_name, rows, stride, monkeypatch):
    """Rows 2^26 elements apart: the third tile begins at 2^31. At 2^28 the offsets within a tile reach that, too."""
    # The memory is reserved, not touched: the interpreter must not copy it, as it does after a launch (here onto itself).
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)

    def far_apart(t):
        memory = torch.empty((rows - 1) * stride + t.shape[1], dtype=t.dtype)
        return memory.as_strided(t.shape, (stride, 1)).copy_(t)

    m, k, n = (rows, 8, 16) if operand_name != "b" else (8, rows, 16)
    a, b = exact_operands((m, k), (k, n), torch.float16, limit=1)
    c = torch.zeros(m, n, dtype=torch.float16)
    expected = (a.double() @ b.double()).to(c.dtype)
    a, b, c = (far_apart(t) if name == operand_name else t for name, t in zip("abc", (a, b, c), strict=True))
    layout = host._layout({"a": a, "b": b, "c": c}[operand_name].unsqueeze(0))
    matrix = host._Matrix(layout, k if operand_name == "a" else n)
    assert matrix.fits_int32((16, 16)) == (stride == 2**26)
    host.run(c, a, b, config=GemmConfig(16, 16, 16, num_warps=4, num_stages=2))
    assert torch.equal(c, expected)


def test_arguments_are_checked_before_memory_is_touched():
    """By the op itself, which the functions above call with arguments that they have checked."""
    a, b = torch.zeros(2, 3, dtype=torch.float16), torch.zeros(3, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match="bias has shape"):
        REGISTRY["gemm"](a, b, torch.zeros(1))
    with pytest.raises(ValueError, match="preact has shape"):
        REGISTRY["gemm_dact"](a, b, torch.zeros(1), activation="relu")
    with pytest.raises(ValueError, match="c has shape"):
        REGISTRY["gemm_accumulate_"](torch.zeros(2, 1), a, b)

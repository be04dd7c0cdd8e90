"""The Triton GEMM in the interpreter; run by test_interpreted.py with TRITON_INTERPRET=1.

Tiles of 16 x 32 x 16 make several tiles, groups of tiles and steps of a few dozen rows, columns and terms.
"""

import contextlib
import itertools
import math

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

import amp_kernels as ak
from amp_kernels._checks.activations import ACTIVATIONS
from amp_kernels._raw._product import output_shape
from amp_kernels._triton import gemm as host

from ..helpers.bounds import assert_within, reference_and_bound
from ..helpers.generators import HALF_DTYPES, LAYOUTS, OUT_DTYPES, integers, operand
from ..helpers.poison import assert_only_written, embed, poisoned_allocations
from ..ops.raw import gemm, gemm_accumulate_

TILE = host.Tile(16, 32, 16, warps=4, stages=2)
#: Layouts of a bias or a residual, among NaN.
SIDES = {
    **{name: LAYOUTS[name] for name in ("padded", "padded_column", "offset", "strided")},
    "one row for all": lambda t: t[..., :1, :].expand_as(t),
    "one column for all": lambda t: t[..., :1].expand_as(t),
}


@pytest.fixture(autouse=True)
def _backend(request):
    poison = contextlib.nullcontext() if "monkeypatch" in request.fixturenames else poisoned_allocations()
    with ak.backend("triton"), poison:
        yield


def rng(*seed):
    return torch.Generator().manual_seed(hash(seed) % 2**31)


def exact_operands(shape_a, shape_b, dtype, layouts=("row", "row"), limit=2):
    """Integers whose sums every dtype holds."""
    generator = rng(*shape_a, *shape_b)
    return tuple(
        integers(*shape, limit=limit, dtype=dtype, generator=generator, layout=layout)
        for shape, layout in zip((shape_a, shape_b), layouts, strict=True)
    )


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="-".join)
def test_layouts_are_read_in_place(layouts):
    """NaN in the padding of the operands; results in rows and columns."""
    number = list(itertools.product(LAYOUTS, LAYOUTS)).index(layouts)
    shape, dtype = ((2,), ())[number % 2], HALF_DTYPES[number // 2 % 2]
    a, b = exact_operands((*shape, 37, 41), (*shape, 41, 70), dtype, layouts)
    c, buffer = embed(
        torch.full((*shape, 37, 70), math.nan, dtype=dtype), transposed=number % 3 == 0, offset=number % 2
    )
    host.run(c, a, b, tile=TILE)
    assert torch.equal(c.double(), a.double() @ b.double())
    assert_only_written(buffer, c)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_sizes_around_tiles_and_without_elements(dtype, out_dtype):
    sizes = [(1, 1, 1), (7, 9, 8), (64, 65, 63), (65, 64, 64), (129, 17, 17), (1, 8, 65), (63, 129, 64)]
    for m, n, k in [*sizes, (0, 5, 3), (5, 0, 3), (0, 0, 0), (5, 3, 0)]:
        a, b = exact_operands((m, k), (k, n), dtype, limit=1)
        assert torch.equal(gemm(a, b, out_dtype=out_dtype).double(), a.double() @ b.double())


@pytest.mark.parametrize("rows", [16, 120, 150])
def test_every_tile_of_every_batch_is_computed_once(rows):
    """One tile of rows, a group of eight, and a second group that is not whole."""
    a, b = exact_operands((2, rows, 4), (2, 4, 70), torch.float16)
    c = torch.full((2, rows, 70), math.nan)
    host.run(c, a, b, tile=TILE)
    assert torch.equal(c.double(), a.double() @ b.double())


def sides(dtype, shape, number):
    """A bias and a residual by number: none, or of either dtype in a layout."""
    generator = rng(number)
    *_, m, n = shape
    biases = (None, (n,), (m, 1), (n,))
    bias, residual = biases[number % 4], None if number % 5 == 0 else torch.randn(shape, generator=generator)
    if bias is not None:
        bias = torch.randn(*bias, generator=generator).to((dtype, torch.float32)[number // 4 % 2])
        bias = embed(bias.expand(1, -1) if bias.ndim == 1 else bias, step=2)[0].view(bias.shape)
    if residual is not None:
        layout = list(SIDES.values())[number % len(SIDES)]
        residual = layout(residual.to((dtype, torch.float32)[number % 2]))
    return bias, residual


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(activation):
    """Every activation with each bias, residuals of both dtypes in every layout, factors, each dtype of the result, in batches, and
    with the pre-activation, which the activation sees unrounded."""
    for i in range(4):
        number = 7 * list(ACTIVATIONS).index(activation) + i
        dtype, out_dtype = HALF_DTYPES[i % 2], OUT_DTYPES[number % 3]
        batch = (2,) if i == 3 else ()
        a = operand(*batch, 21, 72, dtype=dtype, generator=rng(number, 1), layout=("row", "padded_column")[i % 2])
        b = operand(*batch, 72, 84, dtype=dtype, generator=rng(number, 2), layout=("column", "row")[i // 2])
        bias, _ = sides(dtype, (21, 84), number)
        _, residual = sides(dtype, output_shape(a, b, activation), number)
        factors = {"alpha": 0.75, "beta": -1.5} if i % 2 else {}
        y = gemm(a, b, bias, residual, activation=activation, out_dtype=out_dtype, **factors)
        again, z = gemm(a, b, bias, residual, activation=activation, out_dtype=out_dtype, preact=True, **factors)
        expected = {"alpha": factors.get("alpha", 1.0), "out_dtype": out_dtype}
        assert_within(z, *reference_and_bound(a, b, bias, **expected))
        expected |= {"beta": factors.get("beta", 1.0), "activation": activation, "c": residual}
        for result in (y, again):
            assert_within(result, *reference_and_bound(a, b, bias, **expected))
            assert result.is_contiguous()


def test_one_rounding_to_nearest_even():
    """1 + 2^-8 is a tie between two bf16 numbers, and 1 + 2^-8 + 2^-16 is not: it must not become one by an earlier rounding."""
    ones = torch.ones(1, 3, dtype=torch.bfloat16)
    column = torch.tensor([[1.0], [2.0**-8], [0.0]], dtype=torch.bfloat16)
    for third, expected in ((0.0, 1.0), (2.0**-16, 1 + 2.0**-7), (-(2.0**-16), 1.0)):
        column[2] = third
        assert gemm(ones, column).item() == expected


def test_infinity_and_nan_pass_and_overflow_is_infinite():
    a = torch.tensor([[math.inf, 1], [math.nan, 1], [60000.0, 60000.0], [1, 1]], dtype=torch.float16)
    got = gemm(a, torch.ones(2, 1, dtype=torch.float16)).flatten().tolist()
    assert got[0] == got[2] == math.inf
    assert math.isnan(got[1])
    assert got[3] == 2


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 0.0), (-2.0, 0.25), (0.0, 1.0)])
def test_accumulate(alpha, beta, column_major):
    """In place; with beta 0, NaN is not read; without terms, only scaled."""
    for shape, k in itertools.product(((), (2,)), (18, 0)):
        a, b = exact_operands((*shape, 21, k), (*shape, k, 36), torch.float16)
        start = torch.randint(-8, 9, (*shape, 21, 36), generator=rng(alpha, beta)).float()
        expected = alpha * (a.double() @ b.double()) + beta * start.double()
        c, buffer = embed(start if beta else torch.full_like(start, math.nan), transposed=column_major, offset=1)
        assert gemm_accumulate_(c, a, b, alpha=alpha, beta=beta) is c
        assert torch.equal(c.double(), expected)
        assert_only_written(buffer, c)


def test_a_residual_with_factor_zero_is_not_read():
    a, b = torch.ones(3, 4, dtype=torch.float16), torch.ones(4, 6, dtype=torch.float16)
    for activation, preact in itertools.product(("none", "swiglu"), (False, True)):
        nan = torch.full(output_shape(a, b, activation), math.nan)
        got = gemm(a, b, None, nan, beta=0.0, activation=activation, preact=preact)
        assert torch.equal(got[0] if preact else got, gemm(a, b, activation=activation))


def test_batch_invariant():
    """The first row has the same bits among 300 and in a batch as alone, and the tile is that of columns and terms."""
    a = operand(300, 1100, dtype=torch.bfloat16, generator=rng(4))
    b = operand(1100, 36, dtype=torch.bfloat16, generator=rng(5))
    options = {"batch_invariant": True, "out_dtype": torch.float32}
    among = gemm(a, b, **options)
    assert torch.equal(among[:1], gemm(a[:1], b, **options))
    assert torch.equal(among[:1], gemm(a[:2, None], torch.stack([b, b]), **options)[0])
    for n, k in itertools.product((16, 96, 97, 4096), (64, 65)):
        assert len({host.tile_of(m, n, k, batch, True) for m in (1, 17, 10**6) for batch in (1, 64)}) == 1
    assert len({host.tile_of(m, 4096, 64, 1, False) for m in (1, 10**6)}) == 2, "this would hold for any choice"


def test_accumulated_parts_have_the_bits_of_one_sum():
    """Parts of K that begin at multiples of 64: 2^24 + 1 + 1 is 2^24 from left to right, and 2^24 + 2 in any other order."""
    for n in (1, 96):
        a, b = torch.zeros(1, 192, dtype=torch.float16), torch.ones(192, n, dtype=torch.float16)
        a[0, 0], a[0, 64], a[0, 128] = 2.0**12, 1, 1
        b[0] = 2.0**12
        whole = gemm_accumulate_(torch.zeros(1, n), a, b, batch_invariant=True)
        parts = torch.zeros(1, n)
        for part in (slice(0, 64), slice(64, 192)):
            gemm_accumulate_(parts, a[:, part], b[part], batch_invariant=True)
        assert torch.equal(parts, whole)
        assert (whole == 2.0**24).all()


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
    host.run(c, a, b, tile=host.Tile(16, 16, 16, warps=4, stages=2))
    assert torch.equal(c, expected)

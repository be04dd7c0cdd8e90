"""The Triton GEMM's epilogue, in the interpreter; run by test_interpreted.py with TRITON_INTERPRET=1.

A tile of 16 x 32 x 32 makes several tiles and steps of a few dozen rows, columns and terms. If cases are numbered, some have K split.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import amp_kernels as ak
from amp_kernels._checks.activations import ACTIVATIONS, GATED
from amp_kernels._raw._product import output_shape
from amp_kernels._raw.gemm import gemm, gemm_accumulate_, gemm_dact
from amp_kernels._triton import gemm as host
from amp_kernels._triton._autotune import GemmConfig
from amp_kernels.testing.bounds import assert_within, dact_reference_and_bound, reference_and_bound
from amp_kernels.testing.generators import HALF_DTYPES, LAYOUTS, OUT_DTYPES, integers, operand
from amp_kernels.testing.poison import assert_only_written, embed, poisoned_allocations

WHOLE = GemmConfig(16, 32, 32, num_warps=4, num_stages=2, group_m=2)
SPLIT = replace(WHOLE, splits=3)
CONFIGS = (WHOLE, SPLIT)
M, N, K = 21, 84, 72

#: Layouts of a residual or a pre-activation, among NaN.
SIDES = {
    **{name: LAYOUTS[name] for name in ("padded", "padded_column", "offset", "strided")},
    "one row for all": lambda t: t[..., :1, :].expand_as(t),
    "one column for all": lambda t: t[..., :1].expand_as(t),
}


@pytest.fixture(autouse=True)
def _backend():
    with ak.backend("triton"):
        yield


def rng(*seed):
    return torch.Generator().manual_seed(hash(seed) % 2**31)


def biases(dtype, generator):
    yield None
    yield torch.randn(N, generator=generator)
    yield torch.randn(2 * N, generator=generator).to(dtype)[::2]
    yield torch.randn(M, 1, generator=generator).to(dtype)


def number_of(value, values):
    return list(values).index(value)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward(activation):
    """Every activation with each bias, residuals of both dtypes in every layout, and each dtype of the result."""
    start = number_of(activation, ACTIVATIONS)
    generator = rng(start)
    for i in range(4):
        dtype, out_dtype = HALF_DTYPES[i % 2], OUT_DTYPES[(start + i) % 3]
        batch = (2,) if i == 3 else ()
        a = operand(*batch, M, K, dtype=dtype, generator=generator, layout=("row", "padded_column")[i % 2])
        b = operand(*batch, K, N, dtype=dtype, generator=generator, layout=("column", "row")[i // 2])
        bias = list(biases(dtype, generator))[(start + i) % 4]
        shape = output_shape(a, b, activation)
        c = torch.randn(shape, generator=generator).to((dtype, torch.float32)[i // 2])
        c = list(SIDES.values())[(start + i) % len(SIDES)](c) if i else None
        factors = {"alpha": 0.75, "beta": -1.5} if i > 1 else {}

        y, y_buffer = embed(torch.full(shape, math.nan, dtype=out_dtype), pad=i)
        z, z_buffer = embed(torch.full((*a.shape[:-1], N), math.nan, dtype=out_dtype), transposed=i == 2)
        with poisoned_allocations():
            host.run(y, a, b, bias, z, c, activation=activation, config=CONFIGS[i % 2], **factors)
        expected = {"out_dtype": out_dtype, "alpha": factors.get("alpha", 1.0)}
        assert_within(z, *reference_and_bound(a, b, bias, **expected))
        expected |= {"activation": activation, "beta": factors.get("beta", 1.0), "c": c}
        assert_within(y, *reference_and_bound(a, b, bias, **expected))
        assert_only_written(y_buffer, y)
        assert_only_written(z_buffer, z)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_launchers_pass_on_what_they_get(activation):
    dtype = torch.bfloat16
    generator = rng(number_of(activation, ACTIVATIONS), 1)
    a = operand(M, K, dtype=dtype, generator=generator)
    b = operand(K, N, dtype=dtype, generator=generator)
    bias = torch.randn(N, generator=generator)
    c = torch.randn(output_shape(a, b, activation), generator=generator)
    factors = {"alpha": 0.5, "beta": 2.0, "activation": activation}
    y = gemm(a, b, bias, c, out_dtype=torch.float32, **factors)
    again, z = gemm(a, b, bias, c, out_dtype=torch.float32, **factors, preact=True)
    assert_within(y, *reference_and_bound(a, b, bias, out_dtype=torch.float32, c=c, **factors))
    assert torch.equal(again, y)
    assert torch.equal(z, gemm(a, b, bias, alpha=0.5, out_dtype=torch.float32))
    # The activation sees the unrounded value.
    rounded, z = gemm(a, b, bias, c, **factors, preact=True)
    assert torch.equal(rounded, y.to(dtype))
    assert rounded.dtype == z.dtype == dtype


def test_a_residual_with_factor_zero_is_not_read():
    a, b = torch.ones(3, 4, dtype=torch.float16), torch.ones(4, 6, dtype=torch.float16)
    for activation in ("none", "swiglu"):
        nan = torch.full(output_shape(a, b, activation), math.nan)
        expected = gemm(a, b, activation=activation)
        for got in (
            gemm(a, b, None, nan, beta=0.0, activation=activation),
            gemm(a, b, None, nan, beta=0.0, activation=activation, preact=True)[0],
        ):
            assert torch.equal(got, expected)
    c = torch.full((3, 6), math.nan)
    gemm_accumulate_(c, a, b, beta=0.0)
    assert torch.equal(c, torch.full((3, 6), 4.0))


@pytest.mark.parametrize("splits", [2, 3, 4, 5, 64])
def test_splits_add_up(splits):
    """Small integers, exactly, where K is 5 steps of 16: for some numbers of splits the last ones have no work."""
    a = integers(2, M, K, limit=3, dtype=torch.float16, generator=rng(1))
    b = integers(2, K, N, limit=3, dtype=torch.float16, generator=rng(2), layout="column")
    start = integers(2, M, N, limit=9, dtype=torch.float32, generator=rng(3))
    c, buffer = embed(start, transposed=splits % 2 == 0)
    with poisoned_allocations():
        host.run(c, a, b, residual=c, beta=0.5, config=replace(SPLIT, block_k=16, splits=splits))
    assert torch.equal(c.double(), a.double() @ b.double() + 0.5 * start.double())
    assert_only_written(buffer, c)


def test_partial_sums_are_added_in_order():
    """2^24 + 1 + 1 is 2^24 from left to right in fp32, and 2^24 + 2 in any other order."""
    a = torch.zeros(1, 96, dtype=torch.float16)
    a[0, 0], a[0, 32], a[0, 64] = 2.0**12, 1, 1
    b = torch.ones(96, 1, dtype=torch.float16)
    b[0] = 2.0**12
    c = torch.empty(1, 1)
    host.run(c, a, b, config=SPLIT)
    assert c.item() == 2.0**24
    host.run(c, a.flip(1), b.flip(0), config=SPLIT)
    assert c.item() == 2.0**24 + 2


@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_batch_invariant(activation):
    """The first rows have the same bits among 300 and in a batch as alone, for which K would otherwise be split."""
    a = operand(300, 1100, dtype=torch.bfloat16, generator=rng(4))
    b = operand(1100, 36, dtype=torch.bfloat16, generator=rng(5))
    preact = torch.randn(300, 72 if activation in GATED else 36, generator=rng(6))
    kwargs = {"activation": activation, "out_dtype": torch.float32}

    def rows(m, **more):
        y = gemm(a[:m], b, **kwargs, **more)
        dz, _ = gemm_dact(a[:m], b, preact[:m], **kwargs, **more)
        return y[:1], dz[:1]

    alone, among = rows(1, batch_invariant=True), rows(300, batch_invariant=True)
    batched = gemm(a[:2, None], torch.stack([b, b]), batch_invariant=True, **kwargs)
    assert torch.equal(alone[0], among[0])
    assert torch.equal(alone[1], among[1])
    assert torch.equal(alone[0], batched[0])
    assert not torch.equal(alone[0], rows(1)[0]), "this would hold for any configuration"


def test_batch_invariant_ignores_how_rows_are_aligned(monkeypatch):
    """An odd number of rows in a column-major a allows narrow copies only; the tiles stay those of N and K."""
    chosen = []
    choose = host.gemm_config
    monkeypatch.setattr(host, "gemm_config", lambda *args, **kw: chosen.append(choose(*args, **kw)) or chosen[-1])
    for m, layout in itertools.product((16, 17), ("row", "column")):
        a = integers(m, 64, limit=1, dtype=torch.float16, generator=rng(m), layout=layout)
        gemm(a, torch.ones(64, 64, dtype=torch.float16), batch_invariant=True)
    assert len(chosen) == 4
    assert len(set(chosen)) == 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward(activation):
    """``gemm_dact`` with pre-activations of each dtype and layout; three rows of tiles and two batches are summed."""
    start = number_of(activation, ACTIVATIONS)
    generator = rng(start, 2)
    for i in range(3):
        dtype, out_dtype = HALF_DTYPES[i % 2], OUT_DTYPES[(start + i) % 3]
        batch, m = ((2,), M) if i == 0 else ((), 2 * M)
        a = operand(*batch, m, K, dtype=dtype, generator=generator, layout=("row", "padded_column")[i % 2])
        b = operand(*batch, K, 42, dtype=dtype, generator=generator, layout=("column", "row", "padded")[i])
        shape = (*batch, m, 84 if activation in GATED else 42)
        z = (2 * torch.randn(shape, generator=generator)).to((torch.float32, dtype)[i % 2])
        z = list(SIDES.values())[(start + i) % 4](z)
        dz, buffer = embed(torch.full(shape, math.nan, dtype=out_dtype), transposed=i == 1)
        sums = torch.full(shape[-1:], math.nan) if i != 1 else None
        kwargs = {"preact": z, "activation": activation, "backward": True, "config": CONFIGS[i // 2]}
        with poisoned_allocations():
            host.run(dz, a, b, sums=sums, **kwargs)
        expected = dact_reference_and_bound(a, b, z, activation=activation, out_dtype=out_dtype)
        assert_within(dz, *expected[:2])
        assert_only_written(buffer, dz)
        if sums is not None:
            assert_within(sums, *expected[2:], what="sums")


def test_column_sums_are_those_of_all_rows_before_rounding():
    """2049 is no fp16 number: rounded first it would be 2048. 40 row tiles are more than one step of the second sum."""
    a, b = torch.full((640, 1), 683.0, dtype=torch.float16), torch.full((1, 36), 3.0, dtype=torch.float16)
    preact = torch.ones(640, 36, dtype=torch.float16)
    preact[::2] = -1
    dz, sums = torch.empty(640, 36, dtype=torch.float16), torch.empty(36)
    host.run(dz, a, b, preact=preact, activation="relu", backward=True, sums=sums, config=WHOLE)
    assert dz[1, 0].item() == 2048
    assert torch.equal(sums, torch.full((36,), 320 * 2049.0))


def test_rows_beyond_the_last_are_not_summed():
    """They are zero, but zero times an infinite b is NaN."""
    a, b = torch.ones(5, 3, dtype=torch.float16), torch.ones(3, 4, dtype=torch.float16)
    b[1, 2] = math.inf
    dz, sums = gemm_dact(a, b, torch.ones(5, 4), activation="none", bias_grad=True)
    assert sums.tolist() == [15, 15, math.inf, 15]
    assert dz[0].tolist() == [3, 3, math.inf, 3]
    empty, sums = gemm_dact(a[:0], b, torch.ones(0, 8), activation="swiglu", bias_grad=True)
    assert empty.shape == (0, 8)
    assert sums.tolist() == [0] * 8


@pytest.mark.parametrize(("layout", "tma"), list(itertools.product(["row", "column"], [False, True])))
def test_gates_and_values_are_the_halves_of_the_columns(layout, tma):
    """F = 21 and 56, neither a multiple of the tile: at the edge of the gates the values begin, which must not get in."""
    for width in (21, 56):
        a = integers(M, K, limit=1, dtype=torch.float16, generator=rng(width))
        b = torch.zeros(K, 2 * width, dtype=torch.float16)
        b[:, width:] = integers(K, width, limit=1, dtype=torch.float16, generator=rng(width + 1))
        bias = torch.cat([torch.full((width,), 64.0), torch.zeros(width)])  # silu(64) is 64
        y = torch.full((M, width), math.nan)
        host.run(y, a, LAYOUTS[layout](b), bias, activation="swiglu", config=replace(WHOLE, tma=tma))
        assert torch.equal(y.double(), 64 * (a.double() @ b[:, width:].double()))


def test_access_widths_of_halves():
    """Neither half may cross a boundary of alignment, or end within an access."""
    x = torch.zeros(2, 16, 64, dtype=torch.float16)

    def vec(t, n):
        return host._Matrix(host._layout(t), n).vec

    assert vec(x, 64) == vec(x, 32) == 8
    assert vec(x[..., :40], 20) == 4
    assert vec(x[..., :42], 21) == 1
    assert vec(x[..., :56].contiguous(), 28) == 4
    columns = torch.zeros(2, 42, 16, dtype=torch.float16).mT
    assert vec(columns, 21) == 8, "halves of whole columns are aligned as the columns are"
    assert host._Matrix(host._layout(columns), 21).column_major
    two_columns = torch.zeros(34, dtype=torch.float16).as_strided((1, 16, 2), (34, 1, 17))
    assert vec(two_columns, 1) == 1, "the second half begins at element 17"
    assert vec(x[:, :1].expand(2, 16, 64), 64) == 8
    assert vec(x[..., :1].expand(2, 16, 64), 64) == 1

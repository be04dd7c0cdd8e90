"""The Triton kernel of grouped products in the interpreter; run by test_interpreted.py with TRITON_INTERPRET=1.

A tile of 16 x 16 x 16, so that groups of a few dozen rows make several tiles and steps.
"""

import math
import random

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw.grouped_gemm import grouped_gemm_op
from amp_kernels._triton import grouped_gemm as module
from amp_kernels._triton._autotune import GemmConfig
from amp_kernels.testing.backends import check_backend
from amp_kernels.testing.generators import HALF_DTYPES, LAYOUTS, integers, operand
from amp_kernels.testing.poison import assert_only_written, embed, poisoned_allocations

CONFIG = GemmConfig(16, 16, 16, num_warps=4, num_stages=2)
ENDS = [(16, 16, 47), (0, 1, 33), (15, 32, 49), (49, 49, 49), (0, 0, 0), (3,), (), (1, 2, 3, 4, 5, 40, 48)]
HOSTILE = [(30, 20, 49), (-5, 7, 100), (2**31 - 1, -(2**31), 3)]


@pytest.fixture(autouse=True)
def _backend(monkeypatch):
    monkeypatch.setattr(module, "_config", lambda *args: CONFIG)
    with ak.backend("triton"), poisoned_allocations():
        yield


def ranges(found, total):
    """The ends clamped to [previous, total], as slices."""
    previous, slices = 0, []
    for end in found:
        end = max(min(end, total), previous)
        slices.append(slice(previous, end))
        previous = end
    return slices, previous


@pytest.mark.parametrize("name", ["grouped_gemm", "grouped_gemm_accumulate_"])
def test_samples(name, monkeypatch):
    monkeypatch.undo()
    assert check_backend(REGISTRY[name], "triton", "cpu") > 0


@pytest.mark.parametrize("found", ENDS + HOSTILE)
def test_rows(found):
    """Exact: small integers. NaN is past the last end, and in the padding of b."""
    generator, (slices, end) = torch.Generator().manual_seed(len(found)), ranges(found, 49)
    offs = torch.tensor(found, dtype=torch.int32)
    for dtype, activation in ((HALF_DTYPES[0], "none"), (HALF_DTYPES[1], "relu")):
        a = integers(49, 37, limit=2, dtype=dtype, generator=generator, layout="padded_column")
        b = integers(len(found), 37, 23, limit=2, dtype=dtype, generator=generator, layout="padded")
        bias = integers(len(found), 23, limit=3, dtype=dtype, generator=generator)
        expected = torch.zeros(49, 23, dtype=torch.float64)
        for g, rows in enumerate(slices):
            expected[rows] = a[rows].double() @ b[g].double() + bias[g].double()
        a[end:] = math.nan
        out, z = module.grouped_gemm(a, b, offs, bias, activation=activation, preact=True)
        assert torch.equal(z.double(), expected)
        assert torch.equal(out.double(), expected.relu() if activation == "relu" else expected)


@pytest.mark.parametrize("found", ENDS + HOSTILE)
def test_sums(found):
    generator, (slices, end) = torch.Generator().manual_seed(len(found)), ranges(found, 49)
    offs = torch.tensor(found, dtype=torch.int32)
    a = integers(37, 49, limit=2, dtype=torch.float16, generator=generator, layout="padded_column")
    b = integers(49, 23, limit=2, dtype=torch.float16, generator=generator, layout="padded")
    products = [a[:, terms].double() @ b[terms].double() for terms in slices]
    expected = torch.stack(products) if found else torch.zeros(0, 37, 23, dtype=torch.float64)
    a[:, end:] = b[end:] = math.nan
    assert torch.equal(module.grouped_gemm(a, b, offs)[0].double(), expected)
    c, memory = embed(torch.full((len(found), 37, 23), -0.0), transposed=True)
    module.grouped_gemm_accumulate_(c, a, b, offs)
    assert torch.equal(c.double(), expected)
    assert all(c[g].signbit().all() for g, terms in enumerate(slices) if terms.start == terms.stop)
    c.fill_(math.nan)
    module.grouped_gemm_accumulate_(c, a, b, offs, overwrite=True)
    assert torch.equal(c.double(), expected)
    if c.numel():
        assert_only_written(memory, c)


def test_swiglu_and_behind_the_last_end():
    a, b = (operand(*shape, dtype=torch.bfloat16, generator=torch.Generator()) for shape in ((40, 24), (2, 24, 40)))
    offs = torch.tensor([17, 20], dtype=torch.int32)
    out, z = module.grouped_gemm(a, b, offs, activation="swiglu", preact=True, out_dtype=torch.float32)
    with torch.no_grad():
        expected, preact = grouped_gemm_op.reference(
            a, b, offs, activation="swiglu", preact=True, out_dtype=torch.float32
        )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z, preact, rtol=1e-5, atol=1e-5)
    assert not out[20:].any()
    assert not z[20:].any()


def test_random_groups_and_layouts():
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(20):
        total, groups = rng.randrange(1, 60), rng.randrange(1, 7)
        found = sorted(rng.choice((0, total, rng.randrange(total + 1))) for _ in range(groups))
        options = {"limit": 2, "dtype": rng.choice(HALF_DTYPES), "generator": generator}
        layouts = [rng.choice(list(LAYOUTS)) for _ in range(2)]
        a = integers(total, 20, layout=layouts[0], **options)
        b = integers(groups, 20, 9, layout=layouts[1], **options)
        offs = torch.tensor(found, dtype=torch.int32)
        with torch.no_grad():
            expected = grouped_gemm_op.reference(a, b, offs)[0]
        assert torch.equal(module.grouped_gemm(a, b, offs)[0], expected)


def test_a_group_has_the_bits_of_gemm_of_its_rows(monkeypatch):
    """The tiles are those of gemm for N and K."""
    monkeypatch.undo()
    generator = torch.Generator().manual_seed(0)
    a = operand(80, 72, dtype=torch.bfloat16, generator=generator)
    b = operand(3, 72, 48, dtype=torch.bfloat16, generator=generator)
    with ak.batch_invariant():
        out = ak.grouped_mm(a, b, offs=torch.tensor([1, 34, 80], dtype=torch.int32))
        for g, rows in enumerate((slice(0, 1), slice(1, 34), slice(34, 80))):
            assert torch.equal(out[rows], ak.matmul(a[rows], b[g]))

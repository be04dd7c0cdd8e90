"""unscale_'s Triton kernel in the interpreter, against the CPU op bit for bit; run by test_interpreted.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._triton import _tables
from amp_kernels._triton import unscale as module
from amp_kernels.cli.check import check_backend

from ..helpers.bits import assert_same_bits

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def make(n, dtype, offset=0, seed=0):
    """``n`` elements, ``offset`` elements after a 16-byte boundary, with one more element after the last."""
    generator = torch.Generator().manual_seed(seed + n)
    return torch.randn(n + offset + 1, generator=generator, dtype=torch.float64).to(dtype)[offset:-1]


def whole(t):
    """Everything in the storage of ``t``."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


def check(grads, inv=0.3, found=0.0):
    """The results have the CPU op's bits, the elements around the tensors are as they were; returns the flag."""
    wanted = [torch.empty(0, dtype=g.dtype).set_(whole(g).clone().untyped_storage()) for g in grads]
    views = [w.as_strided(g.shape, g.stride(), g.storage_offset()) for w, g in zip(wanted, grads, strict=True)]
    flags = torch.tensor(found), torch.tensor(found)
    torch.ops.amp_kernels.unscale_(views, flags[0], torch.tensor(inv))
    module.unscale_(grads, flags[1], torch.tensor(inv))
    for g, w in zip(grads, wanted, strict=True):
        assert_same_bits(whole(g), w)
    assert_same_bits(flags[1], flags[0])
    return flags[1].item()


def test_samples_of_the_op():
    assert check_backend(REGISTRY["unscale_"], "triton", "cpu") > 0


@pytest.mark.parametrize("n", [1, 7, 8, 255, 257, 2047, 2048, 2049, 16383, 16384, 16385, 40000])
def test_sizes(n):
    assert check([make(n, dtype) for dtype in DTYPES]) == 0.0


@pytest.mark.parametrize("offset", range(9))
def test_offsets(offset):
    """Every address modulo 16 bytes, tensors within a block and beyond one, and nothing written beside them."""
    assert check([make(n, dtype, offset) for dtype in DTYPES for n in (3, 2500)]) == 0.0


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 5000), st.integers(0, 8)), min_size=1, max_size=8),
    st.sampled_from([1.0, 1 / 3, 2.0**-16, 2.0**-150, 1024.0]),
)
def test_mixed_lists(tensors, inv):
    check([make(n, dtype, offset, seed=i) for i, (dtype, n, offset) in enumerate(tensors)], inv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_elements(dtype, value):
    """In the peeled head, the main loop and the tail; whatever else the program comes across after it."""
    after = [dtype for dtype in DTYPES for _ in range(_tables.INTERPRETED_PROGRAMS)]
    for at in (0, 1030, 4999):
        grads = [make(5, torch.float32), make(5000, dtype, 1), *(make(4, d) for d in after)]
        grads[1][at] = value
        assert check(grads) == 1.0


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float16, 65504.0), (torch.bfloat16, 3.38e38), (torch.float32, 3.4e38)]
)
def test_a_product_that_overflows_its_dtype_is_found(dtype, largest):
    """The stored value decides; in fp16 the product is still finite where it is computed."""
    assert check([torch.full((9,), largest, dtype=dtype)], inv=0.5) == 0.0
    assert check([torch.full((9,), largest, dtype=dtype)], inv=2.0) == 1.0


def test_an_earlier_find_stays():
    assert check([make(9, torch.float32)], found=1.0) == 1.0
    assert check([make(9, torch.float32)], found=2.0) == 2.0


def test_without_a_flag():
    for inv in (0.5, 1 / 3, math.inf):
        ours, theirs = make(2500, torch.bfloat16, 1), make(2500, torch.bfloat16, 1)
        module.unscale_([ours], None, torch.tensor(inv))
        torch.ops.amp_kernels.unscale_([theirs], None, torch.tensor(inv))
        assert_same_bits(ours, theirs)
    signalling = torch.full((2500,), 0x7F81, dtype=torch.int16).view(torch.bfloat16)  # any operation changes it
    module.unscale_([signalling], None, torch.ones(()))
    assert (signalling.view(torch.int16) == 0x7F81).all()


def test_dense_strides_and_empty_tensors():
    x = make(120, torch.bfloat16).reshape(2, 3, 4, 5)
    check([x.clone(memory_format=torch.channels_last), x.clone().permute(3, 1, 0, 2), torch.empty(0, 3)])
    flag = torch.zeros(())
    module.unscale_([torch.empty(0)], flag, torch.ones(()))
    assert flag.item() == 0.0


def test_more_tensors_than_one_table_takes(monkeypatch):
    monkeypatch.setattr(_tables, "TENSORS_PER_TABLE", 3)
    grads = [make(1 + 9 * i, DTYPES[i % 4], seed=i) for i in range(8)]
    assert check(grads) == 0.0
    grads[-1][0] = torch.nan
    assert check(grads) == 1.0

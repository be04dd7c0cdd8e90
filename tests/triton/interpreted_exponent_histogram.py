"""exponent_histogram's Triton kernel in the interpreter, against the CPU op; run by test_interpreted.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._triton import _tables
from amp_kernels._triton import exponent_histogram as module
from amp_kernels.cli.check import check_backend

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def make(n, dtype, offset=0, seed=0):
    generator = torch.Generator().manual_seed(seed + n)
    wide = 2.0 ** torch.randint(-160, 128, (n + offset,), generator=generator).double()
    wide[::7] = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 2.0**-149])[
        torch.arange(len(wide[::7])) % 5
    ].double()
    return wide.to(dtype)[offset:]


def check(tensors):
    counts, largest = module.exponent_histogram(tensors)
    want_counts, want_largest = torch.ops.amp_kernels.exponent_histogram(tensors)
    assert torch.equal(counts, want_counts)
    assert torch.equal(largest, want_largest)


def test_samples_of_the_op():
    assert check_backend(REGISTRY["exponent_histogram"], "triton", "cpu") > 0


@pytest.mark.parametrize("n", [1, 1023, 1024, 1025, 16384, 16385])
def test_sizes(n):
    check([make(n, dtype) for dtype in DTYPES])


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 3000), st.integers(0, 8)), min_size=1, max_size=6))
def test_mixed_lists(tensors):
    check([make(n, dtype, offset, seed=i) for i, (dtype, n, offset) in enumerate(tensors)])


def test_more_tensors_than_one_table_takes(monkeypatch):
    monkeypatch.setattr(_tables, "TENSORS_PER_TABLE", 3)
    check([make(1 + 9 * i, DTYPES[i % 4], seed=i) for i in range(8)])

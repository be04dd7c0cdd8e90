"""cast_'s Triton kernel in the interpreter, against the CPU op bit for bit; run by test_interpreted.py."""

import itertools

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._triton import _tables
from amp_kernels._triton import cast as module
from amp_kernels.cli.check import check_backend

from ..helpers.bits import assert_same_bits

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
PAIRS = list(itertools.product(DTYPES, DTYPES))
STEP = torch.tensor(3.0)


def check(shapes, pairs=PAIRS, offset=0, **options):
    """The results have the CPU op's bits, and the elements around the destinations are as they were."""
    generator = torch.Generator().manual_seed(sum(shapes))
    lists = [(n, to, of) for n in shapes for to, of in pairs]
    sources = [torch.randn(n + offset, generator=generator).to(of)[offset:] for n, _, of in lists]
    memory = [[torch.full((n + offset + 1,), 7.0, dtype=to) for n, to, _ in lists] for _ in range(2)]
    want, got = ([whole[offset:-1] for whole in half] for half in memory)
    torch.ops.amp_kernels.cast_(want, sources, **options)
    module.cast_(got, sources, **options)
    for w, g in zip(*memory, strict=True):
        assert_same_bits(g, w)


def test_samples_of_the_op():
    assert check_backend(REGISTRY["cast_"], "triton", "cpu") > 0


@pytest.mark.parametrize("options", [{}, {"seed": 2**62 + 1, "step": STEP}, {"seed": 1}], ids=str)
def test_sizes(options):
    check([0, 1, 7, 8, 2047, 2049], **options)


@pytest.mark.parametrize("options", [{}, {"seed": 9, "step": STEP}], ids=str)
def test_several_chunks_and_tables(options, monkeypatch):
    monkeypatch.setattr(_tables, "TENSORS_PER_TABLE", 3)
    pair = [(torch.bfloat16, torch.float32)]
    check([16385, 3, 40000, 5], pair, **options)
    check([16385, 3, 40000, 5], pair, offset=1, **options)


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_offsets(offset):
    check([3, 2500], offset=offset, seed=4)

"""A shape's family decides which mean it enters, so it must follow from what the kernels are really given."""

import collections
import itertools

import pytest
import torch

from amp_kernels import _host
from bench import ours
from bench.gemm_shapes import CPU, CUDA, QUICK, Shape
from bench.ops import gemm

HALVES = [(m, n, k) for m, n, k in itertools.product((8, 12, 16), repeat=3)]


def starts_aligned(tensor: torch.Tensor) -> bool:
    """Whether every row in memory starts at 16 bytes."""
    stride = max(tensor.stride()) * tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and stride % 16 == 0


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(("offset", "pitch"), [(0, 0), (1, 0), (8, 0), (0, 4), (0, 8)])
def test_aligned_is_what_the_operands_are(layout, offset, pitch):
    for m, n, k in HALVES:
        for result, out_bytes in (("16", 2), ("fp32+", 4)):
            shape = Shape(m, n, k, layout, result, offset=offset, pitch=pitch)
            drawn = gemm._case(shape, "bf16", torch.device("cpu")).inputs(torch.Generator())
            assert drawn.a.shape == (m, k)
            assert drawn.b.shape == (k, n)
            assert drawn.a.is_contiguous() == (layout[0] == "N" and not pitch)
            assert drawn.b.mT.is_contiguous() == (layout[1] == "T" and not pitch)
            really = starts_aligned(drawn.a) and starts_aligned(drawn.b) and n * out_bytes % 16 == 0
            assert shape.aligned == really, shape


@pytest.mark.parametrize(
    ("shape", "families"),
    [
        (Shape(8192, 6144, 4096, "NT"), ("aligned",)),
        (Shape(8192, 256, 7168, "NT", "fp32"), ("aligned",)),
        (Shape(128, 7168, 16384, "NT"), ("aligned", "skinny")),
        (Shape(512, 512, 64, "NT", batch=256), ("aligned", "skinny")),
        (Shape(3072, 768, 65536, "TN", "fp32+"), ("fp32 accumulated",)),
        (Shape(64, 147, 802816, "TN", "fp32+"), ("unaligned",)),
        (Shape(16384, 50257, 768, "NT"), ("unaligned",)),
        (Shape(65536, 512, 13, "NT", "relu"), ("unaligned",)),
        (Shape(16448, 4096, 1024, "NT", "gelu"), ("epilogue",)),
        (Shape(4096, 4096, 4096, "NT", pitch=8), ("aligned",)),
        (Shape(4096, 4096, 4096, "NT", offset=1, control=True), ("unaligned", "unaligned controls")),
    ],
)
def test_families(shape, families):
    assert shape.families == families


def test_the_headline_compares_like_with_like():
    """A plain product against torch's plain product: an epilogue or an addition would flatter it."""
    for shape in CUDA:
        if "aligned" in shape.families:
            assert shape.result in ("16", "fp32")


def test_every_family_and_layout_is_in_the_suite_and_every_family_in_the_small_ones():
    for shapes in (CUDA, CPU, CPU[:6], QUICK):
        assert len({shape.name for shape in shapes}) == len(shapes)
        assert len({family for shape in shapes for family in shape.families}) == 6
    assert {shape.layout for shape in CUDA} == {"NN", "NT", "TN", "TT"}
    assert {shape.layout for shape in CPU[:6]} == {"NN", "NT", "TN", "TT"}
    counts = collections.Counter(family for shape in CUDA for family in shape.families)
    assert counts["aligned"] + counts["fp32 accumulated"] + counts["epilogue"] + counts["unaligned"] == len(CUDA) == 61
    assert dict(counts) == {
        "aligned": 37,
        "skinny": 8,
        "fp32 accumulated": 10,
        "epilogue": 3,
        "unaligned": 11,
        "unaligned controls": 4,
    }


def test_the_plan_is_asked_for_with_what_the_op_will_pass(monkeypatch):
    asked = []

    def plan_gemm(m, n, k, **request):
        asked.append((m, n, k, request))
        return {"kernel": "sm90", "tile": 1, "splits": 4, "swapped": True, "repacked": True, "in_phases": False}

    tiles = [{}, {"m": 128, "n": 192, "cluster_m": 2, "cluster_n": 1, "consumers": 2, "pingpong": True}]
    monkeypatch.setattr(_host, "plan_gemm", plan_gemm, raising=False)
    monkeypatch.setattr(_host, "gemm_candidates", lambda: {"sm90": tiles}, raising=False)
    shape = Shape(64, 147, 802816, "TN", "fp32+")
    text = ours.gemm_plan(shape, 132, (9, 0))
    assert text == "repack, sm90 128x192 cluster 2x1, 2 consumers, pingpong, 4 splits, swapped"
    ours.gemm_plan(Shape(65536, 512, 13, "NT", "relu", batch=2), 108, (8, 0))
    views = {
        "m_major_a": True,
        "n_major_b": True,
        "tma_a": True,
        "tma_b": False,
        "tma_output": False,
        "odd_operands": True,
        "ld_a": 64,
        "ld_b": 147,
    }
    gpu = {"sm_count": 132, "capability": 90}
    assert asked[0] == (64, 147, 802816, {"batch": 1, "out_bytes": 8, "activation": "none", **views, **gpu})
    views = {
        "m_major_a": False,
        "n_major_b": False,
        "tma_a": False,
        "tma_b": False,
        "tma_output": True,
        "odd_operands": True,
        "ld_a": 13,
        "ld_b": 13,
    }
    gpu = {"sm_count": 108, "capability": 80}
    assert asked[1] == (65536, 512, 13, {"batch": 2, "out_bytes": 2, "activation": "relu", **views, **gpu})


@pytest.mark.parametrize(
    ("offset", "pitch", "size"), [(0, 0, 16), (1, 0, 2), (2, 0, 4), (4, 0, 8), (0, 4, 8), (8, 8, 16)]
)
def test_the_width_of_an_access(offset, pitch, size):
    assert Shape(16, 16, 16, "NT", offset=offset, pitch=pitch).operand_bytes == size

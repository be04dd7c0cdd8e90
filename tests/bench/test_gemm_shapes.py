"""A shape's family decides which mean it enters, so it must follow from what the kernels are really given."""

import itertools

import pytest
import torch

from bench.ops import gemm
from bench.ops.gemm_shapes import Shape

ALIGNMENTS = (16, 8, 4, 2)


def alignment(tensor: torch.Tensor) -> int:
    """The widest access, at most 16 bytes, that every row in memory starts at."""
    stride = max(tensor.stride()) * tensor.element_size()
    return next(size for size in ALIGNMENTS if tensor.data_ptr() % size == 0 and stride % size == 0)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(("offset", "pitch"), [(0, 0), (1, 0), (8, 0), (0, 4), (0, 8)])
def test_a_shape_and_the_planners_request_are_those_of_the_operands(layout, offset, pitch):
    for (m, n, k), result in itertools.product(itertools.product((8, 12, 16), repeat=3), ("16", "fp32+")):
        shape = Shape(m, n, k, layout, result, offset=offset, pitch=pitch)
        drawn = gemm.operands(shape, torch.bfloat16, torch.Generator(), torch.device("cpu"))
        assert (drawn.a.shape, drawn.b.shape) == ((m, k), (k, n))
        of_a, of_b, of_out = alignment(drawn.a), alignment(drawn.b), n * (4 if result == "fp32+" else 2) % 16
        assert (shape.a_bytes, shape.b_bytes) == (of_a, of_b)
        assert shape.aligned == (of_a == of_b == 16 and of_out == 0), shape
        request = shape.request
        assert request["m_major_a"] == (drawn.a.stride(0) == 1)
        assert request["n_major_b"] == (drawn.b.stride(1) == 1)
        assert (request["tma_a"], request["tma_b"]) == (of_a == 16, of_b == 16)
        assert request["odd_operands"] == (min(of_a, of_b) == 2)
        if not offset:
            assert (request["ld_a"], request["ld_b"]) == (max(drawn.a.stride()), max(drawn.b.stride()))

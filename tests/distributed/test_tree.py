"""tree_all_reduce over gloo ranks: the bits of one rank, and refused groups."""

import pytest
import torch
import torch.distributed as dist

import amp_kernels as ak

from ..helpers import generators
from ..helpers.ranks import on_ranks

FEATURES, ROWS, BLOCKS = 8 * 24, 5, 8


def operands():
    return (
        generators.normal(*shape, dtype=torch.bfloat16, seed=i)
        for i, shape in enumerate(((ROWS, FEATURES), (16, FEATURES)))
    )


def row_parallel(x, weight, ranks, group=None):
    with ak.batch_invariant(k_blocks=BLOCKS // ranks):
        part = ak.matmul(x, weight.t(), out_dtype=torch.float32)
    return ak.distributed.tree_all_reduce(part, group)


def reduce():
    rank, size = dist.get_rank(), dist.get_world_size()
    x, weight = (t.chunk(size, 1)[rank].clone().requires_grad_() for t in operands())
    out = row_parallel(x, weight, size)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    return out.detach(), x.grad, weight.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_sum_has_the_bits_of_one_rank(ranks, size):
    x, weight = (t.requires_grad_() for t in operands())
    with ak.batch_invariant(k_blocks=BLOCKS):
        whole = ak.matmul(x, weight.t(), out_dtype=torch.float32)
    results = ranks.run(reduce, world=size)
    assert all(torch.equal(out, whole) for out, _, _ in results)
    with ak.batch_invariant():
        whole.backward(torch.linspace(-1, 1, whole.numel()).view_as(whole))
    for i, gradient in ((1, x.grad), (2, weight.grad)):
        got = torch.cat([result[i] for result in results], 1)
        torch.testing.assert_close(got, gradient, rtol=2e-2, atol=2e-2)


@on_ranks(4)
def test_a_group_of_some_ranks():
    rank, pair = dist.get_rank(), dist.new_group([1, 3])
    if rank in (1, 3):
        assert ak.distributed.tree_all_reduce(torch.tensor([float(rank)]), pair).item() == 4.0


@on_ranks(3)
def test_three_ranks_are_refused():
    with pytest.raises(ValueError, match="group has 3 ranks; accepted: a power of two"):
        ak.distributed.tree_all_reduce(torch.zeros(2))
    with pytest.raises(TypeError, match="tensor"):
        ak.distributed.tree_all_reduce(torch.zeros(2, dtype=torch.bfloat16))

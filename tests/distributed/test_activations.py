"""Functions of rows on DTensors, as SequenceParallel and batches over ranks leave them, against one process."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module

import amp_kernels as ak

from ..helpers.ops import Ops
from ..helpers.ranks import on_ranks
from .worlds import everyone, whole

#: of x, w and b
FUNCTIONS = {
    "layer_norm": lambda x, w, b: ak.layer_norm(x, 8, w, b),
    "layer_norm with a residual": lambda x, w, b: sum(ak.layer_norm(x, 8, w, b, residual=x)),
    "rms_norm": lambda x, w, b: ak.rms_norm(x, [8], w) + b,
    "layer_norm of frozen weights": lambda x, w, b: ak.layer_norm(x, 8, w.detach(), b.detach()) * w + b,
    "gelu": lambda x, w, b: ak.gelu(x) * w + b,
    "silu": lambda x, w, b: ak.nn.functional.silu(x) * w + b,
}
ROWS = [[Shard(0)], [Shard(1)], [Replicate()]]  # 5 and 6 rows: uneven pieces


def placed(tensor, placements):
    return distribute_tensor(tensor.clone(), everyone(), placements, src_data_rank=None).requires_grad_()


@pytest.mark.parametrize("placements", ROWS, ids=str)
@on_ranks(2)
def test_rows_stay_where_they_are(placements):
    """Others gather them (Liger-Kernel#982), or fail where only x has a gradient (pytorch#187373)."""
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator) for shape in ((5, 6, 8), (8,), (8,)))
    probe = torch.randn(5, 6, 8, generator=generator)
    for name, function in FUNCTIONS.items():
        plain = [t.clone().requires_grad_() for t in (x, w, b)]
        expected = function(*plain)
        (expected * probe).sum().backward()
        mine = [placed(x, placements), placed(w, [Replicate()]), placed(b, [Replicate()])]
        with Ops() as ops:
            y = function(*mine)
        (y * placed(probe, placements).detach()).sum().backward()
        pairs = [(y, expected), *((m.grad, p.grad) for m, p in zip(mine, plain, strict=True))]
        errors = [(whole(a) - e).abs().max().item() / e.abs().max().item() for a, e in pairs]
        assert max(errors) < 1e-6, name
        assert list(y.placements) == placements, name
        assert y.shape == (5, 6, 8), name
        assert not ops.count("c10d"), name


@pytest.mark.parametrize("placements", [[Shard(2)], [Partial()]], ids=str)
@on_ranks(2)
def test_rows_that_are_cut_are_put_together(placements):
    x = torch.linspace(-2, 3, 48).view(2, 3, 8)
    for name, function in FUNCTIONS.items():
        mine = placed(x, [Shard(2)])
        if placements[0].is_partial():
            mine = DTensor.from_local(x / 2, everyone(), placements, run_check=False)
        weights = [placed(torch.full((8,), value), [Replicate()]) for value in (2.0, 0.5)]
        y = function(mine, *weights)
        expected = function(x, torch.full((8,), 2.0), torch.full((8,), 0.5))
        assert (whole(y) - expected).abs().max() < 1e-6 * expected.abs().max(), name


@on_ranks(2)
def test_modules_under_sequence_parallel_and_what_is_refused():
    """Norms of a converted model under SequenceParallel; an embedding and a gated activation of rows."""
    torch.manual_seed(0)
    model = ak.convert(nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)))
    assert type(model[0]) is ak.nn.LayerNorm
    reference = nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8))
    parallelize_module(model, everyone(), {"0": SequenceParallel(), "1": SequenceParallel()})
    x = torch.randn(2, 4, 8)
    y = model(placed(x, [Shard(1)]))
    torch.testing.assert_close(whole(y), reference(x), rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    reference(x).square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-5)

    weight, ids = torch.randn(10, 6), torch.tensor([[1, 2, 3], [3, 9, 1], [0, 3, 3]])
    table = placed(weight, [Replicate()])
    rows = ak.embedding(distribute_tensor(ids, everyone(), [Shard(0)], src_data_rank=None), table, padding_idx=0)
    assert rows.placements == (Shard(0),)
    assert torch.equal(whole(rows), weight[ids])
    ak.swiglu(rows).sum().backward()
    plain = weight.clone().requires_grad_()
    ak.swiglu(ak.embedding(ids, plain, padding_idx=0)).sum().backward()
    torch.testing.assert_close(whole(table.grad), plain.grad, rtol=1e-6, atol=1e-7)
    split = ak.convert(nn.Sequential(nn.Embedding(10, 6)))
    expected = split[0].weight.detach()[ids]
    parallelize_module(split, everyone(), {"0": RowwiseParallel(input_layouts=Replicate())})
    torch.testing.assert_close(whole(split(ids)), expected, rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"logits is a DTensor.*vocab_parallel_cross_entropy"):
        ak.cross_entropy(placed(torch.zeros(2, 4), [Shard(0)]), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(
        TypeError, match=r"layer_norm: a tensor of shape \[8\] is plain among DTensors; accepted: DTensors"
    ):
        ak.layer_norm(placed(x, [Shard(0)]), 8, torch.ones(8))
    heads = placed(torch.zeros(1, 2, 3, 4), [Shard(1)])
    with pytest.raises(TypeError, match="rotary: q is a DTensor; accepted: plain tensors"):
        ak.rotary(heads, heads, torch.ones(3, 4), torch.ones(3, 4))

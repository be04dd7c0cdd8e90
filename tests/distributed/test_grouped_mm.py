"""Experts under fully_shard, converted before or after; a rank without any token takes part, so that no other rank waits for it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import amp_kernels as ak
from amp_kernels.nn import experts

from ..helpers.generators import normal
from ..helpers.ranks import on_ranks
from ..nn.test_experts import Experts
from .worlds import everyone


class Routed(nn.Module):
    """Experts of both kinds, one after the other; every token goes to experts 0 and 2."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.layer = Experts(), ak.nn.GroupedLinear(4, 16, 8, bias=True)

    def forward(self, x):
        tokens = x.shape[0]
        index, weights = torch.tensor([0, 2]).expand(tokens, 2), torch.full((tokens, 2), 0.5)
        x = self.experts(x, index, weights)
        return self.layer(x, torch.tensor([tokens, tokens, tokens, tokens], dtype=torch.int32))


def gradients(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().square().sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


@pytest.mark.parametrize("first", [True, False])
@on_ranks(2)
def test_a_rank_without_tokens(first):
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = ak.convert(Routed())
    model = copy.deepcopy(alone) if first else Routed()
    fully_shard(model.experts, mesh=everyone())
    fully_shard(model, mesh=everyone())
    ak.convert(model)
    assert experts.is_converted(model.experts)
    x = normal(10, 16)
    found, expected = gradients(model, x[: 0 if rank else 10]), gradients(alone, x)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad / world, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_dtensors_are_refused_by_name():
    weight = distribute_tensor(normal(4, 8, 6), everyone(), [Shard(0)])
    with pytest.raises(
        TypeError, match=r"grouped_mm: b is a DTensor with the placements .*Shard.*; accepted: each rank's"
    ):
        ak.grouped_mm(normal(3, 8), weight, offs=torch.tensor([3, 3, 3, 3], dtype=torch.int32))

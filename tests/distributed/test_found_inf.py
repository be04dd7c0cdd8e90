"""torch's ShardedGradScaler over parameters sharded by hand, on two ranks: after an explicit ``unscale_``, whose flag it sums over
the ranks, a non-finite gradient on one of them decides for all, also where both overflow and the sum is 2."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from amp_kernels.optim import LAMB, SGD, AdamW, Lion

from ..helpers.ranks import on_ranks

OPTIMIZERS = {"AdamW": AdamW, "SGD": SGD, "Lion": Lion, "LAMB": LAMB}
#: the ranks with an inf, iteration by iteration; the first one comes before any state exists
BAD = [(0,), (), (0, 1), (1,), ()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_an_explicit_unscale_decides_for_all_ranks(name):
    torch.manual_seed(dist.get_rank())
    param = torch.nn.Parameter(torch.randn(33))
    optimizer = OPTIMIZERS[name]([param], lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}))
    scaler = ShardedGradScaler(device="cpu", init_scale=8.0, growth_interval=100)
    scaler.scale(torch.ones(()))  # makes the scale's tensor
    taken = []
    for ranks in BAD:
        param.grad = torch.randn(33) * 8.0
        if dist.get_rank() in ranks:
            param.grad[7] = torch.inf
        before = param.detach().clone()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        taken.append(not torch.equal(before, param))
    assert taken == [not bad for bad in BAD]
    assert param.isfinite().all()
    assert scaler.get_scale() == 8.0 / 2**3

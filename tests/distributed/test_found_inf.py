"""torch's ShardedGradScaler over parameters sharded by hand, on two ranks: after an explicit ``unscale_``, whose flag it sums over
the ranks, a non-finite gradient on one of them decides for all, also where both overflow and the sum is 2."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from amp_kernels.optim import LAMB, SGD, AdamW, Lion

OPTIMIZERS = {"AdamW": AdamW, "SGD": SGD, "Lion": Lion, "LAMB": LAMB}
#: the ranks with an inf, iteration by iteration; the first one comes before any state exists
BAD = [(0,), (), (0, 1), (1,), ()]


def trained(name):
    """Five iterations: whether each changed the weights, whether they are finite, the scale."""
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
    return taken, bool(param.isfinite().all()), scaler.get_scale()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_explicit_unscale_decides_for_all_ranks(ranks, name):
    assert ranks.run(trained, name, world=2) == [([not bad for bad in BAD], True, 8.0 / 2**3)] * 2

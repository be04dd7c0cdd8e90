"""Parameters sharded over ranks: a non-finite gradient on one of them must decide for all. Two processes over gloo.

Driven are the optimizers of this package, on the CPU, by torch's ShardedGradScaler (FSDP) and by the found_inf protocol
of torch.amp.GradScaler. What is proved: after an explicit ``unscale_``, whose flag ShardedGradScaler sums over the ranks
into a tensor of one element, every rank takes or skips the same steps and keeps the same scale, also where both ranks
overflow and the sum is 2; and so does a flag that the caller reduces. Not proved is anything about sharding by FSDP
itself, as each rank here holds a parameter of its own. A ``step`` without ``unscale_`` reduces nothing in torch's class:
the rank with the inf skips alone, with any optimizer. That test fails on the day torch reduces there, too.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from amp_kernels._raw.check_and_norm import check_and_norm
from amp_kernels.optim import LAMB, SGD, AdamW, Lion

WORLD = 2
OPTIMIZERS = {"AdamW": AdamW, "SGD": SGD, "Lion": Lion, "LAMB": LAMB}
#: the ranks with an inf, iteration by iteration; the first one comes before any state exists
BAD = [(0,), (), (0, 1), (1,), ()]
SHARED = [not bad for bad in BAD]  # the steps that are taken, if all ranks decide alike


def run(name, bad, step):
    """Five iterations by ``step(optimizer)``: whether each changed the weights, the weights, the steps counted."""
    torch.manual_seed(dist.get_rank())
    param = torch.nn.Parameter(torch.randn(33))
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = OPTIMIZERS[name]([param], lr=0.1, **options)
    taken = []
    for ranks in bad:
        param.grad = torch.randn(33) * 8.0
        if dist.get_rank() in ranks:
            param.grad[7] = torch.inf
        before = param.detach().clone()
        step(optimizer)
        taken.append(not torch.equal(before, param))
    return taken, bool(param.isfinite().all())


def by_sharded_scaler(name, explicit):
    scaler = ShardedGradScaler(device="cpu", init_scale=8.0, growth_interval=100)
    scaler.scale(torch.ones(()))  # makes the scale's tensor

    def step(optimizer):
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return (*run(name, BAD, step), scaler.get_scale())


def by_found_inf(name, reduction):
    """A caller of step() that reduces the flag: the optimizer gets the scale and the flag as attributes."""

    def step(optimizer):
        scale = torch.tensor(8.0)
        _, found_inf = check_and_norm([p.grad for p in optimizer.param_groups[0]["params"]], scale)
        dist.all_reduce(found_inf, op=reduction)
        optimizer.grad_scale, optimizer.found_inf = scale, found_inf
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf

    return run(name, BAD, step)


def work():
    return {
        name: {
            "explicit": by_sharded_scaler(name, True),
            "implicit": by_sharded_scaler(name, False),
            "max": by_found_inf(name, dist.ReduceOp.MAX),
            "sum": by_found_inf(name, dist.ReduceOp.SUM),
        }
        for name in OPTIMIZERS
    }


@pytest.fixture(scope="module")
def found(ranks):
    return ranks.run(work, world=WORLD)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_explicit_unscale_decides_for_all_ranks(found, name):
    for rank in range(WORLD):
        assert found[rank][name]["explicit"] == (SHARED, True, 8.0 / 2**3), rank


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("reduction", ["max", "sum"])
def test_a_reduced_flag_decides_for_all_ranks(found, name, reduction):
    for rank in range(WORLD):
        assert found[rank][name][reduction] == (SHARED, True), rank


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_unscale_torch_reduces_nothing(found, name):
    for rank in range(WORLD):
        alone = [rank not in bad for bad in BAD]
        assert found[rank][name]["implicit"] == (alone, True, 8.0 / 2 ** alone.count(False)), rank

"""``independent_groups=True`` on several ranks: units of sharded, replicated and expert parameters against an optimizer of each in one
process."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import amp_kernels as ak

from ..helpers.generators import normal
from ..helpers.ops import Ops
from ..helpers.ranks import on_ranks
from .worlds import everyone, grid, whole

SHAPES = [(8, 6), (3, 5)]  # of each dense unit: pieces of even and of uneven size
EXPERT = (4, 6)
LIMITS = {"ada": 0.5, "bob": 1e4, "experts": 3.0}


def on(mesh, placements):
    return lambda tensor: distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def fleet(layout):
    """By unit: the placement of its tensors, how many distinct ones there are of each, the number of this rank's, and the group key."""
    mesh, rank = grid(("edp", "ep")), dist.get_rank()
    rows = on(everyone(), [Shard(0)])
    dense = {
        "flat": rows,
        "2-D": on(mesh, [Shard(0), Shard(1)]),
        "replicated": on(mesh, [Replicate(), Shard(0)]),
    }.get(layout, rows)
    ep = mesh["ep"].size()
    experts = {
        "slice": (on(mesh["edp"], [Shard(0)]), ep, rank % ep, mesh["ep"].get_group()),
        "whole mesh": (on(everyone(), [Shard(0)]), 1, 0, None),
        "plain": (torch.clone, dist.get_world_size(), rank, dist.group.WORLD),
        "copies": (torch.clone, 1, 0, "copies"),
    }.get(layout, (dense, 1, 0, None))
    return {"ada": (dense, 1, 0, None), "bob": (dense, 1, 0, None), "experts": experts}


class Fleet:
    """Units on ranks, and each in an optimizer of its own, which has all experts."""

    def __init__(self, layout, name, **options):
        self.units = fleet(layout)
        self.mine, self.all, groups, self.each = {}, {}, [], {}
        for number, (unit, (put, copies, own, key)) in enumerate(self.units.items()):
            shapes = [EXPERT] if unit == "experts" else SHAPES
            values = [
                [normal(*shape, seed=100 * number + 10 * i + e) for e in range(copies)]
                for i, shape in enumerate(shapes)
            ]
            self.mine[unit] = [nn.Parameter(put(of_shape[own])) for of_shape in values]
            self.all[unit] = [[nn.Parameter(value) for value in of_shape] for of_shape in values]
            group = {"params": self.mine[unit], "unit": unit, "max_grad_norm": LIMITS[unit]}
            groups.append(group if key is None else {**group, "shard_group": key})
            params = [p for of_shape in self.all[unit] for p in of_shape]
            self.each[unit] = getattr(ak.optim, name)(params, lr=0.01, max_grad_norm=LIMITS[unit], skip_nonfinite=True)
        self.one = getattr(ak.optim, name)(groups, lr=0.01, independent_groups=True, skip_nonfinite=True, **options)

    def give(self, number, broken=None, absent=None):
        """``broken``: (unit, number of the expert) with a NaN; ``absent``: (unit, number) without a gradient, ``None``: all."""
        for unit, (put, _, own, _) in self.units.items():
            for i, (mine, of_shape) in enumerate(zip(self.mine[unit], self.all[unit], strict=True)):
                for e, p in enumerate(of_shape):
                    p.grad = normal(*p.shape, seed=1000 + 100 * number + 10 * i + e)
                    if broken == (unit, e) and i == 0:
                        p.grad[-1, -1] = math.nan
                mine.grad = put(of_shape[own].grad)
                for e, p in enumerate(of_shape):
                    if absent in ((unit, e), (unit, None)):
                        p.grad, mine.grad = None, None if e == own else mine.grad

    def step(self):
        self.one.step()
        for unit, optimizer in self.each.items():
            if any(p.grad is not None for of_shape in self.all[unit] for p in of_shape):
                optimizer.step()

    def norm(self, unit):
        squares = [p.grad.square().sum() for of_shape in self.all[unit] for p in of_shape if p.grad is not None]
        return sum(squares, torch.zeros(())).sqrt()

    def furthest(self):
        """The largest difference of a weight or a state."""
        worst = 0.0
        for unit, (_, _, own, _) in self.units.items():
            for mine, of_shape in zip(self.mine[unit], self.all[unit], strict=True):
                wanted = {"weight": of_shape[own], **self.each[unit].state[of_shape[own]]}
                found = {"weight": mine, **self.one.state[mine]}
                assert wanted.keys() == found.keys()
                for key, value in wanted.items():
                    worst = max(worst, (whole(found[key].detach()) - value.detach()).abs().max().item())
        return worst


LAYOUTS = ("flat", "2-D", "replicated", "slice", "plain", "copies", "whole mesh")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Muon"])
@on_ranks("world")
def test_units_on_ranks_are_units_of_one_process(name):
    for layout in LAYOUTS:
        it, told = Fleet(layout, name), []
        last = it.units["experts"][1] - 1
        lacks = ("experts", 0) if last else None
        steps = [
            (None, None),
            (("experts", last), None),
            (None, ("bob", None)),
            (("ada", 0), None),
            (None, lacks),
            (None, None),
        ]
        for number, (broken, absent) in enumerate(steps):
            it.give(number, broken, absent)
            it.step()
            results = it.one.group_results
            told.append(results.skipped.tolist())
            wanted = torch.stack([it.norm(unit) for unit in it.units])
            torch.testing.assert_close(results.norms.nan_to_num(-1), wanted.nan_to_num(-1), rtol=1e-6, atol=0)
        assert told == [[i == bad for i in range(3)] for bad in (None, 2, None, 0, None, None)], layout
        assert (results.steps.tolist(), results.skips.tolist()) == ([5, 5, 5], [1, 0, 1]), layout
        assert it.furthest() <= (1e-6 if name == "AdamW" else 1e-5), layout


@pytest.mark.parametrize("layout", ["stages", "ZeRO"])
@on_ranks(4)
def test_units_whose_tensors_are_spread_over_ranks(layout):
    """Each rank has other tensors, and not as many: those of its stage of a pipeline, or those that ZeroRedundancyOptimizer gives it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = [[normal(4, 3 + i, seed=10 * unit + i) for i in range(2 * world)] for unit in range(3)]
    owner = [min(i // 2 + (i % 2 and unit == 1), world - 1) for unit in range(3) for i in range(2 * world)]
    alone = [[nn.Parameter(value.clone()) for value in values] for values in every]
    mine = [[nn.Parameter(value.clone()) for value in values] for values in every]
    limits, options = (
        (0.5, 1e4, 3.0),
        {"skip_nonfinite": True, "shard_group": dist.group.WORLD, "independent_groups": True},
    )
    numbers = iter(owner)
    kept = [[p for p in params if layout == "ZeRO" or next(numbers) == rank] for params in mine]
    groups = [{"params": params, "unit": str(i), "max_grad_norm": limits[i]} for i, params in enumerate(kept)]
    if layout == "ZeRO":
        ours = ZeroRedundancyOptimizer(groups, optimizer_class=ak.optim.AdamW, lr=0.01, **options)
        results = lambda: ours.optim.group_results  # noqa: E731
    else:
        ours = ak.optim.AdamW(groups, lr=0.01, **options)
        results = lambda: ours.group_results  # noqa: E731
    each = [
        ak.optim.AdamW(p, lr=0.01, max_grad_norm=n, skip_nonfinite=True) for p, n in zip(alone, limits, strict=True)
    ]
    for number in range(4):
        for unit, (params, others) in enumerate(zip(mine, alone, strict=True)):
            for i, (p, q) in enumerate(zip(params, others, strict=True)):
                grad = normal(*p.shape, seed=1000 + 100 * number + 10 * unit + i)
                grad[0, 0] = math.nan if (number, unit, i) in ((1, 0, 2 * world - 1), (2, 2, 0)) else grad[0, 0]
                p.grad, q.grad = grad, grad.clone()
        ours.step()
        for optimizer in each:
            optimizer.step()
        wanted = torch.stack([torch.stack([p.grad.square().sum() for p in params]).sum().sqrt() for params in alone])
        torch.testing.assert_close(results().norms.nan_to_num(-1), wanted.nan_to_num(-1), rtol=1e-6, atol=0)
    assert results().skips.tolist() == [1, 0, 1]
    pairs = [(p, q) for i in range(3) for p, q in zip(mine[i], alone[i], strict=True) if any(p is k for k in kept[i])]
    assert max((p - q).abs().max().item() for p, q in pairs) <= 1e-6


@pytest.mark.parametrize(("way", "world"), [("fsdp", 2), ("hsdp", 4), ("unscale_", 2)])
@pytest.mark.parametrize("count", [1, 3, 40])
@on_ranks("world")
def test_units_sharded_by_fsdp2_and_one_sum_for_all(way, count):
    """Adapters under FSDP2 and a loss scale. In the second step one has a NaN, in the third none of its gradients is there."""

    def adapters():
        return [nn.Linear(6, 3 + i % 4) for i in range(count)]

    torch.manual_seed(0)
    mine, alone = adapters(), adapters()
    for p, q in zip(mine, alone, strict=True):
        q.load_state_dict(p.state_dict())
        fully_shard(p, mesh=everyone() if way != "hsdp" else grid())
    groups = [{"params": p.parameters(), "unit": str(i), "max_grad_norm": 0.3 * (i + 1)} for i, p in enumerate(mine)]
    one = ak.optim.AdamW(groups, lr=0.01, independent_groups=True)
    each = [ak.optim.AdamW(q.parameters(), lr=0.01, max_grad_norm=0.3 * (i + 1)) for i, q in enumerate(alone)]
    scalers = [ak.GradScaler("cpu", init_scale=8.0, growth_interval=100) for _ in range(2)]
    for number in range(4):
        x = normal(4, 6, seed=number)
        for i, (p, q) in enumerate(zip(mine, alone, strict=True)):
            bad = math.nan if (number, i) == (1, count - 1) else 1.0
            for module, scaler in ((p, scalers[0]), (q, scalers[1])):
                module.zero_grad()
                if (number, i) != (2, count - 1) or count == 1:
                    scaler.scale(module(x * bad).square().mean()).backward()
        if way == "unscale_":
            scalers[0].unscale_(one)
        with Ops() as ops:
            scalers[0].step(one)
        for i, optimizer in enumerate(each):
            if alone[i].weight.grad is not None:
                scalers[1].step(optimizer)
        for scaler in scalers:
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
    assert one.group_results.skips.tolist() == [0] * (count - 1) + [1]
    pairs = zip(mine, alone, strict=True)
    worst = max(
        (whole(a.detach()) - b.detach()).abs().max().item()
        for p, q in pairs
        for a, b in zip(p.parameters(), q.parameters(), strict=True)
    )
    assert worst <= 1e-6
    assert ops.count("c10d") == 1


@on_ranks(2)
def test_ranks_with_other_units_are_refused():
    rank = dist.get_rank()
    param = nn.Parameter(torch.ones(3))
    group = {"params": [param], "unit": f"stage {rank}"}
    optimizer = ak.optim.AdamW([group], independent_groups=True, shard_group=dist.group.WORLD)
    param.grad = torch.ones(3)
    before = param.detach().clone()
    with pytest.raises(
        ValueError, match=rf"units are \['stage {rank}'\] here and \['stage {1 - rank}'\] on rank {1 - rank}"
    ):
        optimizer.step()
    assert torch.equal(param, before)

"""GradScaler with torch's optimizers over placed parameters, and clip_grad_norm_ on their gradients."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import amp_kernels as ak
from amp_kernels._sharding.local import local

from ..helpers.generators import normal
from ..helpers.ranks import on_ranks
from .worlds import LAYOUTS, difference, everyone, give, make_model, whole, without_sync

THEIRS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
}


def check_as_in_one_process(layout, name, max_norm, explicit):
    """Three steps of one of torch's optimizers, the second with an infinite gradient in the last piece of the last rank."""
    model, reference = LAYOUTS[layout](make_model()), make_model()
    optimizer, alone = THEIRS[name](model.parameters()), THEIRS[name](reference.parameters())
    mine, other = (ak.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    mine.scale(torch.ones(())), other.scale(torch.ones(()))
    for step in range(3):
        give(model, reference, step, mine.get_scale(), (dist.get_world_size() - 1, 1) if step == 1 else None)
        for scaler, o in ((mine, optimizer), (other, alone)):
            if explicit:
                scaler.unscale_(o)
            scaler.step(o, max_norm=max_norm)
            scaler.update()
        if max_norm is not None:
            assert type(mine.last_grad_norm) is torch.Tensor
            a, b = mine.last_grad_norm.item(), other.last_grad_norm.item()
            assert abs(a / b - 1) < 4e-7 if math.isfinite(b) else not math.isfinite(a)
        assert mine.last_step_skipped == other.last_step_skipped == (step == 1)
        assert mine.get_scale() == other.get_scale()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert difference(whole(p.detach()), q.detach()) < 1e-6


# torch's fused and foreach steps take no lists of plain tensors and DTensors mixed, or of two meshes
@pytest.mark.parametrize(
    ("world", "layout", "names"), [(2, "fsdp", list(THEIRS)), (2, "replicated", ["SGD"]), (4, "hsdp", list(THEIRS))]
)
@on_ranks("world")
def test_torchs_optimizers_skip_and_clip_as_in_one_process(layout, names):
    for case in itertools.product(names, (None, 0.5), (False, True)):
        check_as_in_one_process(layout, *case)


@pytest.mark.parametrize("make", THEIRS)
@pytest.mark.parametrize("bad", [(1,), (0, 1)])
@on_ranks(2)
def test_an_infinity_in_a_later_sharded_gradient_stops_all_ranks(make, bad):
    """torch reduces the flag by the placements of the first gradient only: here that one is replicated. Its fused optimizers take a
    flag of 2 for none."""
    a = nn.Parameter(distribute_tensor(torch.ones(4, 4), everyone(), [Replicate()]))
    b = nn.Parameter(distribute_tensor(torch.ones(4, 4), everyone(), [Shard(0)]))
    optimizer = THEIRS[make]([a, b])
    scaler = ak.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    if dist.get_rank() in bad:
        local(b.grad)[-1, -1] = torch.inf
    before = local(b.detach()).clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(local(b), before)
    assert scaler.get_scale() == 4.0


@on_ranks(4)
def test_torchs_scaler_steps_ours():
    """torch's scaler with an optimizer of this package: the flag is torch's to agree on, here for gradients placed alike."""
    model, reference = LAYOUTS["fsdp"](make_model()), make_model()
    optimizer, alone = (ak.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference))
    mine, other = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    mine.scale(torch.ones(())), other.scale(torch.ones(()))
    for step in range(3):
        give(model, reference, step, mine.get_scale(), (1, 0) if step == 1 else None)
        for scaler, o in ((mine, optimizer), (other, alone)):
            scaler.step(o)
            scaler.update()
        assert mine.get_scale() == other.get_scale()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(p.detach()), q.detach())


@pytest.mark.parametrize("layout", ["replicated", "fsdp", "hsdp", "part", "mixed", "fsdp x tp"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(4)
def test_total_norm_and_clipping(layout, norm_type):
    model, reference = LAYOUTS[layout](make_model()), make_model()
    give(model, reference, 0, 1.0, None)
    expected = ak.get_total_norm([q.grad for q in reference.parameters()], norm_type)
    found = ak.get_total_norm([p.grad for p in model.parameters()], norm_type)
    before = ak.clip_grad_norm_(model.parameters(), 0.25, norm_type)
    ak.clip_grad_norm_(reference.parameters(), 0.25, norm_type)
    apart = max(
        difference(whole(p.grad), q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )
    next(model.parameters()).grad.mul_(torch.nan)
    broken = ak.get_total_norm([p.grad for p in model.parameters()], norm_type)
    assert all(type(it) is torch.Tensor for it in (found, before, broken))
    assert (found / expected - 1).abs() <= (3 * 2.0**-24 if norm_type == 2.0 else 0.0)
    assert torch.equal(found, before)
    assert apart <= 2.0**-22
    assert broken.isnan()


# ---- real backward passes under torch's wrappers, against one process that sees all the data ----


def data(rank, step, micro):
    return normal(4, 7, seed=1000 * step + 10 * micro + rank)


def poison(model, on):
    """An infinity in the last element of what a rank holds."""
    pieces = [local(p.grad) for p in model.parameters() if p.grad is not None and local(p.grad).numel()]
    if dist.get_rank() in on:
        pieces[0].view(-1)[-1] = torch.inf


def gathered(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().clone() for p in model.parameters()]
    return [whole(p.detach()) for p in model.parameters()]


def wrapped(kind):
    model, everybody = ak.convert(make_model()), {"shard_group": dist.group.WORLD}
    if kind == "ddp":
        model = DistributedDataParallel(model)
        return model, ak.optim.AdamW(model.parameters(), lr=1e-2), {}
    if kind == "zero":
        model = DistributedDataParallel(model)
        options = {"optimizer_class": ak.optim.AdamW, "lr": 1e-2, **everybody}
        return model, ZeroRedundancyOptimizer(model.parameters(), **options), {}
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        return model, ak.optim.AdamW(model.parameters(), lr=1e-2, **everybody), {}
    if kind == "fsdp1, torch's AdamW":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), everybody
    model = LAYOUTS[kind](model)
    return model, ak.optim.AdamW(model.parameters(), lr=1e-2), {}


SCALE = 64.0


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "fsdp1", "fsdp1, torch's AdamW", "zero"])
@pytest.mark.parametrize(("max_norm", "micros"), [(None, 1), (0.5, 3)])
@on_ranks(4)
def test_training_is_that_of_one_process(kind, max_norm, micros):
    world, taken = dist.get_world_size(), []
    model, optimizer, options = wrapped(kind)
    reference = make_model()
    alone = ak.optim.AdamW(reference.parameters(), lr=1e-2)
    mine, theirs = ak.GradScaler("cpu", init_scale=SCALE, **options), ak.GradScaler("cpu", init_scale=SCALE)
    for step in range(4):
        optimizer.zero_grad()
        alone.zero_grad()
        for micro in range(micros):
            last = micro == micros - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            with without_sync(model, not last and hasattr(model, "no_sync")):
                mine.scale(model(data(dist.get_rank(), step, micro)).pow(2).sum()).backward()
            for rank in range(world):
                theirs.scale(reference(data(rank, step, micro)).pow(2).sum() / world).backward()
        if step == 2:
            poison(model, range(4) if kind in ("ddp", "zero") else [2])  # DDP's sum puts it everywhere
            next(reference.parameters()).grad[0, 0] = torch.inf
        mine.step(optimizer, max_norm=max_norm)
        theirs.step(alone, max_norm=max_norm)
        mine.update()
        theirs.update()
        taken.append(mine.last_step_skipped == theirs.last_step_skipped == (step == 2))
    worst = max(difference(a, b.detach()) for a, b in zip(gathered(model), reference.parameters(), strict=True))
    assert all(taken)
    assert mine.get_scale() == theirs.get_scale()
    assert worst < 1e-5


@pytest.mark.parametrize("check", ["max_grad_norm", "clip_grad_norm_", "ours", "torch's"])
@on_ranks(2)
def test_fsdp1_that_was_not_declared_is_refused(check):
    model = FullyShardedDataParallel(make_model(), use_orig_params=True, device_id=torch.device("cpu"))
    model(torch.ones(1, 7)).sum().backward()
    scaler = ak.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    refused = {
        "max_grad_norm": ak.optim.AdamW(model.parameters(), max_grad_norm=1.0).step,
        "clip_grad_norm_": lambda: ak.clip_grad_norm_(model.parameters(), 1.0),
        "ours": lambda: scaler.step(ak.optim.AdamW(model.parameters())),
        "torch's": lambda: scaler.step(torch.optim.AdamW(model.parameters())),
    }
    with pytest.raises(ValueError, match=r"sharded by FullyShardedDataParallel, and shard_group is None"):
        refused[check]()
    ak.optim.AdamW(model.parameters()).step()  # each element for itself

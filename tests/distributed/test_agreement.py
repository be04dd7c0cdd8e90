"""One norm and one decision on all ranks: which ops a step takes, who counts what, and what a failure of one rank does."""

import copy
import math
import os
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import amp_kernels as ak
from amp_kernels._sharding.agreement import Agreement, shard_number
from amp_kernels._sharding.local import local

from ..helpers.ops import Ops
from ..helpers.ranks import Failure, on_ranks
from .worlds import LAYOUTS, everyone, give, grid, make_model, whole

# ---- the ops of a step ----


@pytest.mark.parametrize(("layout", "checks"), [("fsdp", 1), ("hsdp", 1), ("part", 2)])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "LAMB"])
@on_ranks(4)
def test_a_step_is_one_check_one_sum_one_update_and_no_read_on_the_host(layout, checks, name):
    """Parameters that count on another rank are checked apart. LAMB's update is a half over copies of the moments, a sum and two halves."""
    model, reference = LAYOUTS[layout](make_model()), make_model()
    optimizer, scaler = getattr(ak.optim, name)(model.parameters(), lr=1e-2), ak.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        give(model, reference, step, 8.0, None)
        with Ops() as ops:
            scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    for _ in range(2):
        optimizer.step()
    update, updates, sums = {"AdamW": ("adamw_", 1, 1), "SGD": ("sgd_", 1, 1), "LAMB": ("lamb_half_", 3, 2)}[name]
    assert ops.count("check_and_norm") == (1 if dist.get_rank() == 0 else checks)
    assert ops.count(update) == updates
    assert ops.count("c10d") == ops.names.count("c10d::allreduce_") == sums
    assert not ops.count("_local_scalar_dense", "nonzero", "redistribute", "all_gather"), ops.names
    assert optimizer._plan.cached.with_tables  # without such a log


# ---- who counts ----


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["replicated", "columns", "fsdp", "hsdp", "part", "mixed", "tp", "fsdp x tp"])
@on_ranks("world")
def test_every_element_counts_once(layout):
    """Counts of each parameter's elements over all ranks, as multiples of the parameter."""
    model = LAYOUTS[layout](make_model())
    params = list(model.parameters())
    counts = Agreement(params).counts
    found = torch.tensor([float(local(p).numel() * c) for p, c in zip(params, counts, strict=True)])
    dist.all_reduce(found)
    assert (found / torch.tensor([float(p.numel()) for p in params])).tolist() == [1.0] * 6


def numbers(layout):
    """Pieces and their numbers, of all ranks."""
    model = LAYOUTS[layout](make_model())
    mine = [(shard_number(p), local(p.detach()).clone()) for p in model.parameters()]
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "mixed"])
def test_random_bits_differ_between_pieces_and_agree_between_copies(ranks, layout):
    pieces = list(zip(*ranks.run(numbers, layout)[0], strict=True))
    for holders in pieces:
        by_number = {}
        for number, piece in holders:
            assert torch.equal(by_number.setdefault(number, piece), piece)
        different = {tuple(piece.flatten().tolist()) for _, piece in holders if piece.numel()}
        assert len(by_number) >= len(different)


@on_ranks(4)
def test_meshes_that_are_no_parts_of_one_another_are_refused():
    a, b = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))[name] for name in "xy")
    params = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)) for mesh in (a, b)]
    with pytest.raises(ValueError, match="of which none covers the other"):
        ak.clip_grad_norm_(params, 1.0)
    optimizer = ak.optim.AdamW(params)
    for p in params:
        p.grad = torch.ones_like(p)
    before = [local(p.detach()).clone() for p in params]
    with pytest.raises(ValueError, match="of which none covers the other"):
        optimizer.step()
    assert all(torch.equal(local(p), b) for p, b in zip(params, before, strict=True))


# ---- ranks that differ ----


def lonely():
    """Plain pieces: rank 0 alone has a gradient, first an infinite one."""
    param = nn.Parameter(torch.ones(3))
    optimizer = ak.optim.AdamW([param], lr=0.1, shard_group=dist.group.WORLD)
    scaler, found = ak.GradScaler("cpu", init_scale=8.0), []
    scaler.scale(torch.ones(()))
    for value in (torch.inf, 8.0):
        param.grad = torch.full((3,), value) if dist.get_rank() == 0 else None
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        found.append(
            (scaler.get_scale(), scaler.last_step_skipped, scaler.last_grad_norm.item(), scaler.skipped_steps.item())
        )
    return found


def test_ranks_without_gradients_take_part(ranks):
    found = ranks.run(lonely)
    assert found == found[:1] * 4
    (scale, skipped, norm, skips), (later, taken, clean, still) = found[0]
    assert (scale, skipped, norm, skips) == (4.0, True, math.inf, 1)
    assert (later, taken, still) == (4.0, False, 1)
    assert clean == pytest.approx(2 * 3**0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@on_ranks(2)
def test_an_overflow_on_one_rank_is_one_on_all(bad, value):
    """A replicated parameter, whose gradient is not finite on one rank only, beside sharded ones."""
    model, reference = LAYOUTS["part"](make_model()), make_model()
    optimizer, scaler = ak.optim.SGD(model.parameters(), lr=1e-2), ak.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    give(model, reference, 0, 8.0, None)
    if dist.get_rank() == bad:
        model[4].bias.grad[0] = value
    before = [local(p.detach()).clone() for p in model.parameters()]
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert all(torch.equal(local(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == 4.0
    assert scaler.last_step_skipped
    assert not scaler.last_grad_norm.isfinite()


@pytest.mark.parametrize("ours", [True, False])
@on_ranks(4)
def test_too_many_skips_raise_on_all_ranks_and_name_the_tensors_of_all(ours):
    model, reference = LAYOUTS["fsdp"](make_model()), make_model()
    named = list(model.named_parameters())
    optimizer = ak.optim.AdamW(named) if ours else torch.optim.SGD(named, lr=0.1)
    scaler = ak.GradScaler("cpu", init_scale=8.0, max_consecutive_skips=2)
    scaler.scale(torch.ones(()))
    for step in range(2):
        give(model, reference, step, 8.0, (1, 0))
        if dist.get_rank() == 2:
            local(model[0].bias.grad)[0] = torch.nan
        scaler.step(optimizer)
        said = r"In the last of them 2 gradients were infinite or NaN: 0\.weight \(on rank 1\); 0\.bias \(on rank 2\)"
        with pytest.raises(RuntimeError, match=said) if step == 1 else nullcontext():
            scaler.update()


# ---- gradients that are placed in other ways ----


@on_ranks(4)
def test_gradients_that_are_still_to_be_summed():
    world = dist.get_world_size()
    param = nn.Parameter(distribute_tensor(torch.ones(3, 4), everyone(), [Replicate()]))
    optimizer = ak.optim.SGD([param], lr=1.0, max_grad_norm=1e9)
    for _ in range(3):  # until the step runs from addresses
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert optimizer._plan.cached is not None
    for _ in range(2):
        summand = torch.full((3, 4), 0.5 / world)
        param.grad = DTensor.from_local(summand, everyone(), [Partial()], run_check=False)
        norms = ak.get_total_norm([param.grad]), ak.clip_grad_norm_([param], 1e9)
        optimizer.step()
    assert not whole(param.detach()).any()
    for norm in norms:
        assert type(norm) is torch.Tensor
        assert norm.item() == pytest.approx(3**0.5, rel=1e-6)


@on_ranks(4)
def test_refusals():
    placed = distribute_tensor(torch.ones(4), everyone(), [Shard(0)])
    summands = DTensor.from_local(torch.ones(4), everyone(), [Partial()], run_check=False).requires_grad_()
    param = nn.Parameter(placed)
    with pytest.raises(ValueError, match=r"Partial.*accepted: Shard and Replicate"):
        ak.optim.AdamW([nn.Parameter(summands)])
    with pytest.raises(ValueError, match=r"shadow_dtype is torch\.bfloat16; accepted: None"):
        ak.optim.AdamW([param], shadow_dtype=torch.bfloat16)
    optimizer = ak.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    grouped = ak.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, shard_group=dist.group.WORLD)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(
            TypeError, match=r"SGD: an optimizer with a shard_group cannot be pickled.*accepted: state_dict"
        ):
            copied(grouped)
    scaler = ak.GradScaler("cpu", enabled=False, shard_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"SGD has no shard_group.*or the key of each of its groups"):
        scaler.step(optimizer)
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(2)
    dense, experts = {"params": weights[:1]}, {"params": weights[1:], "shard_group": dist.group.WORLD}
    with pytest.raises(ValueError, match="SGD has no shard_group"):
        scaler.step(ak.optim.SGD([dense, experts], lr=0.5))
    scaler.step(ak.optim.SGD([{**dense, "shard_group": "copies"}, experts], lr=0.5))
    assert torch.equal(weights[0], torch.full((2,), 0.5))


# ---- faults: the others end with an error, not a hang ----


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if dist.get_rank() == 1:
            raise FloatingPointError("planted")
        return grad


def raises_in_backward(kill):
    model = fully_shard(make_model(), mesh=everyone())
    optimizer, scaler = ak.optim.AdamW(model.parameters()), ak.GradScaler("cpu")
    hidden = model(torch.ones(2, 7))
    if kill and dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    scaler.scale(Broken.apply(hidden).sum()).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()


@pytest.mark.parametrize("kill", [False, True], ids=["one raises in backward", "one is killed"])
def test_a_rank_that_fails_ends_all(ranks, kill):
    found = ranks.outcomes(raises_in_backward, kill, world=2)
    assert all(isinstance(it, Failure) for it in found)
    assert ("the process ended" if kill else "planted") in found[1].text
    assert "no answer in time" not in found[0].text


# ---- a pipeline of sharded stages ----


@on_ranks(4)
def test_stages_of_a_pipeline_clip_alike():
    """Each row of the grid is a stage: other parameters, sharded over the row; shard_group joins the rows."""
    mesh = grid(("pp", "dp"))
    model = fully_shard(make_model(), mesh=mesh["dp"])
    optimizer = ak.optim.AdamW(model.parameters(), lr=1e-2, shard_group=mesh["pp"].get_group())
    scaler = ak.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for p in model.parameters():
        p.grad = torch.ones_like(p) * 8.0 * (1 + mesh.get_coordinate()[0])
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    elements = sum(p.numel() for p in model.parameters())
    assert scaler.last_grad_norm.item() == pytest.approx((elements * (1 + 4)) ** 0.5, rel=1e-6)

"""Models placed on ranks in every way that torch offers, the same steps for them and for one process, and what to compare."""

import functools
import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp_kernels as ak
from amp_kernels._sharding.local import local

SCALE = 64.0


def make_wide(dtype=torch.float32):
    """Weights with moments in 8 bits. At four ranks a piece begins with a whole block of 32 elements."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)
    return nn.Sequential(*layers).to(dtype)


def make_model(dtype=torch.float32):
    """[1, 9]: at two ranks or more some hold nothing of it. 9 rows: uneven pieces."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 1), nn.Tanh(), nn.Linear(1, 5)).to(dtype)


@functools.cache
def grid(names=("dp", "tp")):
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)


@functools.cache
def everyone():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def put(model, placed):
    """Replace each parameter by a DTensor: ``placed`` has a mesh and placements for each, or ``None`` for a plain one."""
    for (name, param), at in zip(list(model.named_parameters()), placed, strict=True):
        if at is not None:
            owner, _, leaf = name.rpartition(".")
            sharded = distribute_tensor(param.data, *at, src_data_rank=None)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(sharded))
    return model


def mixed(model):
    """All kinds of placements on one mesh, and on its slices."""
    mesh = grid()
    whole = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()], None, [Replicate()] * 2, None]
    placed = [at and (mesh, at) for at in whole]
    placed[3], placed[5] = (mesh["dp"], [Shard(0)]), (mesh["tp"], [Shard(0)])
    return put(model, placed)


def partly(model):
    """Plain parameters beside sharded ones."""
    fully_shard(model[0], mesh=everyone())
    return model


def tensor_parallel(model, mesh):
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


LAYOUTS = {
    "plain": lambda m: m,
    "replicated": lambda m: put(m, [(everyone(), [Replicate()]) for _ in m.parameters()]),
    "columns": lambda m: put(m, [(everyone(), [Shard(p.dim() - 1)]) for p in m.parameters()]),
    "fsdp": lambda m: fully_shard(m, mesh=everyone()),
    "hsdp": lambda m: fully_shard(m, mesh=grid()),
    "part": partly,
    "mixed": mixed,
    "tp": lambda m: tensor_parallel(m, everyone()),
    "fsdp x tp": lambda m: fully_shard(tensor_parallel(m, grid()["tp"]), mesh=grid()["dp"]),  # pieces of pieces
}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(flag):
    """True if any rank says so."""
    counted = torch.tensor(float(flag))
    dist.all_reduce(counted)
    return bool(counted > 0)


def gradients(reference, step, scale):
    """The same for everybody, so that only the optimizer can differ."""
    generator = torch.Generator().manual_seed(100 + step)
    return [(torch.randn(p.shape, generator=generator) * scale * 3).to(p.dtype) for p in reference.parameters()]


def give(model, reference, step, scale, bad):
    """Gradients for both; ``bad``: (rank, number of the parameter), whose piece there becomes infinite."""
    for i, (p, q, grad) in enumerate(
        zip(model.parameters(), reference.parameters(), gradients(reference, step, scale), strict=True)
    ):
        q.grad = grad.clone()
        p.grad = grad.clone()
        if isinstance(p, DTensor):
            p.grad = None
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
        if bad is not None and bad[1] == i:
            piece = local(p.grad)
            hit = dist.get_rank() == bad[0] and piece.numel() > 0
            if hit:
                piece.view(-1)[-1] = torch.inf
            if same(hit):
                q.grad.view(-1)[-1] = torch.inf


def difference(mine, reference):
    """The largest difference relative to the largest magnitude; 0.0 only where all bits agree."""
    if torch.equal(mine, reference):
        return 0.0
    mine, reference = mine.double(), reference.double()
    return max(((mine - reference).abs().max() / (reference.abs().max() + 1e-30)).item(), 1e-30)


def states(optimizer, param):
    """A parameter's state as checkpoints show it, whole."""
    return {key: whole(value) for key, value in optimizer._store.current(param, optimizer.state).items()}


def make_optimizer(name, model, **options):
    """Muon leaves what is no matrix to AdamW."""
    params = list(model.parameters())
    if name == "Muon":
        params = [{"params": [p], "algorithm": "muon" if p.dim() == 2 else "adamw"} for p in params]
    return getattr(ak.optim, name)(params, **options)


def compare(layout, name, dtype, options, max_norm, bad, steps=6, make=make_model):
    """Some steps on this world and in one process, which take the same ones at the same scales: how far weights and states are apart at
    most, and norms."""
    model, reference = LAYOUTS[layout](make(dtype)), make(dtype)
    optimizer, alone = (make_optimizer(name, m, lr=1e-2, **options) for m in (model, reference))
    mine, theirs = (ak.GradScaler("cpu", init_scale=SCALE, growth_interval=3) for _ in range(2))
    mine.scale(torch.ones(())), theirs.scale(torch.ones(()))
    norms = [0.0]
    for step in range(steps):
        give(model, reference, step, theirs.get_scale(), bad.get(step))
        for s, o in ((mine, optimizer), (theirs, alone)):
            s.step(o, max_norm=max_norm)
            s.update()
        assert mine.last_step_skipped == theirs.last_step_skipped, (layout, name, options)
        a, b = mine.last_grad_norm.item(), theirs.last_grad_norm.item()
        norms.append(abs(a / b - 1) if math.isfinite(b) else float(math.isfinite(a)))
    worst = 0.0
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        worst = max(worst, difference(whole(p.detach()), q.detach()))
        ours, expected = states(optimizer, p), states(alone, q)
        assert ours.keys() == expected.keys()
        assert optimizer.state[p].keys() == alone.state[q].keys()
        for key in expected:
            worst = max(worst, difference(ours[key], expected[key]))
    assert mine.get_scale() == theirs.get_scale(), (layout, name, options)
    return worst, max(norms)


def without_sync(model, condition):
    return model.no_sync() if condition else nullcontext()

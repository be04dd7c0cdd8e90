"""Muon over matrices whose pieces are spread over several ranks: owners, exchanges, and the bits of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import amp_kernels as ak
from amp_kernels._sharding.agreement import Agreement
from amp_kernels._sharding.local import local
from amp_kernels._sharding.pieces import holders_of
from amp_kernels.optim import _exchange, _matrices
from amp_kernels.optim._matrices import Matrices, Member

from ..helpers.ranks import on_ranks
from .worlds import everyone, grid, whole

SHAPES = [(12, 20), (20, 12), (12, 20), (9, 5), (3, 30)]


def placed(tensor, mesh, placements):
    return torch.nn.Parameter(distribute_tensor(tensor, mesh, placements, src_data_rank=None))


def weights(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def largest_difference(shapes, put, steps=3, **options):
    """Between parameters placed by ``put`` and one process, after some steps; and the collectives of the last step."""
    values = weights(shapes)
    mine, alone = [put(value) for value in values], [torch.nn.Parameter(value.clone()) for value in values]
    ours, theirs = ak.optim.Muon(mine, lr=0.02, **options), ak.optim.Muon(alone, lr=0.02, **options)
    moved, calls = dist.all_to_all_single, []
    dist.all_to_all_single = lambda *args, **kwargs: (calls.append(1), moved(*args, **kwargs))[1]
    try:
        for step in range(steps):
            for p, q, grad in zip(mine, alone, weights(shapes, seed=step + 1), strict=True):
                p.grad, q.grad = put(grad).data, grad
            calls.clear()
            ours.step()
            theirs.step()
    finally:
        dist.all_to_all_single = moved
    return max((whole(p.detach()) - q.detach()).abs().max().item() for p, q in zip(mine, alone, strict=True)), len(
        calls
    )


@on_ranks(4)
def test_bits_and_collectives():
    """Two exchanges in two rounds however many matrices there are, one round for a matrix each, and none for whole experts."""
    world, mesh = everyone(), grid()
    rows, both = [Shard(0)], [Shard(0), Shard(1)]
    stacks = [(8, 6, 10), (5, 10, 6)]
    found = {
        "rows": largest_difference(SHAPES, lambda t: placed(t, world, rows)),
        "rows and columns": largest_difference(SHAPES, lambda t: placed(t, mesh, both)),
        "columns of replicas": largest_difference(SHAPES, lambda t: placed(t, mesh, [Replicate(), Shard(1)])),
        "heads": largest_difference([(12, 20), (24, 6)], lambda t: placed(t, world, rows), heads=3),
        "flattened": largest_difference([(6, 3, 2, 2)], lambda t: placed(t, world, [Shard(1)]), flatten=True),
        "experts": largest_difference(stacks, lambda t: placed(t, world, rows)),
        "rows of experts": largest_difference(stacks, lambda t: placed(t, mesh, [Shard(0), Shard(1)])),
        "many": largest_difference(SHAPES * 6, lambda t: placed(t, world, rows), steps=2),
    }
    for case, (difference, collectives) in found.items():
        assert difference == 0.0, case
        assert collectives == {"experts": 0, "flattened": 2, "heads": 2, "rows of experts": 2}.get(case, 4), case


@pytest.mark.parametrize(("name", "least"), [("Muon", 4), ("LAMB", 1)])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"state_dtype": torch.bfloat16}])
@on_ranks(4)
def test_a_step_whose_ranks_lose_each_other_changes_nothing(name, least, options):
    """Nothing changes in a step whose call number ``n`` of other ranks fails on all of them, and the step is that of a twin once it is
    taken again."""
    place, method = {"Muon": (dist, "all_to_all_single"), "LAMB": (Agreement, "total")}[name]
    shapes, called = [*SHAPES, (64, 64)], getattr(place, method)
    mine, twins = ([placed(value, everyone(), [Shard(0)]) for value in weights(shapes)] for _ in range(2))
    ours, theirs = (getattr(ak.optim, name)(params, lr=0.02, **options) for params in (mine, twins))

    def held():
        states = [value for state in ours.state.values() for value in state.values()]
        return [local(tensor).detach().clone() for tensor in [*mine, *states]]

    unchanged = []
    for step in range(4):
        for p, q, grad in zip(mine, twins, weights(shapes, seed=step + 1), strict=True):
            p.grad = q.grad = placed(grad, everyone(), [Shard(0)]).data
        before, left = held(), [step]

        def fails(*args, left=left, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("lost")
            return called(*args, **kwargs)

        setattr(place, method, fails)
        try:
            ours.step()
        except RuntimeError:
            unchanged.append(all(map(torch.equal, before, held())))  # the state is there after the first step
            setattr(place, method, called)
            ours.step()
        finally:
            setattr(place, method, called)
        theirs.step()
    assert len(unchanged) >= least
    assert all(unchanged)
    assert all(map(torch.equal, map(local, mine), map(local, twins)))


@on_ranks(4)
def test_one_round_travels_while_the_other_is_multiplied():
    """The order of exchanges and products on this rank, with two shapes of which each rank owns one of either."""
    events, moved, multiply = [], dist.all_to_all_single, _matrices.orthogonalized
    shapes = [(12, 20)] * 4 + [(9, 5)] * 4
    params = [placed(value, everyone(), [Shard(0)]) for value in weights(shapes)]
    for p, grad in zip(params, weights(shapes, seed=1), strict=True):
        p.grad = placed(grad, everyone(), [Shard(0)]).data
    dist.all_to_all_single = lambda *args, **kwargs: (events.append("exchange"), moved(*args, **kwargs))[1]
    _matrices.orthogonalized = lambda x, *args: (events.append(tuple(x.shape)), multiply(x, *args))[1]
    try:
        ak.optim.Muon(params).step()
    finally:
        dist.all_to_all_single, _matrices.orthogonalized = moved, multiply
    assert events == ["exchange", "exchange", (1, 9, 5), "exchange", (1, 12, 20), "exchange"]


def local_rows(count, rank):
    """The first row of a rank's piece, of four."""
    return min(count, rank * -(-count // 4))


@pytest.mark.parametrize(
    "idle", [{1: (0, 3)}, {0: (1,), 2: (1, 2)}, {3: (0, 1, 2, 3, 4)}, dict.fromkeys(range(4), (2,))]
)
@on_ranks(4)
def test_ranks_may_have_gradients_for_different_parameters(idle):
    """``idle`` has the parameters that have no gradient on a rank. Such a piece counts as zeros, which one process has instead, and
    stays; no rank waits for another one's."""
    rank, values = dist.get_rank(), weights(SHAPES)
    mine = [placed(value, everyone(), [Shard(0)]) for value in values]
    alone = [torch.nn.Parameter(value.clone()) for value in values]
    ours, theirs = ak.optim.Muon(mine, lr=0.02), ak.optim.Muon(alone, lr=0.02)
    for i, (p, q, grad) in enumerate(zip(mine, alone, weights(SHAPES, seed=1), strict=True)):
        p.grad = None if i in idle.get(rank, ()) else placed(grad, everyone(), [Shard(0)]).data
        pieces = list(grad.tensor_split([local_rows(len(grad), r) for r in range(1, 4)]))
        q.grad = torch.cat([0 * piece if i in idle.get(r, ()) else piece for r, piece in enumerate(pieces)])
    ours.step()
    theirs.step()
    for i, (p, q, start) in enumerate(zip(mine, alone, values, strict=True)):
        wanted = start if i in idle.get(rank, ()) else q.detach()
        rows = slice(local_rows(len(start), rank), local_rows(len(start), rank + 1))
        assert torch.equal(local(p).detach(), wanted[rows])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("max_norm", "bound"), [(None, 0.0), (0.5, 2e-3)])
@on_ranks("world")
def test_zero_redundancy_optimizer(max_norm, bound):
    """Whole matrices on the ranks that ZeroRedundancyOptimizer gives them to, beside AdamW's parameters: bits of one process, with
    clipping up to the order of the norm's sum, which the clip factor passes on to the momentum."""
    shapes = [*SHAPES, (7,), (3,)]
    values, options = weights(shapes), {"lr": 0.02, "max_grad_norm": max_norm, "skip_nonfinite": True}

    def groups(params):
        vectors = [p for p in params if p.dim() == 1]
        return [{"params": [p for p in params if p.dim() == 2]}, {"params": vectors, "algorithm": "adamw"}]

    mine, alone = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    wrapper = {"optimizer_class": ak.optim.Muon, "shard_group": dist.group.WORLD}
    ours = ZeroRedundancyOptimizer(groups(mine), **wrapper, **options)
    theirs = ak.optim.Muon(groups(alone), **options)
    for step in range(4):
        for p, q, grad in zip(mine, alone, weights(shapes, seed=step + 1), strict=True):
            if step == 2 and p.shape == (9, 5):
                grad[0, 0] = torch.inf
            p.grad, q.grad = grad, grad.clone()
        ours.step()
        theirs.step()
    assert max((p - q).abs().max().item() for p, q in zip(mine, alone, strict=True)) <= bound


@on_ranks(1)
def test_a_world_of_one():
    """DTensors over a single rank, and a stack of experts: no exchange."""
    mesh = init_device_mesh("cpu", (1,))
    assert largest_difference([*SHAPES, (2, 6, 4)], lambda t: placed(t, mesh, [Shard(0)])) == (0.0, 0)


@on_ranks(4)
def test_checkpoints_of_any_number_of_ranks():
    """The momentum of four ranks goes on in one process, and back."""
    values = weights(SHAPES)
    mine = [placed(value, everyone(), [Shard(0)]) for value in values]
    ours = ak.optim.Muon(mine, lr=0.02)
    alone = [torch.nn.Parameter(value.clone()) for value in values]
    theirs = ak.optim.Muon(alone, lr=0.02)

    def step():
        for p, q, grad in zip(mine, alone, weights(SHAPES, seed=4), strict=True):
            p.grad, q.grad = placed(grad, everyone(), [Shard(0)]).data, grad
        ours.step()
        theirs.step()

    step()
    full = theirs.state_dict()
    ours.load_state_dict(full)
    sharded = ours.state_dict()
    for i, values in full["state"].items():
        assert torch.equal(whole(sharded["state"][i]["momentum_buffer"]), values["momentum_buffer"])
        assert local(sharded["state"][i]["momentum_buffer"]).shape == local(mine[i]).shape
    theirs.load_state_dict(sharded)
    step()
    assert all(torch.equal(whole(p.detach()), q.detach()) for p, q in zip(mine, alone, strict=True))


@on_ranks(4)
def test_owners_are_balanced_by_work():
    """Each of 4 ranks gets two of 8 equal matrices; one with more work than the others together is alone on its rank."""
    shapes = [(64, 256)] + [(64, 64)] * 6
    found = []
    for some in ([(64, 64)] * 8, shapes):
        parameters = []
        for number, shape in enumerate(some):
            matrices = Matrices.of(torch.empty(shape, device="meta"), None, False)
            holders = holders_of(placed(torch.zeros(shape), everyone(), [Shard(0)]))
            parameters.append(_exchange.Sharded(Member(number, matrices, (), (0, 1.0)), number, shape, holders, False))
        found.append(list(_exchange.owners_of(parameters[::-1]).values()))
    equal, unequal = [sorted(map(counts.count, range(4))) for counts in found]
    assert equal == [2, 2, 2, 2]
    assert unequal == [1, 2, 2, 2]


@on_ranks(4)
def test_refusals():
    pipeline = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
    two = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
    one_dim = placed(torch.zeros(8, 8), pipeline, [Shard(0), Shard(1)])  # one of the dimensions has one rank
    ak.optim.Muon([one_dim])
    ak.optim.Muon([placed(torch.zeros(8, 8), two, [Shard(0), Shard(1)])])
    transposed = placed(torch.zeros(8, 8), everyone(), [Shard(0)])
    transposed._local_tensor = torch.zeros(8, 2).t()
    with pytest.raises(ValueError, match=r"params\[0\] is a DTensor with pieces float32\[2, 8\] with strides"):
        ak.optim.Muon([transposed])

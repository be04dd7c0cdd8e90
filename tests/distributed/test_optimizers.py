"""The optimizers of this package over parameters placed on 2 and 4 ranks, against one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import amp_kernels as ak
from amp_kernels._raw._block8 import FIRST, decode
from amp_kernels._sharding.local import local
from amp_kernels.optim._launches import random_place

from ..helpers.ranks import on_ranks
from .worlds import LAYOUTS, compare, everyone, give, grid, make_model, make_wide, states, whole

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: (optimizer, dtype, options)
CASES = {
    "fp32": ("AdamW", F32, {}),
    "fp32 ema amsgrad": ("AdamW", F32, {"ema_decay": 0.9, "amsgrad": True}),
    "fp32 bf16 moments": ("Adam", F32, {"state_dtype": BF16}),
    "bf16 master": ("AdamW", BF16, {"ema_decay": 0.5}),
    "bf16 split": ("AdamW", BF16, {"master_weights": "split"}),
    "fp16 split": ("Adam", F16, {"master_weights": "split"}),
    "bf16 no master": ("AdamW", BF16, {"master_weights": "none_rne"}),
    "sgd": ("SGD", F32, {"momentum": 0.9}),
    "lion split": ("Lion", BF16, {"master_weights": "split"}),
    "muon": ("Muon", F32, {"state_dtype": BF16}),
    "muon split": ("Muon", BF16, {"master_weights": "split", "nesterov": False}),
}
#: Moments in 8 bits, and weights that are rounded stochastically.
WIDE_CASES = {
    "fp32": ("AdamW", F32, {"amsgrad": True, "ema_decay": 0.9}),
    "bf16 split24": ("AdamW", BF16, {"master_weights": "split24"}),
    "fp16 split24": ("Lion", F16, {"master_weights": "split24"}),
    "bf16 no master": ("SGD", BF16, {"master_weights": "none", "momentum": 0.9}),
    "muon": ("Muon", BF16, {"master_weights": "split24"}),
    "lamb": ("LAMB", F32, {}),
}
WORLDS = [(2, "fsdp"), (2, "part"), (2, "columns"), (4, "fsdp"), (4, "hsdp"), (4, "mixed"), (4, "tp"), (4, "fsdp x tp")]
#: a step after the first one, and one before there is any state
BAD = {0: (1, 0), 3: (0, 4)}


@pytest.mark.parametrize(("world", "layout"), WORLDS)
@on_ranks("world")
def test_bits_are_those_of_one_process(layout):
    for case, arguments in CASES.items():
        weights, norm = compare(layout, *arguments, None, BAD)
        assert weights == 0.0, case
        assert norm < 4e-7, case


@pytest.mark.parametrize(("world", "layout"), [*WORLDS, (4, "replicated")])
@on_ranks("world")
def test_bits_of_8_bit_moments_are_those_of_one_process(layout):
    """Codes, exponents and random bits do not depend on the mesh: whole blocks lie on one rank. LAMB's ratios of norms are sums over
    the ranks, in another order."""
    for case, (name, dtype, options) in WIDE_CASES.items():
        options = {"state_dtype": "8bit", "seed": 3, **options}
        weights, _ = compare(layout, name, dtype, options, None, BAD, make=make_wide)
        assert weights <= (1e-5 if case == "lamb" else 0.0), case


@pytest.mark.parametrize(("world", "layout"), [(2, "columns"), (4, "tp"), (4, "mixed"), (4, "fsdp x tp")])
@on_ranks("world")
def test_pieces_within_rows_consist_of_whole_blocks(layout):
    """Codes and exponents of AdamW as its state shows them."""
    model = LAYOUTS[layout](make_wide())
    optimizer = ak.optim.AdamW(model.parameters(), state_dtype="8bit")
    give(model, make_wide(), 0, 1.0, None)
    optimizer.step()
    for p in model.parameters():
        held = dict(optimizer.state[p].items())
        assert ("exp_avg_code" in held) == (p.dim() == 2)
        if p.dim() == 2:
            code, scale = held["exp_avg_code"], held["exp_avg_scale"]
            assert code.shape == p.shape
            assert scale.shape == (p.shape[0], p.shape[1] // 32)
            assert local(code).numel() == 32 * local(scale).numel()
            value = decode(whole(code).reshape(-1), whole(scale).reshape(-1), FIRST).view(p.shape)
            assert torch.equal(value, whole(optimizer.state[p]["exp_avg"]))
            assert torch.equal(value, states(optimizer, p)["exp_avg"])


@on_ranks(2)
def test_copies_of_a_transposed_parameter():
    """A copy on each rank whose memory is not row-major: exponents are flat."""
    value = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).t()
    found = []
    for place in (lambda x: DTensor.from_local(x, everyone(), [Replicate()], run_check=False), lambda x: x):
        param = torch.nn.Parameter(place(value.clone()))
        assert not local(param).is_contiguous()
        optimizer = ak.optim.AdamW([param], state_dtype="8bit")
        for step in range(2):
            param.grad = place((1.0 + step) * value.sign())
            optimizer.step()
        scale = optimizer.state[param]["exp_avg_scale"]
        assert scale.shape == whole(scale).shape == (192,)
        found.append((whole(param.detach()), whole(optimizer.state[param]["exp_avg"])))
    assert all(map(torch.equal, *found))


def keys_of_pieces():
    """Pieces of whole blocks or not, consecutive elements or not."""
    cases = (40,), (128,), (6, 128), (6, 64), (3, 4, 64), (2, 6, 256)
    dims = 0, 0, 1, 1, 1, 2
    keys = []
    for shape, dim in zip(cases, dims, strict=True):
        param = distribute_tensor(torch.ones(shape), everyone(), [Shard(dim)])
        keys.append(random_place(param, 3, 7, None))
    for dims in ((0, 2), (1, 2)):
        param = distribute_tensor(torch.ones(8, 4, 64), grid(), [Shard(dim) for dim in dims])
        keys.append(random_place(param, 3, 7, None))
    return keys


def test_pieces_never_share_random_bits(ranks):
    """Index, width and pitch: pieces with a part of a block count as further parameters, and others begin with their first block.
    Pieces within rows that count have no piece with the parameter's own index."""
    found = list(zip(*ranks.run(keys_of_pieces, world=4), strict=True))
    apart, blocks, columns, narrow, matrices, last, both, boxes = found
    assert apart == tuple((3 + 7 * rank, 0, 0) for rank in range(4))
    assert blocks == tuple((3 + (rank << 32), 0, 0) for rank in range(4))
    assert columns == tuple((3 + (rank << 32), 32, 128) for rank in range(4))
    assert narrow == tuple((3 + 7 * (rank + 1), 0, 0) for rank in range(4))
    assert matrices == tuple((3 + (2 * rank << 32), 64, 256) for rank in range(4))
    assert last == tuple((3 + (2 * rank << 32), 64, 256) for rank in range(4))
    assert both == tuple((3 + (32 * (rank // 2) + rank % 2 << 32), 32, 64) for rank in range(4))
    assert boxes == narrow


@on_ranks(4)
def test_pieces_that_cut_a_block_are_refused():
    rows, columns = (
        torch.nn.Parameter(distribute_tensor(torch.ones(64, 64), everyone(), [Shard(dim)])) for dim in (0, 1)
    )
    ak.optim.AdamW([rows], state_dtype="8bit")
    message = (
        r"pieces of shape \[64, 16\], and state_dtype is '8bit'; accepted: contiguous pieces of whole blocks of 32"
    )
    with pytest.raises(ValueError, match=message):
        ak.optim.AdamW([columns], state_dtype="8bit")


@pytest.mark.parametrize(("world", "layout"), [(2, "part"), (4, "hsdp"), (4, "mixed"), (4, "fsdp x tp")])
@pytest.mark.parametrize("case", ["fp32", "bf16 split"])
@on_ranks("world")
def test_with_clipping_only_the_order_of_the_sum_differs(layout, case):
    """A norm is the root of a sum of squares that is rounded to float32 per part, then once: 2 units of 2^-24, halved by the
    root. The clip factor adds a rounding. AdamW's update is a ratio in which the factor of all steps cancels to first order;
    a weight of 16 bits may round the other way."""
    weights, norm = compare(layout, *CASES[case], 0.5, BAD)
    assert norm <= 3 * 2.0**-24
    assert weights <= (2.0**-20 if case == "fp32" else 2.0**-8)


def stochastic():
    """Stochastic rounding of 16-bit weights: copies stay equal, and pieces are those of one process."""
    runs = []
    for layout in ("hsdp", "hsdp", "replicated"):
        model = LAYOUTS[layout](torch.nn.Sequential(torch.nn.Linear(16, 64, bias=False)).to(BF16))
        (param,) = model.parameters()
        with torch.no_grad():
            local(param).fill_(1.0)
        optimizer = ak.optim.SGD([param], lr=2.0**-9, master_weights="none", seed=3)
        for _ in range(3):
            param.grad = torch.full_like(param, -1.0)
            optimizer.step()
        pieces = [None] * 4
        dist.all_gather_object(pieces, local(param.detach()))
        runs.append(pieces)
    return runs


def test_stochastic_rounding_of_pieces_and_copies(ranks):
    first, again, replicated = ranks.run(stochastic)[0]
    assert all(map(torch.equal, first, again))
    assert torch.equal(first[0], first[2])
    assert torch.equal(first[1], first[3])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(torch.cat(first[:2]), replicated[0])
    assert all(torch.equal(piece, replicated[0]) for piece in replicated)
    assert 1.0 < torch.cat(first[:2]).float().mean().item() < 1.0 + 3 * 2.0**-8


@on_ranks(4)
def test_state_is_dtensors_over_the_flat_buffers_and_follows_writes():
    """A state shows views of the flat buffers, and writes to parameters from outside reach the masters."""
    model = LAYOUTS["fsdp"](make_model(BF16))
    optimizer = ak.optim.AdamW(model.parameters(), lr=1e-2)
    reference = make_model(BF16)
    param = model[0].bias
    for _ in range(3):  # by lists first, then from addresses
        give(model, reference, 0, 1.0, None)
        version = param._version
        optimizer.step()
        assert param._version > version  # a backward that needs the old values can tell
    assert optimizer._plan.cached is not None
    block = optimizer._store.places[id(param)].block
    for name, buffer in {**block.moments, "master": block.master}.items():
        shown = optimizer.state[param][name]
        assert type(shown) is DTensor
        assert shown.placements == param.placements
        assert shown.shape == param.shape
        assert local(shown).numel() == 0 or 0 <= local(shown).data_ptr() - buffer.data_ptr() < buffer.nbytes
        assert shown.storage_offset() == 0  # asynchronous saving misunderstands another
    for write in (lambda: param.mul_(0), lambda: local(param).add_(1.0), lambda: param.to_local().add_(1.0)):
        with torch.no_grad():
            write()
        optimizer.zero_grad()
        param.grad = torch.zeros_like(param)
        optimizer.param_groups[0].update(lr=0.0)
        before = whole(param.detach())
        optimizer.step()
        assert torch.equal(whole(optimizer.state[param]["master"]), before.float())
        assert torch.equal(whole(param.detach()), before)
    assert optimizer._plan.cached is not None


@on_ranks(4)
def test_a_parameter_may_get_another_local_tensor():
    """FSDP gives a parameter another local tensor (``.to``, ``reset_sharded_param``): the step follows."""
    param = torch.nn.Parameter(distribute_tensor(torch.ones(8), everyone(), [Shard(0)]))
    optimizer = ak.optim.SGD([param], lr=1.0)
    param.grad = torch.ones_like(param)
    for _ in range(3):
        optimizer.step()
    old, param._local_tensor = param._local_tensor, torch.full((2,), 5.0)
    optimizer.step()
    assert old.tolist() == [-2.0, -2.0]
    assert local(param).tolist() == [4.0, 4.0]


@on_ranks(2)
def test_zero_repeats_itself():
    """ZeRO: each rank steps some of the parameters, and all have them afterwards."""
    runs = []
    for _ in range(2):
        model, reference = make_wide(BF16), make_wide(BF16)
        options = {"lr": 1e-2, "master_weights": "split24", "state_dtype": "8bit", "shard_group": dist.group.WORLD}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=ak.optim.AdamW, **options)
        for step in range(3):
            give(model, reference, step, 1.0, None)
            optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
    everyone_has = [None] * dist.get_world_size()
    dist.all_gather_object(everyone_has, runs[0])
    assert all(map(torch.equal, *runs))
    assert all(torch.equal(a, b) for other in everyone_has for a, b in zip(other, runs[0], strict=True))

"""torch.distributed.checkpoint: saved on some ranks, loaded on others, continued, against one process that was not interrupted.

Without clipping everything is compared bit for bit.
"""

import copy
import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import amp_kernels as ak
from amp_kernels._sharding.local import local

from ..helpers.ranks import Failure, on_ranks
from .worlds import LAYOUTS, give, make_model, make_wide, states, whole

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
KINDS = {
    "fp32 ema amsgrad": (F32, {"ema_decay": 0.9, "amsgrad": True}),
    "bf16 master, bf16 moments": (BF16, {"state_dtype": BF16}),
    "bf16 split ema": (BF16, {"master_weights": "split", "ema_decay": 0.9}),
    "fp16 split": (F16, {"master_weights": "split"}),
    "bf16 none": (BF16, {"master_weights": "none_rne"}),
}
EIGHT = {
    "fp32 8 bits": (F32, {"state_dtype": "8bit"}),
    "bf16 split24 8 bits": (BF16, {"master_weights": "split24", "state_dtype": "8bit", "ema_decay": 0.9}),
}
SAVED, END = 3, 5


def make(kind):
    return make_wide(EIGHT[kind][0]) if kind in EIGHT else make_model(KINDS[kind][0])


def build(layout, kind):
    _, options = {**KINDS, **EIGHT}[kind]
    model = LAYOUTS[layout](make(kind))
    return model, ak.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **options)


def train(model, optimizer, first, last):
    reference = (make_wide if model[0].in_features == 64 else make_model)(next(model.parameters()).dtype)
    for step in range(first, last):
        give(model, reference, step, 1.0, None)
        optimizer.step()
        optimizer.zero_grad()


def is_uninterrupted(model, optimizer, kind, upto):
    """True if weights and states are those of one process after so many steps."""
    reference, alone = build("plain", kind)
    train(reference, alone, 0, upto)
    equal = []
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        equal.append(torch.equal(whole(p.detach()), q.detach()))
        ours, expected = states(optimizer, p), states(alone, q)
        equal.append(ours.keys() == expected.keys())
        equal += [torch.equal(ours[key], expected[key]) and ours[key].dtype == expected[key].dtype for key in expected]
    return all(equal)


FLAT = {"flatten_optimizer_state_dict": True}


def save(path, layout, background, options, kinds=KINDS):
    options, found = StateDictOptions(**options), {}
    for kind in kinds:
        model, optimizer = build(layout, kind)
        train(model, optimizer, 0, SAVED)
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }
        if background:
            dcp.async_save(state, checkpoint_id=f"{path}/{kind}").result()
        else:
            dcp.save(state, checkpoint_id=f"{path}/{kind}")
        tensors = [v for v in tree_leaves(state["optimizer"]) if isinstance(v, torch.Tensor)]
        found[kind] = not any(v.dtype in (torch.int16, torch.int8, torch.uint8) for v in tensors) and is_uninterrupted(
            model, optimizer, kind, SAVED
        )
    return found


def load(path, layout, options, kinds=KINDS):
    options, found = StateDictOptions(**options), {}
    for kind in kinds:
        model, optimizer = build(layout, kind)
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }
        dcp.load(state, checkpoint_id=f"{path}/{kind}")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        loaded = is_uninterrupted(model, optimizer, kind, SAVED)
        train(model, optimizer, SAVED, END)
        found[kind] = loaded, is_uninterrupted(model, optimizer, kind, END)
    return found


JOURNEYS = [
    ((2, "fsdp"), [(4, "fsdp"), (4, "hsdp"), (1, "plain"), (4, "fsdp x tp"), (2, "tp")], {}),
    ((4, "hsdp"), [(2, "fsdp"), (1, "plain")], {}),
    ((1, "plain"), [(4, "fsdp"), (2, "columns"), (4, "tp")], {}),
    ((4, "fsdp x tp"), [(2, "fsdp")], {}),
    ((2, "fsdp"), [(4, "fsdp x tp"), (1, "plain")], FLAT),
    ((1, "plain"), [(2, "fsdp")], FLAT),
]


@pytest.mark.parametrize(("start", "ends", "options"), JOURNEYS, ids=lambda it: str(it) if it else "nested")
def test_resharding(ranks, tmp_path, start, ends, options):
    world, layout = start
    for found in ranks.run(save, str(tmp_path), layout, world == 4, options, world=world):
        assert found == dict.fromkeys(KINDS, True)
    for world, layout in ends:
        for found in ranks.run(load, str(tmp_path), layout, options, world=world):
            assert found == dict.fromkeys(KINDS, (True, True)), (world, layout)


@pytest.mark.parametrize(
    ("start", "ends", "options"),
    [
        ((2, "fsdp"), [(4, "fsdp"), (4, "hsdp"), (1, "plain"), (4, "fsdp x tp"), (2, "columns")], {}),
        ((1, "plain"), [(4, "fsdp"), (2, "fsdp"), (4, "tp")], {}),
        ((4, "hsdp"), [(2, "fsdp")], FLAT),
        ((4, "fsdp x tp"), [(2, "columns"), (4, "mixed"), (1, "plain")], {}),
    ],
    ids=lambda it: str(it) if it else "nested",
)
def test_resharding_of_8_bit_moments(ranks, tmp_path, start, ends, options):
    """They travel as float32 and are the same after a nearest rounding; later steps round as one process does."""
    world, layout = start
    for found in ranks.run(save, str(tmp_path), layout, False, options, [*EIGHT], world=world):
        assert found == dict.fromkeys(EIGHT, True)
    for world, layout in ends:
        for found in ranks.run(load, str(tmp_path), layout, options, [*EIGHT], world=world):
            assert found == dict.fromkeys(EIGHT, (True, True)), (world, layout)


# ---- other forms of a state ----


@pytest.mark.parametrize(
    "options",
    [{"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True}, FLAT],
    ids=lambda it: "-".join(it),
)
@pytest.mark.parametrize("layout", ["fsdp", "fsdp x tp"])
@on_ranks(4)
def test_other_forms(layout, options):
    """From one optimizer to a fresh one, by ``get_state_dict`` and ``set_state_dict`` with options."""
    kinds = [
        "fp32 ema amsgrad",
        "bf16 split ema",
        *(["bf16 master, bf16 moments", "fp16 split"] if options is FLAT else []),
    ]
    options, found = StateDictOptions(**options), {}
    for kind in kinds:
        model, optimizer = build(layout, kind)
        train(model, optimizer, 0, SAVED)
        weights, state = get_state_dict(model, optimizer, options=options)
        if options.full_state_dict and dist.get_rank() > 0 and options.broadcast_from_rank0:
            weights, state = {}, {}
        other, fresh = build(layout, kind)
        set_model_state_dict(other, weights, options=options)  # not set_state_dict, which waits forever for empty ones
        set_optimizer_state_dict(other, fresh, state, options=options)
        train(other, fresh, SAVED, END)
        found[kind] = is_uninterrupted(other, fresh, kind, END)
    assert found == dict.fromkeys(kinds, True)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_torchs_fake_step_leaves_every_bit(kind):
    """torch's way to learn the state of a fresh optimizer: a step with zero gradients and no rate."""
    model, optimizer = build("fsdp", kind)
    before = [local(p.detach()).clone() for p in model.parameters()]
    get_optimizer_state_dict(model, optimizer)
    bits = torch.int32 if before[0].dtype == F32 else torch.int16
    kept = [torch.equal(local(p).view(bits), b.view(bits)) for p, b in zip(model.parameters(), before, strict=True)]
    masters = [states(optimizer, p).get("master") for p in model.parameters()]
    kept += [
        torch.equal(m, whole(p).float()) for p, m in zip(model.parameters(), masters, strict=True) if m is not None
    ]
    assert all(kept)


@pytest.mark.parametrize("to_ours", [True, False])
@on_ranks(2)
def test_states_of_torchs_adamw(to_ours):
    """torch's AdamW and ours load each other's sharded state, and go on alike."""
    makes = [lambda p: torch.optim.AdamW(p, lr=1e-2), lambda p: ak.optim.AdamW(p, lr=1e-2)]
    first, second = makes if to_ours else reversed(makes)
    model, other = (LAYOUTS["fsdp"](make_model()) for _ in range(2))
    optimizer, fresh = first(model.parameters()), second(other.parameters())
    train(model, optimizer, 0, SAVED)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))  # torch's keeps loaded tensors as they are
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    train(model, optimizer, SAVED, END)
    train(other, fresh, SAVED, END)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert max((whole(p) - whole(q)).abs().max().item() for p, q in pairs) < 1e-6


LACKING = {
    "fp32": {},
    "split": {"master_weights": "split"},
    "8 bits": {"master_weights": "split24", "state_dtype": "8bit"},
    "none": {"master_weights": "none_rne", "state_dtype": BF16},
}
FULL = {"full_state_dict": True, "cpu_offload": True}


def fsdp1(model):
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def push(model, optimizer, steps):
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()


def torchs():
    """BF16 weights after steps of torch's AdamW, whose state has neither masters nor averages."""
    model = make_wide(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    push(model, optimizer, SAVED)
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save_torchs(path):
    dcp.save(torchs(), checkpoint_id=path)


def load_torchs(path, layout, options, model_first, steps):
    """Into other weights, which may have taken steps. Returns how far the weights are from theirs, masters and averages from the
    weights, and the weights after another step from those before, and the steps."""
    found, theirs = {}, torchs()["model"]
    for kind, kept in LACKING.items():
        model = make_wide(BF16)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        model = fsdp1(model) if layout == "fsdp1" else LAYOUTS[layout](model)
        optimizer = ak.optim.AdamW(model.parameters(), lr=1e-3, ema_decay=0.9, **kept)
        push(model, optimizer, steps)
        form = StateDictOptions(**options)
        state = {
            "model": get_model_state_dict(model, options=form),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=form),
        }
        dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
        if model_first:
            set_model_state_dict(model, state["model"], options=form)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=form)
        if not model_first:
            set_model_state_dict(model, state["model"], options=form)
        now, params = optimizer.state_dict()["state"], [param.detach() for param in optimizer._params()]
        follow = [distance(now[i][name], params[i]) for i in now for name in ("master", "ema") if name in now[i]]
        counts = {int(now[i]["step"]) for i in now if local(params[i]).numel()}
        loaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        loaded = {name: value.clone() for name, value in loaded.items()}
        push(model, optimizer, 1)
        moved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        changes = [max(distance(a[name], b[name]) for name in theirs) for a, b in ((loaded, theirs), (moved, loaded))]
        found[kind] = changes[0], max(follow), changes[1], counts
    return found


def distance(a, b):
    a, b = local(a).float(), local(b).float()
    return (a - b).abs().max().item() if a.numel() else 0.0


@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "optimizer first"])
@pytest.mark.parametrize(
    ("world", "layout", "options", "steps"),
    [(1, "plain", {}, 0), (1, "plain", FULL, 2), (2, "fsdp", {}, 0), (2, "fsdp", {}, 2), (2, "fsdp1", {}, 0)],
)
def test_what_a_checkpoint_lacks_follows_the_weights(ranks, tmp_path, world, layout, options, steps, model_first):
    ranks.run(save_torchs, str(tmp_path), world=1)
    for found in ranks.run(load_torchs, str(tmp_path), layout, options, model_first, steps, world=world):
        for kind, (weights, follow, moved, counts) in found.items():
            assert weights == 0, kind
            assert follow <= (2**-8 if steps else 0), kind  # a split master keeps its bits
            assert 0 < moved <= 2**-8, kind
            assert counts == {SAVED}, kind


@on_ranks(2)
def test_scaler_and_averages_are_saved_beside(tmp_path):
    """A scaler is Stateful as it is; averages travel in the optimizer's state, and alone."""
    scaler, other = (ak.GradScaler("cpu", init_scale=2.0**k, hysteresis=2) for k in (5, 9))
    model, optimizer = build("fsdp", "bf16 split ema")
    train(model, optimizer, 0, SAVED)
    averages = ak.fp32_state_dict(model, optimizer, ema=True)
    assert isinstance(scaler, Stateful)
    assert all(type(value) is DTensor and value.dtype == F32 for value in averages.values())
    scaler.scale(torch.ones(()))
    dcp.save({"scaler": scaler, "averages": averages}, checkpoint_id=tmp_path)
    plain = {key: torch.zeros(value.shape) for key, value in averages.items()}
    dcp.load({"scaler": other, "averages": plain}, checkpoint_id=tmp_path)
    expected = {key: whole(value) for key, value in averages.items()}
    assert other.get_scale() == 32.0
    assert all(torch.equal(plain[key], expected[key]) for key in plain)


def dies_while_saving(path):
    model, optimizer = build("fsdp", "bf16 split ema")
    train(model, optimizer, 0, SAVED)
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


def test_a_rank_that_dies_while_saving_leaves_what_was_saved_before(ranks, tmp_path):
    """Each save has a folder of its own, and one that was not finished cannot be taken for a checkpoint."""
    ranks.run(save, str(tmp_path / "1"), "fsdp", False, {}, world=2)
    found = ranks.outcomes(dies_while_saving, str(tmp_path / "2"), world=2)
    assert [type(it) for it in found] == [Failure, Failure]
    assert "no answer in time" not in found[0].text
    assert not (tmp_path / "2" / ".metadata").exists()
    for found in ranks.run(load, str(tmp_path / "1"), "fsdp", {}, world=2):
        assert found == dict.fromkeys(KINDS, (True, True))


@on_ranks(2)
def test_one_file_cannot_hold_pieces(tmp_path):
    model, optimizer = build("fsdp", "fp32 ema amsgrad")
    train(model, optimizer, 0, 1)
    with pytest.raises(
        TypeError,
        match=r"model.0.weight .* has type torch.distributed.tensor.DTensor; accepted: dense tensors \(DTensors: torch.dist",
    ):
        ak.checkpoint.save(tmp_path / "one", model=model, optimizer=optimizer)


MIXED_STATE = [{"state_dtype": BF16}, {"state_dtype": "8bit", "master_weights": "split"}]


@on_ranks(2)
def test_fsdp1_saves_moments_of_another_dtype_than_masters(tmp_path):
    """torch's FSDP1 saves one dtype for all state of a parameter: masters in FP32 beside moments in BF16."""
    for i, options in enumerate(MIXED_STATE):
        runs = [fsdp1(make_wide(BF16)) for _ in range(2)]
        both = [(m, ak.optim.AdamW(m.parameters(), lr=1e-2, ema_decay=0.9, **options)) for m in runs]
        push(*both[0], SAVED)
        for number, (model, optimizer) in enumerate(both):
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            (dcp.load if number else dcp.save)(state, checkpoint_id=tmp_path / str(i))
        set_model_state_dict(both[1][0], state["model"])
        set_optimizer_state_dict(*both[1], state["optimizer"])
        for model, optimizer in both:
            push(model, optimizer, 1)
        assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in runs), strict=True))
        saved, loaded = (optimizer.state_dict()["state"] for _, optimizer in both)
        held = [(saved[i], loaded[i]) for i, p in enumerate(runs[0].parameters()) if p.numel()]
        assert all(torch.equal(a[name], b[name]) for a, b in held for name in a)


@on_ranks(2)
def test_zero_saves_no_process_group(tmp_path):
    """The options of the inner optimizer are copied into the groups, the process group among them."""
    path, group = tmp_path / "zero.pt", dist.group.WORLD
    options = {"optimizer_class": ak.optim.AdamW, "shard_group": group, "max_grad_norm": 1.0, "ema_decay": 0.9}
    runs = [make_model(BF16) for _ in range(2)]
    both = [(model, ZeroRedundancyOptimizer(model.parameters(), lr=1e-2, **options)) for model in runs]
    model, optimizer = both[0]
    for steps in (0, SAVED):
        push(model, optimizer, steps)
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            torch.save(optimizer.state_dict(), path)
    dist.barrier()
    both[1][1].load_state_dict(torch.load(path, weights_only=True))
    runs[1].load_state_dict(model.state_dict())
    for model, optimizer in both:
        push(model, optimizer, 1)
        assert optimizer.optim.shard_group is group
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in runs), strict=True))

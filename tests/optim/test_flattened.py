"""States in the flattened form of torch.distributed.checkpoint, in one process, and what ``optimizer.state`` shows for it."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import amp_kernels.optim as akopt

from .optimizers import STATEFUL, bf16, f16, f32, make

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
MASTERS = {
    "fp32": (f32, {"ema_decay": 0.9}),
    "bf16 master, bf16 moments": (bf16, {"state_dtype": bf16}),
    "bf16 split": (bf16, {"master_weights": "split", "ema_decay": 0.9}),
    "fp16 split": (f16, {"master_weights": "split"}),
    "bf16 none": (bf16, {"master_weights": "none"}),
}


def model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def train(net, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in net.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()


def trained(name, dtype, steps=3, **options):
    net = model(dtype)
    optimizer = make(name, net.parameters(), 1e-2, **options)
    train(net, optimizer, 0, steps)
    return net, optimizer


def assert_alike(one, other):
    for a, b in zip(*(optimizer.state_dict()["state"].values() for optimizer in (one, other)), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


@STATEFUL
@pytest.mark.parametrize("masters", MASTERS)
def test_a_round_trip_keeps_every_bit(name, options, masters):
    dtype, more = MASTERS[masters]
    net, optimizer = trained(name, dtype, **options, **more)
    state = get_optimizer_state_dict(net, optimizer, options=FLAT)
    assert all(isinstance(key, str) for key in state)
    assert not any(isinstance(value, torch.Tensor) and value.dtype == torch.int16 for value in state.values())
    other = copy.deepcopy(net)
    fresh = make(name, other.parameters(), 1e-2, **options, **more)
    set_optimizer_state_dict(other, fresh, state, options=FLAT)
    assert_alike(optimizer, fresh)
    for each in ((net, optimizer), (other, fresh)):
        train(*each, 3, 5)
    assert_alike(optimizer, fresh)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "split"), ("split", "fp32")])
def test_masters_kept_in_another_way_are_taken_over(saved, loaded, dtype):
    net, optimizer = trained("AdamW", dtype, master_weights=saved)
    state = get_optimizer_state_dict(net, optimizer, options=FLAT)
    fresh = akopt.AdamW(net.parameters(), master_weights=loaded)
    set_optimizer_state_dict(net, fresh, state, options=FLAT)
    for ours, theirs in zip(
        fresh.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        torch.testing.assert_close(ours["master"], theirs["master"], rtol=0, atol=2.0**-41 if dtype == f16 else 0)


@pytest.mark.parametrize("mode", ["fp32", "split"])
def test_without_masters_it_starts_at_the_weights(mode):
    """As torch's AdamW saves it; an average is not there either."""
    net = model(bf16)
    theirs = torch.optim.AdamW(net.parameters())
    train(net, theirs, 0, 3)
    state = get_optimizer_state_dict(net, theirs, options=FLAT)
    ours = akopt.AdamW(net.parameters(), master_weights=mode)
    set_optimizer_state_dict(net, ours, state, options=FLAT)
    weight = net[0].weight
    values = ours.state_dict()["state"][0]
    assert torch.equal(values["master"], weight.float())
    assert torch.equal(values["exp_avg"], theirs.state[weight]["exp_avg"].float())
    assert values["step"] == 3


def test_the_state_of_a_split_master():
    """Iteration yields the names of a checkpoint, items what is held."""
    net, optimizer = trained("AdamW", bf16, master_weights="split")
    weight = net[0].weight
    shown, master = optimizer.state[weight], optimizer.state_dict()["state"][0]["master"]
    assert list(shown) == ["step", "exp_avg", "exp_avg_sq", "master"]
    assert [name for name, _ in shown.items()] == ["step", "exp_avg", "exp_avg_sq", "remainder"]
    assert [value.nbytes // weight.numel() for value in shown.values() if value.ndim] == [4, 4, 2]
    assert {"master", "remainder"} <= {name for name in ("master", "remainder", "shadow") if name in shown}
    assert "shadow" not in shown
    assert torch.equal(shown["master"], master)
    assert torch.equal(shown.get("master"), master)
    assert shown.get("shadow") is None
    with pytest.raises(KeyError):
        shown["shadow"]
    assert not torch.equal(master, weight.float())
    with torch.no_grad():
        weight[:3] = 0
    assert torch.equal(shown["master"], torch.cat([torch.zeros(3, 5), master[3:]]))
    for copied in (dict(shown), copy.deepcopy(shown)):
        assert type(copied) is dict
        assert list(copied) == ["step", "exp_avg", "exp_avg_sq", "remainder"]
    assert type(shown)(dict(shown)).keys() == shown.keys()  # as libraries rebuild a mapping


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_a_split_master_is_written_by_name(dtype):
    net, optimizer = trained("AdamW", dtype, master_weights="split")
    weight = net[0].weight
    shown, before = optimizer.state[weight], weight.detach().clone()
    for name in shown:
        shown[name] = shown[name].clone()
    assert torch.equal(weight, before)
    master = torch.linspace(-1, 1, weight.numel()).view_as(weight)
    shown["master"] = master
    assert torch.equal(weight, master.to(dtype))
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["master"], master, rtol=0, atol=2.0**-41)
    with pytest.raises(ValueError, match=r"optimizer.state: master has shape \[2\]; accepted: \[7, 5\]"):
        shown["master"] = torch.ones(2)
    assert torch.equal(weight, master.to(dtype))


def test_the_shown_state_of_a_split_master_is_in_no_cycle():
    """The buffers go with the optimizer, without the garbage collector."""
    net, optimizer = trained("AdamW", bf16, master_weights="split")
    shown = optimizer.state[net[0].weight]
    alive = weakref.ref(shown.place)
    optimizer.load_state_dict(optimizer.state_dict())
    assert alive() is None
    assert "master" not in shown
    assert list(shown) == list(shown.keys())


def test_a_remainder_alone_is_refused():
    """torch's loader looks names up in ``optimizer.state``, where a plain dict was put."""
    net, optimizer = trained("AdamW", bf16, master_weights="split")
    state = get_optimizer_state_dict(net, optimizer, options=FLAT)
    other = copy.deepcopy(net)
    fresh = akopt.AdamW(other.parameters(), master_weights="split")
    train(other, fresh, 0, 1)
    fresh.state[other[0].weight] = dict(fresh.state[other[0].weight])
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(ValueError, match="remainder of a split master and not the master; accepted: what state_dict"):
        set_optimizer_state_dict(other, fresh, state, options=FLAT)
    assert all(torch.equal(before["state"][0][key], value) for key, value in fresh.state_dict()["state"][0].items())

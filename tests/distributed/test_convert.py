"""convert and revert of modules whose class fully_shard or replicate has made, against a model that was converted first."""

import os
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import amp_kernels as ak
from amp_kernels.ops import _linear

from ..helpers.generators import normal
from ..helpers.ranks import on_ranks
from .worlds import everyone, whole


class OwnRMSNorm(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(columns)), 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Block(nn.Module):
    """A feed-forward block as ViT's, whose class takes an argument."""

    def __init__(self, columns):
        super().__init__()
        self.fc1, self.activation_fn, self.fc2 = nn.Linear(columns, 16), nn.GELU(), nn.Linear(16, columns)

    def forward(self, x):
        return self.fc2(self.activation_fn(self.fc1(x)))


def make(name):
    torch.manual_seed(0)
    if name == "layer":
        return nn.Linear(8, 6)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), OwnRMSNorm(8), Block(8), nn.Linear(8, 6))


def wrap_children(model):
    for child in model:
        if list(child.parameters()):
            fully_shard(child, mesh=everyone())
    return fully_shard(model, mesh=everyone())


CHILDREN = "fully_shard of children"
WRAPPERS = {
    "fully_shard": lambda m: fully_shard(m, mesh=everyone()),
    CHILDREN: wrap_children,
    "replicate": replicate,
    "replicate by FSDP": lambda m: replicate_by_fsdp(m, mesh=everyone()),
}


def step(model, calls):
    """The result and the gradients of a step in BF16; hooks note their calls."""
    last = model[-1] if isinstance(model, nn.Sequential) else model
    handles = [
        last.register_forward_hook(lambda *_: calls.append("forward")),
        last.register_full_backward_hook(lambda *_: calls.append("backward")),
    ]
    x = normal(5, 8, seed=torch.distributed.get_rank())
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    for handle in handles:
        handle.remove()
    return [y.detach(), *(whole(p.grad).clone() for p in model.parameters())]


def kinds_of(model, which=lambda module: True):
    """Each module's class, by the name and what it derives from: replicate of DDP makes a class a call."""
    return [(type(module).__name__, *type(module).__mro__[1:]) for module in model.modules() if which(module)]


def has_weight(module):
    return "weight" in module._parameters


@pytest.mark.parametrize(
    ("name", "wrapper"), [*(("blocks", it) for it in WRAPPERS), *(("layer", it) for it in WRAPPERS if it != CHILDREN)]
)
@on_ranks(2)
def test_the_order_of_convert_and_the_wrapper_does_not_matter(name, wrapper):
    wrap, calls = WRAPPERS[wrapper], []
    before = wrap(ak.convert(make(name)))
    model, plain = wrap(make(name)), wrap(make(name))
    kinds, parameters = kinds_of(model), dict(model.named_parameters())
    mixins = [isinstance(module, FSDPModule) for module in model.modules()]

    assert ak.convert(model) is model
    found = kinds_of(model)
    assert kinds_of(model, has_weight) == kinds_of(before, has_weight)
    # That container fuses nothing, as layers have hooks, and stays what it is.
    if wrapper != CHILDREN:
        assert found == kinds_of(before)
    assert kinds_of(ak.convert(model)) == found, "converted already"
    assert [isinstance(module, FSDPModule) for module in model.modules()] == mixins
    assert all(model.get_parameter(key) is parameter for key, parameter in parameters.items())
    assert all(map(torch.equal, step(model, calls), step(before, [])))
    assert calls == ["forward", "backward"]
    ak.revert(before), ak.revert(model)
    assert kinds_of(model) == kinds
    assert kinds_of(before) == kinds
    for reverted in (model, before):
        assert all(map(torch.equal, step(reverted, []), step(plain, [])))


@on_ranks(2)
def test_methods_of_fully_shard_stay():
    """Methods that the wrapper adds are there: state_dict of DTensors, unshard, accumulation without communication, slices."""
    model = ak.convert(WRAPPERS[CHILDREN](make("blocks")))
    before = WRAPPERS[CHILDREN](ak.convert(make("blocks")))
    for layer in (model[0], model[5]):
        assert isinstance(layer, ak.nn.Linear)
    assert {key: type(value) for key, value in model.state_dict().items()} == dict.fromkeys(
        before.state_dict(), DTensor
    )
    model.load_state_dict({key: value * 2 for key, value in before.state_dict().items()})
    assert torch.equal(whole(model[0].weight), 2 * whole(before[0].weight))
    model[0].unshard()
    assert type(model[0].weight) is nn.Parameter
    model[0].reshard()
    assert type(model[0].weight) is DTensor or isinstance(model[0].weight.data, DTensor)
    model.load_state_dict(before.state_dict())
    for each in (model, before):
        each.set_requires_gradient_sync(False)
        each(torch.ones(2, 8)).sum().backward()
        each.set_requires_gradient_sync(True)
        each(torch.ones(2, 8)).sum().backward()
    for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(whole(ours.grad), whole(theirs.grad))
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        model[0].__deepcopy__({})


@on_ranks(1)
def test_a_slice_of_a_wrapped_container():
    """fully_shard's classes make a slice of the class beneath."""
    wrap = WRAPPERS["fully_shard"]
    model, before = ak.convert(wrap(make("blocks"))), wrap(ak.convert(make("blocks")))
    assert type(model[:2]) is type(before[:2])
    assert list(model[:2]) == [model[0], model[1]]
    assert type(ak.revert(model)[:2]) is nn.Sequential


class Own(FSDPModule, nn.Linear):
    """A class of the user's with the same bases."""


def test_a_class_with_the_same_bases_that_torch_did_not_make_is_left_alone():
    layer = Own.__mro__[2](3, 3)
    layer.__class__ = Own
    assert type(ak.convert(layer)) is Own


class Split(nn.Module):
    """With and without ``ak.linear(split=)``."""

    def __init__(self, by_op):
        super().__init__()
        self.qkv, self.out, self.by_op = nn.Linear(64, 192), nn.Linear(64, 64), by_op

    def forward(self, x):
        if self.by_op:
            q, k, v = ak.linear(x, self.qkv.weight, self.qkv.bias, split=3 * [64])
        else:
            q, k, v = self.qkv(x).split(64, -1)
        return x + self.out(q * k + v)


@on_ranks(2)
def test_a_sharded_layer_whose_result_is_split():
    """Gradients of a sharded model whose results are split by the op have the bits of one whose are not. Two backwards read them in
    place."""
    calls, own, found = [], _linear._gradients_of_pieces, []

    def counted(*args):
        calls.append(args)
        return own(*args)

    emulated = mock.patch.dict(os.environ, AMP_KERNELS_EMULATE_CAPABILITY="9.0")
    with emulated, mock.patch.object(_linear, "_gradients_of_pieces", counted), ak.backend("emulate"):
        for by_op in (False, True):
            torch.manual_seed(0)
            model = ak.convert(nn.Sequential(Split(by_op), Split(by_op)))
            for block in model:
                fully_shard(block, mesh=everyone())
            fully_shard(model, mesh=everyone())
            for _ in range(3):
                calls.clear()
                model.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    y = model(normal(5, 64, seed=torch.distributed.get_rank()))
                y.float().square().sum().backward()
            found.append([y.detach(), *(whole(p.grad) for p in model.parameters() if p.ndim == 2)])
    assert all(map(torch.equal, *found))
    assert len(calls) == 2

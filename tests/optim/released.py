"""A small model, its training steps plain and released, and what may happen to an optimizer between them."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import amp_kernels as ak
from amp_kernels.optim import _host

from .optimizers import bf16, f16, f32

LAYOUTS = {
    "fp32": (f32, {}),
    "fp32 shadow average": (f32, {"shadow_dtype": bf16, "ema_decay": 0.9}),
    "fp32 8bit": (f32, {"state_dtype": "8bit"}),
    "bf16 master": (bf16, {"master_weights": "fp32", "zero_grads": True}),
    "f16 split": (f16, {"master_weights": "split", "state_dtype": bf16}),
    "bf16 split24 8bit": (bf16, {"master_weights": "split24", "state_dtype": "8bit", "seed": 3}),
    "bf16 none average": (bf16, {"master_weights": "none", "ema_decay": 0.5}),
    "bf16 none_rne": (bf16, {"master_weights": "none_rne"}),
}
SIZE, DEPTH = 64, 4  # layers
HOST = {"state_device": "cpu"}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(_host, "BUCKET_BYTES", 3 * SIZE * SIZE)  # one or two layers


class Net(nn.Module):
    """Its first and last weights are tied, ``unused`` has no gradient, and ``frozen`` gets one only once it is thawed."""

    def __init__(self, dtype=f32):
        super().__init__()
        torch.manual_seed(0)
        sizes = SIZE, SIZE, 2 * SIZE, SIZE, SIZE
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes))
        self.layers[-1].weight = self.layers[0].weight
        self.unused, self.frozen = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.to(dtype)

    def forward(self, x):
        x = self.frozen(x.to(self.unused.weight.dtype))
        for layer in self.layers:
            x = layer(x).tanh()
        return x.float().square().mean()


def make(name, dtype=f32, released=False, model=None, **options):
    model = model or Net(dtype)
    own = {"momentum": 0.9} if name == "SGD" else {}
    second = [it for it in model.named_parameters() if it[0] in ("layers.1.weight", "frozen.weight")]
    first = [it for it in model.named_parameters() if it[0] not in dict(second)]
    groups = [
        {"params": first},
        {"params": second, "weight_decay": 0.1, **({"algorithm": "adamw"} if name == "Muon" else {})},
    ]
    optimizer = getattr(ak.optim, name)(groups, lr=1e-2, **own, **options)
    return model, optimizer, ak.optim.release_gradients(optimizer) if released else None


def batch(step, micro=0):
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(10 * step + micro))


def train(model, optimizer, handle, steps, micros=1):
    """Steps of ``micros`` backwards, of which a handle holds all but the last."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        for micro in range(micros):
            held = handle is not None and micro < micros - 1
            with handle.hold() if held else contextlib.nullcontext():
                model(batch(step, micro)).backward()
        assert handle is None or all(param.grad is None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def snapshot(model, optimizer):
    """Weights and the state_dict, copied. States are made in the order of backward, and shown here in that of their numbers."""
    state_dict = optimizer.state_dict()
    states = [state_dict["state"].get(number) for number in range(len(optimizer._params()))]
    return copy.deepcopy([model.state_dict(), states, state_dict["param_groups"]])


def assert_close(found, expected, close=2e-5):
    """The same, up to ``close`` or a unit of 16 bits of the largest number: norms were summed in another order."""
    (found, tree), (expected, expected_tree) = map(pytree.tree_flatten, (found, expected))
    assert tree == expected_tree
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            unit = close if one.dtype == torch.float32 else torch.finfo(one.dtype).eps
            torch.testing.assert_close(one, other, rtol=unit, atol=unit * other.abs().amax().item(), equal_nan=True)
        else:
            assert_same([one], [other])


def assert_same(found, expected):
    (found, tree), (expected, expected_tree) = map(pytree.tree_flatten, (found, expected))
    assert tree == expected_tree
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def replace_state(model, optimizer):
    weight = model.layers[1].weight
    optimizer.state[weight] = {key: value.clone() for key, value in optimizer.state[weight].items()}


def set_all(key, value):
    return lambda model, optimizer: [group.update({key: value}) for group in optimizer.param_groups]


def move(model, optimizer):
    for param in model.parameters():
        param.data = param.data.clone()


def mask(model, optimizer):
    with torch.no_grad():
        for param in model.parameters():
            param[0] = 0


def held_step(model, optimizer):
    handle = optimizer._released
    with handle.hold() if handle is not None else contextlib.nullcontext():
        model(batch(9)).backward()
    optimizer.step()
    optimizer.zero_grad()


def thaw(model, optimizer):
    model.frozen.weight.requires_grad_(True)


def add_group(model, optimizer):
    model.layers.append(nn.Linear(SIZE, SIZE, bias=False, dtype=bf16))
    with torch.no_grad():
        model.layers[-1].weight.copy_(model.unused.weight)
    optimizer.add_param_group({"params": [("late", model.layers[-1].weight)]})


BETWEEN = {
    "weights masked": mask,
    "weights moved": move,
    "state replaced": replace_state,
    "state cleared": lambda model, optimizer: optimizer.state.clear(),
    "state loaded": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "betas": set_all("betas", (0.5, 0.6)),
    "rate": set_all("lr", 0.03),
    "rate on the device": set_all("lr", torch.tensor(0.03)),
    "maximize": set_all("maximize", True),
    "another moment": set_all("amsgrad", True),
    "an average": set_all("ema_decay", 0.5),
    "seed": lambda model, optimizer: setattr(optimizer, "seed", 77),
    "a step of held gradients": held_step,
    "a parameter is thawed": thaw,
    "a group is added": add_group,
}


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("of the test")


def fail_behind(model, layer):
    return model.layers[layer].register_forward_hook(lambda module, args, out: Failing.apply(out))


def step_under(scaler, optimizer, loss, **arguments):
    scaler.scale(loss).backward()
    scaler.step(optimizer, **arguments)
    scaler.update()

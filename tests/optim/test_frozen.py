"""Parameters that no kernel can update: kept in a group while they are frozen, refused once they need a gradient."""

import re

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from amp_kernels import GradScaler

from .optimizers import STATEFUL, fill, make, same, snapshot


def two_tensor(shape):
    return TwoTensor(torch.ones(shape), torch.ones(shape))


class Packed(torch.nn.Parameter):
    """Codes of a quantized weight, in a class of their own as bitsandbytes'."""


FROZEN = {
    "uint8": (lambda shape: torch.ones(shape, dtype=torch.uint8), None),
    "int8": (lambda shape: torch.ones(shape, dtype=torch.int8), None),
    "fp8": (lambda shape: torch.ones(shape).to(torch.float8_e4m3fn), "is torch.float8_e4m3fn; accepted: float16, bfloat16"),
    "float64": (lambda shape: torch.ones(shape, dtype=torch.float64), "is torch.float64; accepted: float16, bfloat16"),
    "gaps": (lambda shape: torch.ones(*shape, 2)[..., 0], "which leaves gaps in memory or overlaps itself; accepted"),
    "subclass": (two_tensor, "has type torch.testing._internal.two_tensor.TwoTensor; accepted: plain tensors and DTensors"),
    "bitsandbytes": (lambda shape: Packed(torch.ones(shape, dtype=torch.uint8), requires_grad=False), None),
}  # fmt: skip


def frozen(kind, shape=(3, 2)):
    value = FROZEN[kind][0](shape)
    return value if isinstance(value, torch.nn.Parameter) else torch.nn.Parameter(value, requires_grad=False)


@STATEFUL
@pytest.mark.parametrize("kind", FROZEN)
def test_frozen_parameters_may_be_anything(name, options, kind):
    """They stay in the group and in its numbering, without a state, through steps and checkpoints."""
    runs = []
    for others in ([frozen(kind), frozen(kind)], []):
        p = torch.nn.Parameter(torch.ones(3, 2))
        optimizer = make(name, [*others[:1], p], **options)
        if others:
            optimizer.add_param_group({"params": others[1:]})
        for _ in range(3):
            fill([p], 1.0)
            optimizer.step()
        resumed = make(name, [*others[:1], p], **options)
        if others:
            resumed.add_param_group({"params": others[1:]})
        resumed.load_state_dict(optimizer.state_dict())
        fill([p], 2.0)
        scaler = GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(resumed, max_norm=1e9)
        runs.append((p, resumed.state_dict()))
        assert list(resumed.state) == [p]
    (p, with_frozen), (q, alone) = runs
    assert torch.equal(p, q)
    assert [group["params"] for group in with_frozen["param_groups"]] == [[0, 1], [2]]
    assert same(with_frozen["state"][1], alone["state"][0])


@STATEFUL
@pytest.mark.parametrize("kind", [kind for kind, (_, text) in FROZEN.items() if text])
def test_they_are_refused_once_they_need_a_gradient(name, options, kind):
    """At construction, in a new group, in the first step after they were thawed and in a checkpoint that has a state of them."""
    text = re.escape("params[0] ") + ".*" + re.escape(FROZEN[kind][1])
    error = ValueError if kind == "gaps" else TypeError
    p, q = frozen(kind), torch.nn.Parameter(torch.ones(3, 2))
    params = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer, twin = make(name, [p, q], **options), make(name, params, **options)
    fill(params, 1.0)
    twin.step()
    before = snapshot(optimizer)
    with pytest.raises(error, match=text):
        optimizer.load_state_dict(twin.state_dict())
    p.requires_grad_(True)
    optimizer.step()  # without a gradient it is still nothing
    p.grad = torch.ones_like(p)
    with pytest.raises(error, match=text):
        optimizer.step()
    for call in (lambda: make(name, [p]), lambda: make(name, [q]).add_param_group({"params": [p]})):
        with pytest.raises(error, match=text):
            call()
    assert same(before, snapshot(optimizer))


@STATEFUL
def test_a_thawed_parameter_is_trained(name, options):
    values = torch.linspace(-1.0, 1.0, 6).view(3, 2)
    p, q = (torch.nn.Parameter(values.clone(), requires_grad=thawed) for thawed in (False, True))
    thawed, plain = make(name, [p, frozen("uint8")], **options), make(name, [q], **options)
    thawed.step()
    p.requires_grad_(True)
    for _ in range(3):
        fill([p, q], 1.0)
        thawed.step()
        plain.step()
    assert torch.equal(p, q)
    assert same(thawed.state[p], plain.state[q])

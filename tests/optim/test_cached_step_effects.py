"""Steps that only read addresses anew: numbers in the groups, side effects, other backends."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amp_kernels as ak
from amp_kernels._dispatch import nodes
from amp_kernels._dispatch.library import REGISTRY

from .optimizers import bf16, fill
from .pairs import Pair, cached, set_grads, warmed

pytestmark = pytest.mark.skipif(nodes.step_walk() is None, reason="the module _nodes was not built for this torch")

# ---- numbers that change ----


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ({}, "lr", 0.5),
        ({}, "lr", torch.tensor(0.25)),
        ({}, "betas", (0.5, 0.75)),
        ({}, "betas", [0.5, 0.75]),
        ({}, "eps", 1e-3),
        ({}, "weight_decay", 0.5),
        ({}, "maximize", True),
        ({}, "amsgrad", True),
        ({"amsgrad": True}, "amsgrad", False),
        ({}, "ema_decay", 0.5),
        ({"ema_decay": 0.5}, "ema_decay", None),
        ({}, "decoupled_weight_decay", False),
    ],
)
def test_numbers_written_into_groups(options, key, value):
    pair = Pair(groups=2, **options)
    pair.both(lambda optimizer, _: optimizer.param_groups[1].__setitem__(key, value))
    for number in range(3, 6):
        pair.check_step(number)
    pair.both(lambda optimizer, _: optimizer.param_groups[0].__setitem__(key, value))
    pair.check_step(6)


def test_option_of_the_optimizer_changed():
    pair = Pair("SGD", dtypes=(bf16,), master_weights="none")
    pair.both(lambda optimizer, _: setattr(optimizer, "master_weights", "none_rne"))
    pair.check_step(3)


def test_values_changed_in_place():
    pair = Pair(betas=[0.9, 0.99], warm=False)
    pair.both(lambda optimizer, _: optimizer.param_groups[0].update(lr=torch.tensor(0.1), betas=[0.9, 0.99]))
    for number in range(3):
        pair.check_step(number)

    def write(optimizer, params):
        optimizer.param_groups[0]["lr"].fill_(0.5)
        optimizer.param_groups[0]["betas"][0] = 0.25

    pair.both(write)
    pair.check_step(3, hit=True)


def test_schedulers_leave_hits():
    pair = Pair(groups=2)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (pair.fast, pair.slow)]
    for number in range(3, 6):
        pair.check_step(number, hit=True)
        for scheduler in schedulers:
            scheduler.step()
    assert pair.fast.param_groups[0]["lr"] == 0.1 / 8


# ---- side effects ----


def test_versions_are_bumped():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = warmed([p])
    state = optimizer.state[p]
    loss = (p * p).sum() + (p * state["exp_avg"]).sum()
    tensors = p, state["exp_avg"], state["step"]
    versions = [t._version for t in tensors]
    optimizer.step()
    assert all(t._version > version for t, version in zip(tensors, versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("how", ["backend", "mode"])
def test_other_backends_and_dispatch_modes_get_lists(how, monkeypatch):
    """They cannot follow addresses."""
    pair, calls = Pair(), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace.startswith("amp_kernels"):
                calls.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    op = REGISTRY["adamw_"]
    reference = op.reference
    monkeypatch.setattr(op, "reference", lambda *args: (calls.append(len(args[0])), reference(*args))[1])
    with Mode() if how == "mode" else ak.backend("reference"):
        for number in range(3, 6):
            before = cached(pair.fast)
            set_grads(pair.params, number)
            pair.fast.step()
            assert (cached(pair.fast) is before) == (number > 3)
    assert calls == [len(pair.params)] * 3
    for number in range(3, 6):
        set_grads(pair.slow_params, number)
        pair.slow.step()
    pair.check()


def test_copies_leave_addresses_behind():
    pair = Pair()
    twin = copy.deepcopy(pair.fast)
    assert cached(twin) is None
    fill([p for group in twin.param_groups for p in group["params"]], 0.0)
    before = [p.clone() for p in pair.params]
    twin.step()
    assert all(torch.equal(p, q) for p, q in zip(pair.params, before, strict=True))

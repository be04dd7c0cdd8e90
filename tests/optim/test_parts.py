"""The parts of an optimizer alone: the state store and the protocol of a scaler's step."""

import pytest
import torch

import amp_kernels.optim as akopt
from amp_kernels.optim._gradients import StepRequest
from amp_kernels.optim._groups import GroupChecks
from amp_kernels.optim._options import checked_options
from amp_kernels.optim._store import StateStore

from .optimizers import bf16, f32, fill

SGD, ADAMW = akopt.SGD._algorithm, akopt.AdamW._algorithm


def param(value=1.0, dtype=bf16, n=5):
    return torch.nn.Parameter(torch.full((n,), value, dtype=dtype))


def group(*params, **numbers):
    usual = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    return {"params": list(params), **usual, **numbers}


def parts(**options):
    options = checked_options("SGD", options)
    return options, GroupChecks("SGD", SGD, options), StateStore("SGD", SGD, options)


def stored(store, groups, values=()):
    """A state mapping that shows the state of all parameters of the groups."""
    shown = {}
    store.commit(store.pack([(g, p, dict(values)) for g in groups for p in g["params"]]), shown)
    return shown


# ---- the state store ----


def test_packing_changes_nothing_until_the_commit():
    _, _, store = parts(master_weights="split")
    p = param()
    packed = store.pack([(group(p), p, {"master": torch.full((5,), 3.0)})])
    assert not store.places
    assert not store.blocks
    assert p.eq(1.0).all()
    shown = {}
    store.commit(packed, shown)
    assert shown[p] is store.places[id(p)].state
    assert p.eq(3.0).all()  # a split master sets its parameter


def test_a_group_that_asks_for_more_state_gets_a_new_block_with_the_old_values():
    _, _, store = parts()
    p = param()
    groups = [group(p)]
    shown = stored(store, groups)
    shown[p]["master"].fill_(7.0)
    store.outgrow()
    version = store.version
    groups[0]["momentum"] = 0.9
    store.outgrow()
    assert store.version > version
    assert not store.places
    shown = stored(store, groups, store.current(p, shown))
    assert list(shown[p]) == ["momentum_buffer", "master"]
    assert shown[p]["master"].eq(7.0).all()


def test_a_snapshot_restores_every_buffer():
    _, _, store = parts(ema_decay=0.5)
    p = param()
    shown = stored(store, [group(p, momentum=0.9, ema_decay=0.5)])
    restore = store.snapshot()
    before = {name: value.clone() for name, value in shown[p].items()}
    for value in shown[p].values():
        value.add_(1.0)
    restore()
    assert before.keys() == {"momentum_buffer", "master", "ema"}
    assert all(torch.equal(shown[p][name], value) for name, value in before.items())


# ---- a scaler's step ----


def test_a_request_holds_for_one_step_and_the_answer_comes_back():
    p = param(dtype=f32, n=4)
    optimizer = akopt.SGD([p], lr=1.0)
    fill([p], 2.0)
    request = StepRequest(grad_scale=torch.tensor(2.0), max_norm=1.0)
    result, answer = optimizer._step_on_request(request, lambda: (optimizer.step(), "done")[1])
    assert (result, answer.sum_sq.item()) == ("done", 4.0)
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.5))
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), -1.5))  # neither scaled nor clipped
    with pytest.raises(ZeroDivisionError):
        optimizer._step_on_request(request, lambda: 1 / 0)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), -3.5))


def test_a_wrapper_that_does_not_step_gets_an_empty_answer():
    optimizer = akopt.AdamW([param()])
    result, answer = optimizer._step_on_request(StepRequest(check=True), lambda: None)
    assert (result, answer.sum_sq, answer.found_infs, answer.nonfinite) == (None, None, {}, [])

"""The parts of an optimizer alone: group checks, packed numbers, state store, step plan, and the protocol of a scaler's step."""

import pytest
import torch

import amp_kernels.optim as akopt
from amp_kernels.optim._gradients import StepRequest
from amp_kernels.optim._groups import GroupChecks, HyperParameters
from amp_kernels.optim._options import checked_options
from amp_kernels.optim._plan import StepPlan
from amp_kernels.optim._store import StateStore

from .optimizers import bf16, f32, fill

SGD, ADAMW = akopt.SGD.algorithm, akopt.AdamW.algorithm


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


def test_writes_are_adopted_unless_they_are_marked_clean():
    _, _, store = parts()
    p, q = param(), param()
    shown = stored(store, [group(p, q)])
    with torch.no_grad():
        p.fill_(2.0), q.fill_(2.0)
    store.places[id(q)].mark_clean()
    store.adopt_writes()
    assert shown[p]["master"].eq(2.0).all()
    assert shown[q]["master"].eq(1.0).all()


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


# ---- the numbers of the groups ----


def test_numbers_are_packed_anew_only_when_one_was_replaced():
    options, checks, _ = parts()
    hyper, groups = HyperParameters(SGD, options, checks), [group(param()), group(param(), lr=0.25, nesterov=True)]
    packed = hyper.packed(groups)
    count = len(SGD.declared.options)
    assert packed.options[::count] == [0.5, 0.25]
    groups[0]["lr"] = torch.tensor(1.0)
    assert hyper.packed(groups) is packed
    assert packed.options[::count] == [0.0, 0.25]
    rates, decays = hyper.on_device(groups, torch.device("cpu"))
    assert ([rate.item() for rate in rates], decays) == ([1.0, 0.25], [])
    groups[1]["weight_decay"] = 0.125
    assert hyper.packed(groups) is not packed
    assert hyper.packed(groups).fixed_numbers() == packed.fixed_numbers()
    with hyper.decays_from([torch.tensor(0.5, dtype=torch.float64)]):
        assert hyper.on_device(groups, torch.device("cpu"))[1] == [0.5]
    assert hyper.on_device(groups, torch.device("cpu"))[1] == []


# ---- the plan ----


def test_a_plan_takes_steps_for_any_groups_and_state():
    options, checks, store = parts()
    plan, p, state = StepPlan("SGD", SGD, options, checks, store), param(), {}
    groups = [group(p)]
    for step in range(3):
        fill([p], 1.0)
        answer = plan.step(groups, state, StepRequest())
        assert (answer.sum_sq, answer.found_infs) == (None, {})
        assert (plan.cached is not None) == (step > 0)
    assert state[p]["master"].eq(-0.5).all()
    p.grad[0] = torch.nan
    answer = plan.step(groups, state, StepRequest(grad_scale=torch.tensor(2.0), check=True, per_tensor=True))
    assert [flag.item() for flag in answer.found_infs.values()] == [1.0]
    ((params, flags),) = answer.nonfinite
    assert params == [p]
    assert flags.tolist() == [1.0]
    assert p.eq(-0.5).all()


# ---- a scaler's step ----


def test_a_request_holds_for_one_step_and_the_answer_comes_back():
    p = param(dtype=f32, n=4)
    optimizer = akopt.SGD([p], lr=1.0)
    fill([p], 2.0)
    request = StepRequest(grad_scale=torch.tensor(2.0), max_norm=1.0)
    result, answer = optimizer.step_on_request(request, lambda: (optimizer.step(), "done")[1])
    assert (result, answer.sum_sq.item()) == ("done", 4.0)
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.5))
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), -1.5))  # neither scaled nor clipped
    with pytest.raises(ZeroDivisionError):
        optimizer.step_on_request(request, lambda: 1 / 0)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), -3.5))


def test_a_wrapper_that_does_not_step_gets_an_empty_answer():
    optimizer = akopt.AdamW([param()])
    result, answer = optimizer.step_on_request(StepRequest(check=True), lambda: None)
    assert (result, answer.sum_sq, answer.found_infs, answer.nonfinite) == (None, None, {}, [])


# ---- groups ----


def test_checks_complete_a_group_and_compare_options_of_all():
    _, checks, _ = parts(master_weights="none", seed=3, ema_decay=0.5)
    first, second = group(param()), group(param(), seed=4)
    for one in (first, second):
        checks.complete(one, {})
    assert (first["seed"], first["ema_decay"], second["seed"]) == (3, 0.5, 4)
    with pytest.raises(ValueError, match=r"SGD: groups have the seeds \[3, 4\]"):
        checks.common("seed", [first, second])
    with pytest.raises(ValueError, match="SGD: a group lacks eps; accepted: groups of the same kind"):
        checks.complete(group(param()), {"eps": 1e-8})
    with pytest.raises(TypeError, match="SGD: lr is '1', of type str"):
        checks.check_numbers([group(param(), lr="1")])

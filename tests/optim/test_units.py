"""The life of a unit: spikes of its norm, its state apart, its place taken by another, and sets of units that change from step to step."""

import copy
import io
import random

import pytest
import torch

import amp_kernels as ak
import amp_kernels.optim as akopt

from ..helpers.generators import normal
from ..ops.test_judge_units import judge
from .eight_bit import assert_same_tensors
from .optimizers import params_of
from .test_independent_groups import OPTIMIZERS, STORED, everything, fleets, give, give_gradients, make


def step_units(optimizer, units, numbers):
    for number in numbers:
        give_gradients(units, number)
        optimizer.step()


# ---- spikes ----


def norms(spike=10.0):
    generator = torch.Generator().manual_seed(0)
    return [*(1.0 + 0.1 * torch.rand(12, generator=generator, dtype=torch.float64)).tolist(), spike, 1.0]


@pytest.mark.parametrize("independent", [True, False])
@pytest.mark.parametrize("action", ["clip", "skip"])
def test_a_spike_of_one_norm(action, independent):
    """SGD's steps show the factor: that of the rule in plain Python."""
    options = {"spike_zscore": 2.5, "spike_warmup": 10, "spike_action": action, "spike_decay": 0.5}
    param, calm = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    groups = [{"params": [param]}, {"params": [calm]}]
    optimizer = akopt.SGD(groups if independent else [param], lr=1.0, independent_groups=independent, **options)
    steps, marks = [], []
    for norm in norms():
        param.grad, before = torch.full_like(param, norm / 2), param.detach().clone()
        calm.grad = torch.ones_like(calm)
        optimizer.step()
        steps.append((param.detach() - before).norm().item())
        marks.append(optimizer.group_results.skipped.tolist())
    rule, known, expected = (-1.0, 0.0, 2.5, 0.5, 10, float(action == "skip"), 1.0), (0.0,) * 6, []
    for norm in norms():
        factor, known = judge(known, norm, False, rule)
        expected.append(0.0 if factor == 2.0 else norm * factor)
    assert steps == pytest.approx(expected, rel=1e-5)
    assert (steps[12] == 0.0) == (action == "skip")
    assert steps[12] < 1.5
    if action == "skip":
        assert [skipped[0] for skipped in marks] == [i == 12 for i in range(14)]
        assert optimizer.group_results.skips[0] == 1
    else:
        assert not any(map(any, marks))
    if independent:
        assert not any(skipped[1] for skipped in marks)
        assert optimizer.group_results.steps.tolist() == [13 if action == "skip" else 14, 14]


def test_a_skipped_spike_is_no_overflow():
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = akopt.SGD([param], lr=1.0, spike_zscore=2.5, spike_warmup=10, spike_action="skip")
    scaler = ak.GradScaler("cpu", init_scale=8.0)
    for norm in norms():
        param.grad = torch.full_like(param, 8 * norm / 2)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0
    assert optimizer.group_results.skips.tolist() == [1]
    param.grad, before = torch.full_like(param, torch.inf), param.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert torch.equal(param, before)


def test_an_earlier_flag_skips_a_step_whose_gradients_were_mended():
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer, scaler = akopt.SGD([param], lr=1.0, spike_zscore=2.5), ak.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    param.grad = torch.full_like(param, torch.inf)
    scaler.unscale_(optimizer)
    param.grad.fill_(1.0)
    scaler.step(optimizer)
    assert param.count_nonzero() == 0


@pytest.mark.parametrize("value", [
    {"spike_zscore": 0.0}, {"spike_zscore": float("nan")}, {"spike_zscore": "2"}, {"spike_decay": 1.0}, {"spike_warmup": 1},
    {"spike_warmup": 2.5}, {"spike_action": "stop"},
])  # fmt: skip
def test_options_of_spikes_are_checked(value):
    ((key, _),) = value.items()
    params = [torch.nn.Parameter(torch.ones(3))]
    for groups, options in ((params, value), ([{"params": params, **value}], {"independent_groups": True})):
        with pytest.raises(ValueError, match=f"AdamW: {key} is "):
            akopt.AdamW(groups, **options)
    optimizer = akopt.AdamW(params, independent_groups=True)
    optimizer.param_groups[0].update(value)
    params[0].grad = torch.ones(3)
    with pytest.raises(ValueError, match=f"AdamW: {key} is "):
        optimizer.step()
    assert not optimizer.state
    optimizer = akopt.AdamW(params, spike_zscore=2.5, spike_action="skip")
    with pytest.raises(ValueError, match=f"AdamW: {key} is "):
        setattr(optimizer, key, value[key])
    optimizer.spike_zscore = None
    optimizer.step()
    assert params[0].max() < 1


# ---- its state apart ----


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stored", STORED)
def test_a_unit_moves(name, stored):
    """Into an optimizer of its own and back into another slot, whose tenant leaves nothing: the bits of one that stayed."""
    one, ours, _, _ = fleets(name, stored, lr=0.02)
    stays, kept, _, _ = fleets(name, stored, lr=0.02)
    step_units(one, ours, range(4))
    step_units(stays, kept, range(4))
    saved = io.BytesIO()
    torch.save(one.unit_state_dict("unit 0"), saved)
    assert "unit" not in one.unit_state_dict("unit 0")["param_groups"][0]
    loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    own = [p.detach().clone().requires_grad_() for p in ours[0]]
    options = {**STORED[stored][1], **OPTIMIZERS[name]}
    halves = [{"params": [p]} for p in own] if len(own) > 1 else own
    alone = getattr(akopt, name)(halves, lr=0.5, **options)
    alone.load_state_dict(loaded)
    assert alone.param_groups[0]["lr"] == one.param_groups[0]["lr"]
    for number in (4, 6):
        for i, (p, q) in enumerate(zip(own, kept[0], strict=True)):
            q.grad = normal(*p.shape, seed=50 * number + i).to(p)
            p.grad = q.grad.clone()
        alone.step()
        stays.step(units=["unit 0"])
    assert_same_tensors(everything(alone, own), everything(stays, kept[0]))

    with torch.no_grad():
        for p in ours[0]:
            p.copy_(normal(*p.shape, seed=3))  # the new tenant's
    one.reset_unit("unit 0")
    assert one.group_results.steps[0] == 0
    before = everything(one, ours[1])
    with torch.no_grad():
        for p, q in zip(ours[0], own, strict=True):
            p.copy_(q)
    one.load_unit_state_dict("unit 0", alone.state_dict())
    assert one.param_groups[0]["unit"] == "unit 0"
    for units, optimizer in ((kept, stays), (ours, one)):
        for i, p in enumerate(units[0]):
            p.grad = normal(*p.shape, seed=i).to(p)
        optimizer.step(units=["unit 0"])
    assert_same_tensors(everything(one, ours[0]), everything(stays, kept[0]))
    assert_same_tensors(everything(one, ours[1]), before)


@pytest.mark.parametrize("stored", ["masters", "split24, 8-bit", "zeroed"])
def test_a_new_tenant_inherits_nothing(stored):
    one, ours, _, _ = fleets("AdamW", stored)
    fresh, new, _, _ = fleets("AdamW", stored)
    step_units(one, ours, range(3))
    with torch.no_grad():
        for p, q in zip(ours[1], new[1], strict=True):
            p.copy_(q)
    one.reset_unit("unit 1")
    for units, optimizer in ((ours, one), (new, fresh)):
        for number in (2, 3):
            give_gradients(units, number)
            optimizer.step(units=["unit 1"])
    assert_same_tensors(everything(one, ours[1]), everything(fresh, new[1]))
    assert one.group_results.steps.tolist()[1] == fresh.group_results.steps.tolist()[1] == 2


def test_counts_move_with_a_unit():
    optimizer = make()
    for _ in range(3):
        give(optimizer, 1.0, None, None)
        optimizer.step()
    give(optimizer, 1.0, 1.0, 1.0)
    optimizer.step()
    optimizer.load_unit_state_dict(2, optimizer.unit_state_dict(0))
    assert optimizer.group_results.steps.tolist() == [4, 1, 4]
    assert [optimizer.state[p]["step"].item() for p in params_of(optimizer)] == [4.0, 1.0, 4.0]


def test_counts_follow_their_groups():
    """Groups leave, come, change places and names."""
    optimizer = make()
    for values in ((1.0, 1.0, 1.0), (None, 1.0, 1.0), (None, None, 1.0)):
        give(optimizer, *values)
        optimizer.step()

    def counts():
        return [group["statistics"][0].item() for group in optimizer.state_dict()["param_groups"]]

    assert counts() == [1, 2, 3]
    optimizer.state.pop(*optimizer.param_groups.pop(0)["params"])
    assert counts() == [2, 3]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    optimizer.param_groups.reverse()
    assert counts() == [0, 3, 2]
    optimizer.param_groups[1]["unit"] = "last"
    give(optimizer, None, 1.0, 1.0)
    optimizer.step()
    results = optimizer.group_results
    assert results.units == [0, "last", 2]
    assert counts() == results.steps.tolist() == [0, 4, 3]


def test_keys_that_a_load_lacks_stay():
    weights = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    theirs = torch.optim.Muon(weights[:1])
    weights[0].grad = torch.ones(4, 4)
    theirs.step()
    ours = {"heads": 2, "flatten": True, "cautious": True}
    optimizer = akopt.Muon([{"params": weights[1:], **ours}])
    optimizer.load_state_dict(theirs.state_dict())
    assert ours.items() <= optimizer.param_groups[0].items()
    theirs = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], lr=0.5)
    group = {"params": [torch.nn.Parameter(torch.ones(4))], "unit": "a", "max_grad_norm": 0.5, "ema_decay": 0.5}
    optimizer = akopt.AdamW([group], independent_groups=True)
    give(theirs, 1.0)
    theirs.step()
    for load in (lambda state: optimizer.load_unit_state_dict("a", state), optimizer.load_state_dict):
        load(theirs.state_dict())
        (group,) = optimizer.param_groups
        assert [group[key] for key in ("unit", "max_grad_norm", "ema_decay", "lr")] == ["a", 0.5, 0.5, 0.5]
        assert (group["fused"], group["foreach"]) == (True, None)
        assert optimizer.state[group["params"][0]]["step"] == 1


def test_a_unit_whose_state_has_to_grow_is_reset():
    optimizer = make(2)
    give(optimizer, 1.0, 1.0)
    optimizer.step()
    for group in optimizer.param_groups:
        group["ema_decay"] = 0.5
    optimizer.step(units=[0])
    optimizer.reset_unit(1)
    optimizer.step(units=[1])
    assert [optimizer.state[p]["step"].item() for p in params_of(optimizer)] == [2, 1]


def test_what_a_unit_cannot_load():
    optimizer = make()
    give(optimizer, 1.0, 1.0, 1.0)
    optimizer.step()
    before, groups = everything(optimizer, params_of(optimizer)), copy.deepcopy(optimizer.param_groups)
    good = copy.deepcopy(optimizer.unit_state_dict(1))
    (values,), other = (
        good["state"].values(),
        {"state": {}, "param_groups": [{**good["param_groups"][0], "params": [0, 1]}]},
    )
    faster = [{**good["param_groups"][0], "lr": 0.7}]
    wrong = [
        (other, "groups of \\[2\\] parameters, and the unit of \\[1\\]"),
        ({"state": {0: {**values, "exp_avg": torch.zeros(3)}}, "param_groups": faster}, "loaded exp_avg has shape"),
        ({**good, "param_groups": [{**good["param_groups"][0], "lr": -1.0}]}, "Invalid learning rate"),
        ({**good, "param_groups": [{**good["param_groups"][0], "statistics": torch.zeros(2)}]}, "statistics"),
        ({"state": {}}, "state_dict has no 'param_groups'"),
    ]
    for state_dict, message in wrong:
        with pytest.raises(ValueError, match=message):
            optimizer.load_unit_state_dict(1, state_dict)
        assert_same_tensors(everything(optimizer, params_of(optimizer)), before)
        assert str(optimizer.param_groups) == str(groups)
    for call in (optimizer.unit_state_dict, optimizer.reset_unit):
        with pytest.raises(ValueError, match="there is no unit 'x'; accepted: 0, 1, 2"):
            call("x")
    with pytest.raises(ValueError, match="independent_groups is False"):
        akopt.AdamW([torch.nn.Parameter(torch.ones(2))]).reset_unit(0)


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
@pytest.mark.parametrize("independent", [True, False])
def test_statistics_are_saved(way, independent):
    """A run that is interrupted before any step ends with the same weights and counts."""

    def begin():
        param = torch.nn.Parameter(torch.zeros(4))
        options = {"spike_zscore": 2.0, "spike_warmup": 3, "spike_decay": 0.5, "independent_groups": independent}
        return param, akopt.SGD([param], lr=1.0, **options)

    def run(param, optimizer, part):
        for norm in part:
            param.grad = torch.full_like(param, norm / 2)
            optimizer.step()
        return param.detach().clone(), optimizer.group_results.steps.clone()

    whole = run(*begin(), norms())
    for end in range(1, len(norms())):
        param, optimizer = begin()
        run(param, optimizer, norms()[:end])
        if way == "deepcopy":
            param, optimizer = copy.deepcopy((param, optimizer))
        else:
            state, (new, other) = optimizer.state_dict(), begin()
            new.data.copy_(param)
            other.load_state_dict(state)
            param, optimizer = new, other
        assert "statistics" not in optimizer.param_groups[0]
        assert_same_tensors(run(param, optimizer, norms()[end:]), whole)


# ---- sets of units that change ----


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Muon"])
@pytest.mark.parametrize("way", ["no gradient", "not named"])
def test_any_set_of_units_is_one_cached_step(name, way, monkeypatch):
    """The bits of optimizers of their own, from a table that is made once all units have been stepped."""
    if ak._dispatch.nodes.step_walk() is None:
        pytest.skip("the module _nodes was not built for this torch")
    draw = random.Random(3)
    one, ours, each, theirs = fleets(name, "masters")
    taken = 0
    for number in range(10):
        chosen = range(3) if number < 2 else draw.sample(range(3), draw.choice((1, 2, 3))) if number > 2 else [1]
        taken += len(chosen)
        if number == 2:
            one._plan.forget()  # the table is made in a step of one unit
        if number == 3:
            monkeypatch.setattr(one._plan, "_collect", None)
        for units in (ours, theirs):
            for unit, params in enumerate(units):
                for i, p in enumerate(params):
                    named = unit in chosen
                    gives = named or (way == "not named" and units is ours)
                    p.grad = normal(*p.shape, seed=90 * number + 10 * unit + i).to(p) if gives else None
        one.step(units=[f"unit {unit}" for unit in chosen] if way == "not named" else None)
        for unit in chosen:
            each[unit].step()
        assert_same_tensors(
            [v for params, o in zip(ours, each, strict=True) for v in everything(one, params)],
            [v for params, o in zip(theirs, each, strict=True) for v in everything(o, params)],
        )
    assert one.group_results.steps.sum() == taken


@pytest.mark.parametrize("warm", [0, 3])
def test_a_parameter_of_a_unit_may_lack_its_gradient(warm):
    one, ours, each, theirs = fleets("AdamW", "masters")
    for units, steps in ((ours, [one.step]), (theirs, [o.step for o in each])):
        for number in (*[0] * warm, 1, 1, 2):
            for unit, params in enumerate(units):
                for i, p in enumerate(params):
                    lacks = number and (unit, i) == (0, number - 1)
                    p.grad = None if lacks else normal(*p.shape, seed=i + number).to(p)
            for step in steps:
                step()
    for params, twins, o in zip(ours, theirs, each, strict=True):
        assert_same_tensors(everything(one, params), everything(o, twins))


def test_a_state_that_is_replaced_while_its_unit_waits():
    one, ours, _, _ = fleets("AdamW", "masters")
    other, theirs, _, _ = fleets("AdamW", "masters")
    for units, optimizer in ((ours, one), (theirs, other)):
        step_units(optimizer, units, (0, 3))
        if optimizer is other:
            step_units(optimizer, units, (4,))  # of units 0 and 2
        for p in units[1]:
            optimizer.state[p] = {key: value.clone() * 0.5 for key, value in optimizer.state[p].items()}
        if optimizer is one:
            step_units(optimizer, units, (4,))
        step_units(optimizer, units, (5, 6))
    for params, twins in zip(ours, theirs, strict=True):
        assert_same_tensors(everything(one, params), everything(other, twins))


@pytest.mark.parametrize("name", ["AdamW", "LAMB"])
def test_a_unit_that_is_not_stepped_keeps_its_graph(name):
    """Another unit's step between forward and backward: autograd would refuse weights whose version had changed."""
    one, ours, _, _ = fleets(name, "zeroed", zero_grads=False)
    step_units(one, ours, (0, 1, 3, 4))
    for _ in range(2):
        for params in ours:
            for p in params:
                p.grad = torch.ones_like(p)
        loss = (ours[2][0] ** 2).sum()
        one.step(units=["unit 0"])
        loss.backward()


def test_units_that_are_not_named_are_not_read():
    optimizer = make(zero_grads=True)
    for _ in range(3):
        give(optimizer, 1.0, 1.0, 1.0)
        optimizer.step()
    give(optimizer, 1.0, torch.nan, 1.0)
    optimizer.step(units=[0, 2])
    results = optimizer.group_results
    assert results.norms.tolist() == pytest.approx([32**0.5, 0.0, 32**0.5])
    assert params_of(optimizer)[1].grad.isnan().all()
    assert results.steps.tolist() == [4, 3, 4]

"""``independent_groups=True``: each unit has the bits of an optimizer of its own, whatever the others do."""

import copy
import io
import warnings

import pytest
import torch

import amp_kernels as ak
import amp_kernels.optim as akopt

from ..helpers.generators import normal
from ..helpers.ops import Ops
from .eight_bit import assert_same_tensors
from .optimizers import bf16, f16, f32, params_of

SHAPES = [[(64, 64), (5,)], [(33,), (128, 32), (3, 2)], [(64, 96)]]
STORED = {
    "fp32": (f32, {}),
    "masters": (bf16, {"ema_decay": 0.75}),
    "split": (f16, {"master_weights": "split"}),
    "split24, 8-bit": (bf16, {"master_weights": "split24", "state_dtype": "8bit"}),
    "none": (bf16, {"master_weights": "none"}),
    "shadows, 8-bit": (f32, {"shadow_dtype": bf16, "state_dtype": "8bit"}),
    "zeroed": (f32, {"zero_grads": True}),
}
OPTIMIZERS = {
    "AdamW": {"amsgrad": True},
    "Adam": {},
    "SGD": {"momentum": 0.9},
    "Lion": {},
    "LAMB": {},
    "Muon": {},
}
#: Of one tensor the squares are rounded as those of a list are; of more the norm may differ in its last bit.
LIMITS = [{"max_grad_norm": 1e4}, {"skip_nonfinite": True, "lr": 0.02}, {"max_grad_norm": 1.0}]


def params_of_unit(unit, dtype, matrices):
    shapes = [shape for shape in SHAPES[unit] if not matrices or len(shape) == 2]
    return [torch.nn.Parameter(normal(*shape, seed=10 * unit + i).to(dtype)) for i, shape in enumerate(shapes)]


def give_gradients(units, number, broken=None):
    """A unit in three steps has none; unit ``broken`` has a NaN."""
    for unit, params in enumerate(units):
        for i, p in enumerate(params):
            p.grad = None if (number + unit) % 3 == 2 else normal(*p.shape, seed=1000 * number + 10 * unit + i).to(p)
        if unit == broken and params[0].grad is not None:
            params[0].grad.view(-1)[0] = torch.nan


def everything(optimizer, params):
    values = [*params, *(value for p in params for _, value in sorted(optimizer.state[p].items()))]
    return [value.detach().clone() for value in values if isinstance(value, torch.Tensor)]


def fleets(name, stored, **more):
    """Units in one optimizer, and the same each in its own."""
    dtype, options = STORED[stored]
    options = {**options, **OPTIMIZERS[name], "lr": 0.01, **more}
    ours, theirs = ([params_of_unit(unit, dtype, name == "Muon") for unit in range(3)] for _ in range(2))
    groups = []
    for unit, (params, limits) in enumerate(zip(ours, LIMITS, strict=True)):
        halves = [params[:1], params[1:]] if len(params) > 1 else [params]
        groups += [{"params": half, "unit": f"unit {unit}", **limits} for half in halves]
    one = getattr(akopt, name)(groups, independent_groups=True, **options)
    each = [
        getattr(akopt, name)(params, **{**options, **limits}) for params, limits in zip(theirs, LIMITS, strict=True)
    ]
    return one, ours, each, theirs


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stored", STORED)
def test_a_unit_has_the_bits_of_its_own_optimizer(name, stored):
    one, ours, each, theirs = fleets(name, stored)
    for number in range(7):
        broken = 1 if number in (3, 4) else None
        give_gradients(ours, number, broken)
        give_gradients(theirs, number, broken)
        one.step()
        for optimizer, params in zip(each, theirs, strict=True):
            if params[0].grad is not None:
                optimizer.step()
        for mine, optimizer, params in zip(ours, each, theirs, strict=True):
            assert_same_tensors(everything(one, mine), everything(optimizer, params))
            assert_same_tensors(*([p.grad.nan_to_num() for p in it if p.grad is not None] for it in (mine, params)))
    results = one.group_results
    assert results.units == ["unit 0", "unit 1", "unit 2"]
    assert (results.steps + results.skips).tolist() == [5, 5, 4]
    assert results.skips.tolist() == [0, 1, 0]


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_each_unit_is_clipped_by_its_own_norm(name):
    one, ours, each, theirs = fleets(name, "fp32", max_grad_norm=2.0)
    limits = {"unit 0": 0.5, "unit 1": 3.0, "unit 2": 1e-3}
    for group in one.param_groups:
        group["max_grad_norm"] = limits[group["unit"]]
    for optimizer, limit in zip(each, limits.values(), strict=True):
        optimizer.max_grad_norm = limit
    for number in (3, 6):
        give_gradients(ours, number)
        give_gradients(theirs, number)
        one.step()
        for optimizer, params in zip(each, theirs, strict=True):
            if params[0].grad is not None:
                optimizer.step()
    for mine, params in zip(ours, theirs, strict=True):
        for a, b in zip(mine, params, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


def make(units=3, seed=0, **options):
    groups = [{"params": [torch.nn.Parameter(normal(8, 4, seed=seed + i))]} for i in range(units)]
    return akopt.AdamW(groups, lr=0.1, independent_groups=True, **options)


def give(optimizer, *values):
    for p, value in zip(params_of(optimizer), values, strict=True):
        p.grad = None if value is None else torch.full_like(p, value)


def test_a_step_of_some_units():
    optimizer = make(zero_grads=True)
    give(optimizer, 1.0, torch.nan, 2.0)
    before = [p.detach().clone() for p in params_of(optimizer)]
    optimizer.step(units=[0])
    assert [torch.equal(p, old) for p, old in zip(params_of(optimizer), before, strict=True)] == [False, True, True]
    assert [p.grad.abs().sum().item() for p in params_of(optimizer)][0::2] == [0.0, 64.0]
    assert optimizer.group_results.steps.tolist() == [1, 0, 0]
    assert optimizer.group_results.norms.tolist() == pytest.approx([32**0.5, 0.0, 0.0])
    optimizer.step(units=(2,))
    assert optimizer.group_results.steps.tolist() == [1, 0, 1]
    assert [optimizer.state[p]["step"].item() for p in params_of(optimizer)[::2]] == [1.0, 1.0]
    assert params_of(optimizer)[1] not in optimizer.state
    with pytest.raises(ValueError, match=r"AdamW: there is no unit 'x'; accepted: 0, 1, 2"):
        optimizer.step(units=["x"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().step(units=[])


@pytest.mark.parametrize("way", ["checked in the step", "unscaled before", "unscale_grads", "torch's scaler"])
def test_a_scaler_skips_a_unit_alone(way):
    optimizer = make(unscale_grads=way == "unscale_grads")
    scaler = torch.amp.GradScaler("cpu", 4.0) if way == "torch's scaler" else ak.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    before = [p.detach().clone() for p in params_of(optimizer)]
    give(optimizer, 4.0, torch.inf, 8.0)
    if way == "unscaled before":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    results = optimizer.group_results
    assert results.skipped.tolist() == [False, True, False]
    assert results.norms[::2].tolist() == pytest.approx([32**0.5, 2 * 32**0.5])
    assert [torch.equal(p, old) for p, old in zip(params_of(optimizer), before, strict=True)] == [False, True, False]


def test_the_scalers_max_norm_is_each_units():
    optimizers = [make(), make(max_grad_norm=0.5)]
    scaler = ak.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    for optimizer in optimizers:
        give(optimizer, 2.0, 1e-4, 6.0)
    scaler.step(optimizers[0], max_norm=0.5)
    with pytest.raises(ValueError, match=r"max_norm is 0.5 and max_grad_norm of AdamW is 0.5; accepted: one of them"):
        scaler.step(optimizers[1], max_norm=0.5)
    scaler.step(optimizers[1])
    assert_same_tensors(*(everything(it, params_of(it)) for it in optimizers))
    assert scaler.last_grad_norm.item() == pytest.approx((32 * (1 + 2.5e-9 + 9)) ** 0.5)


def test_limits_follow_the_groups_and_the_scaler():
    """Also between steps; 0.0 is a limit, under which weights stay."""
    optimizer = make(2, weight_decay=0.0)
    scaler = ak.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    for limits in ((0.0, None), (None, 0.0)):
        for group, limit in zip(optimizer.param_groups, limits, strict=True):
            group["max_grad_norm"] = limit
        optimizer.reset_unit(0), optimizer.reset_unit(1)
        before = [p.detach().clone() for p in params_of(optimizer)]
        give(optimizer, 1.0, 1.0)
        optimizer.step()
        moved = [not torch.equal(p, old) for p, old in zip(params_of(optimizer), before, strict=True)]
        assert moved == [limit is None for limit in limits]
    optimizer.param_groups[1]["max_grad_norm"] = None
    for max_norm in (1.0, 0.0):
        optimizer.reset_unit(0), optimizer.reset_unit(1)
        before = [p.detach().clone() for p in params_of(optimizer)]
        give(optimizer, 2.0, 2.0)
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
        assert torch.equal(params_of(optimizer)[0], before[0]) == (max_norm == 0.0)


def test_compiled_and_added_units():
    one, other = make(), make()
    for optimizer in (one, other):
        call = torch.compile(optimizer.step, backend="eager") if optimizer is one else optimizer.step
        for values in ((1.0, torch.nan, 2.0), (None, 3.0, 1.0), (1.0, 1.0, 1.0)):
            give(optimizer, *values)
            call()
    assert_same_tensors(*([p.detach().nan_to_num() for p in params_of(it)] for it in (one, other)))
    results = other.group_results
    assert results.steps.tolist() == [2, 3, 3]  # without a check nothing is skipped
    other.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "unit": "new"})
    assert other.group_results.units == [0, 1, 2]
    give(other, None, 1.0, None, 1.0)
    other.step()
    assert other.group_results.units == [0, 1, 2, "new"]
    assert other.group_results.steps.tolist() == [2, 4, 3, 1]
    with pytest.raises(RuntimeError, match="group_results is read before the first step"):
        make().group_results  # noqa: B018
    with pytest.raises(RuntimeError, match="independent_groups is False"):
        akopt.AdamW(params_of(one)).group_results  # noqa: B018
    with pytest.raises(ValueError, match=r"units is \[0\] and independent_groups is False"):
        akopt.AdamW(params_of(one)).step(units=[0])


def test_matrices_and_others_of_one_unit():
    """Muon's two kinds of groups are clipped and skipped together."""

    def groups(unit):
        halves = [{"params": [torch.nn.Parameter(normal(64, 32, seed=unit))]}]
        return [*halves, {"params": [torch.nn.Parameter(normal(7, seed=unit))], "algorithm": "adamw"}]

    named = [{**group, "unit": str(unit)} for unit in range(3) for group in groups(unit)]
    one = akopt.Muon(named, lr=0.01, independent_groups=True, skip_nonfinite=True)
    each = [akopt.Muon(groups(unit), lr=0.01, skip_nonfinite=True) for unit in range(3)]
    for number in range(3):
        for optimizer in (one, *each):
            for p in params_of(optimizer):
                p.grad = normal(*p.shape, seed=100 * number + len(p))
        for optimizer in (one, each[1]):
            params_of(optimizer)[3 if optimizer is one else 1].grad[2] = torch.inf if number == 1 else 1.0
        for optimizer in (one, *each):
            optimizer.step()
    assert one.group_results.skips.tolist() == [0, 1, 0]
    apart = [p for optimizer in each for p in params_of(optimizer)]
    for mine, p in zip(params_of(one), apart, strict=True):
        assert torch.allclose(mine, p, rtol=1e-5, atol=1e-6)  # products of three matrices at once


def test_no_more_calls_of_ops_for_more_units():
    """One read of the gradients, one decision, one update."""
    called = []
    for units in (1, 2, 50):
        optimizer = make(units)
        for _ in range(3):
            give(optimizer, *[1.0] * units)
            optimizer.step()
        give(optimizer, *[1.0] * units)
        with Ops() as ops:
            optimizer.step()
        called.append([name for name in ops.names if name.startswith("amp_kernels")])
    assert called[0] == called[1] == called[2]
    assert len(called[0]) == 3


@pytest.mark.parametrize(
    ("options", "group", "message"),
    [
        ({}, {"unit": "a"}, "unit of a group is 'a', and independent_groups is False"),
        ({}, {"max_grad_norm": 1.0},
            "max_grad_norm is an option of the optimizer.*with independent_groups=True also max_grad_norm"),
        ({"independent_groups": True}, {"unit": 3},
            "unit of a group is 3, and independent_groups is True; accepted: a string"),
        ({"independent_groups": True}, {"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"independent_groups": True}, {"max_grad_norm": float("nan")}, "max_grad_norm"),
    ],
)  # fmt: skip
def test_refused_groups(options, group, message):
    with pytest.raises(ValueError, match=message):
        akopt.AdamW([{"params": [torch.nn.Parameter(torch.ones(3))], **group}], **options)


@pytest.mark.parametrize(
    ("written", "error", "message"),
    [
        ({"skip_nonfinite": "no"}, TypeError, "AdamW: skip_nonfinite is 'no', of type str; accepted: True, False"),
        ({"unit": ["a"]}, ValueError, r"AdamW: unit of a group is \['a'\]"),
        ({"unit": 1}, ValueError, "AdamW: unit of a group is 1"),
    ],
)
def test_keys_that_are_written_later_are_checked(written, error, message):
    optimizer = make()
    give(optimizer, 1.0, 1.0, 1.0)
    optimizer.param_groups[0].update(written)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert not optimizer.state


def test_groups_of_a_unit_agree():
    optimizer = make()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "unit": "a", "max_grad_norm": 1.0})
    refused = "AdamW: groups of unit 'a' have max_grad_norm 1.0 and 2.0; accepted: the same in all groups of a unit"
    with pytest.raises(ValueError, match=refused):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "unit": "a", "max_grad_norm": 2.0})
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "unit": "a", "max_grad_norm": 1.0})
    give(optimizer, *[1.0] * 5)
    optimizer.param_groups[3]["max_grad_norm"] = 2.0
    before = [p.detach().clone() for p in params_of(optimizer)]
    with pytest.raises(ValueError, match=r"max_grad_norm 2\.0 and 1\.0"):
        optimizer.step()
    optimizer.param_groups[3].update(max_grad_norm=1.0, skip_nonfinite=True)
    with pytest.raises(ValueError, match=r"skip_nonfinite False and True|skip_nonfinite True and False"):
        optimizer.step()
    assert_same_tensors(params_of(optimizer), before)


def test_groups_become_independent():
    groups = [{"params": [torch.nn.Parameter(torch.ones(4))]} for _ in range(2)]
    optimizer = akopt.SGD(groups, lr=1.0, max_grad_norm=1.0)
    give(optimizer, 1.0, 1.0)
    optimizer.step()
    optimizer.independent_groups = True
    optimizer.param_groups[0]["unit"] = "a"
    optimizer.step()
    assert [p[0].item() for p in params_of(optimizer)] == pytest.approx([0.5 - 0.5**1.5] * 2, rel=1e-5)
    optimizer.independent_groups = False
    assert not {"unit", "max_grad_norm", "spike_zscore"} & copy.deepcopy(optimizer).param_groups[0].keys()


def test_a_checkpoint_has_the_limits_of_the_groups():
    optimizer, other = make(max_grad_norm=1.0), make(seed=5)
    optimizer.param_groups[1]["max_grad_norm"] = None
    other.load_state_dict(optimizer.state_dict())
    assert [group["max_grad_norm"] for group in other.param_groups] == [1.0, None, 1.0]


# ---- formats of moments ----


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_group_has_a_format_of_its_own(name):
    """The bits of optimizers with that option, and formats that a checkpoint brings, or leaves as they are."""
    formats = ["8bit", torch.bfloat16, torch.float32]
    options = {**OPTIMIZERS[name], "lr": 0.01}
    kind, dtype = getattr(akopt, name), torch.bfloat16

    def begin(**more):
        params = [torch.nn.Parameter(normal(64, 96, seed=i).to(dtype)) for i in range(3)]
        groups = [{"params": [p], "state_dtype": of} for p, of in zip(params, formats, strict=True)]
        return params, kind(groups, independent_groups=True, state_dtype=torch.bfloat16, **options, **more)

    def run(params, optimizers, steps):
        for number in steps:
            for i, p in enumerate(params):
                p.grad = normal(*p.shape, seed=9 * number + i).to(p)
            for optimizer in optimizers:
                optimizer.step()

    params, one = begin()
    twins = [p.detach().clone().requires_grad_() for p in params]
    each = [kind([p], state_dtype=of, **options) for p, of in zip(twins, formats, strict=True)]
    run(params, [one], range(3))
    run(twins, each, range(3))
    for p, q, own in zip(params, twins, each, strict=True):
        assert_same_tensors(everything(one, [p]), everything(own, [q]))
    saved = io.BytesIO()
    torch.save(one.state_dict(), saved)
    loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    assert [group["state_dtype"] for group in loaded["param_groups"]] == formats
    plain = copy.deepcopy(loaded)
    for group in plain["param_groups"]:
        del group["state_dtype"]
    for state_dict in (loaded, plain):
        others, other = begin()
        for p, q in zip(others, params, strict=True):
            p.data.copy_(q)
        other.load_state_dict(state_dict)
        assert [group["state_dtype"] for group in other.param_groups] == formats
        assert_same_tensors(
            *(
                [value for values in each["state"].values() for value in values.values()]
                for each in (other.state_dict(), loaded)
            )
        )
    with pytest.raises(ValueError, match=f"{name}: state_dtype is 'int8'; accepted: float32, bfloat16, '8bit'"):
        kind([{"params": params, "state_dtype": "int8"}], **options)

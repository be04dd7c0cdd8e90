"""Additions to torch's scaler: clipping in the step, no host sync, bounds, counters; and whole loops with several losses and
optimizers."""

import copy

import pytest
import torch

from amp_kernels.amp import GradScaler
from amp_kernels.optim import SGD, AdamW

from ..helpers.ops import Ops
from .scaling import EACH, OPTIMIZERS, is_ours, iterate, params


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batches(n, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 6, generator=generator) for _ in range(n)]


def gap(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a.parameters(), b.parameters(), strict=True))


@EACH
@pytest.mark.parametrize("max_norm", [0.05, 1e9, 0.0])
@pytest.mark.parametrize("state", ["scaled", "unscaled", "disabled"])
def test_max_norm_is_unscale_clip_step(make, max_norm, state):
    ours, theirs = model(), model()
    one, two = make(ours.parameters()), make(theirs.parameters())
    scaler = GradScaler("cpu", init_scale=64.0, enabled=state != "disabled")
    reference = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=state != "disabled")
    for x in batches(4):
        one.zero_grad()
        scaler.scale(ours(x).square().mean()).backward()
        if state == "unscaled":
            scaler.unscale_(one)
        scaler.step(one, max_norm=max_norm)
        scaler.update()
        two.zero_grad()
        reference.scale(theirs(x).square().mean()).backward()
        reference.unscale_(two)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        reference.step(two)
        reference.update()
        torch.testing.assert_close(scaler.last_grad_norm, norm, rtol=1e-5, atol=1e-7)
        assert scaler.last_grad_norm.shape == ()
    assert gap(ours, theirs) <= 2e-6


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("key", ["max_norm", "max_grad_norm"])
def test_a_max_norm_beside_the_optimizers_own_is_refused(enabled, key):
    """Neither is silently the other; without it the optimizer's counts."""
    m = model()
    optimizer, scaler = SGD(m.parameters(), max_grad_norm=1e-3, lr=1.0), GradScaler("cpu", 4.0, enabled=enabled)
    scaler.scale(m(batches(1)[0]).square().mean()).backward()
    before = copy.deepcopy(m)
    with pytest.raises(ValueError, match=r"max_norm is 0\.5 and max_grad_norm of SGD is 0\.001; accepted: one of them"):
        scaler.step(optimizer, **{key: 0.5})
    assert gap(m, before) == 0
    scaler.step(optimizer)
    moved = sum((a - b).square().sum() for a, b in zip(m.parameters(), before.parameters(), strict=True)).sqrt()
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("make", [SGD, torch.optim.SGD])
def test_max_grad_norm_is_another_name_of_max_norm(make):
    ends = []
    for key in ("max_norm", "max_grad_norm"):
        m = model()
        optimizer, scaler = make(m.parameters(), lr=1.0), GradScaler("cpu", 4.0)
        scaler.scale(m(batches(1)[0]).square().mean()).backward()
        scaler.step(optimizer, **{key: 1e-2})
        ends.append(m)
    assert gap(*ends) == 0
    with pytest.raises(ValueError, match=r"max_norm is 1.0 and max_grad_norm, which is the same, 2.0; accepted: one"):
        GradScaler("cpu").step(make(model().parameters(), lr=1.0), max_norm=1.0, max_grad_norm=2.0)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_bad_max_norm_changes_nothing(max_norm):
    m = model()
    optimizer, scaler = AdamW(m.parameters()), GradScaler("cpu")
    scaler.scale(m(batches(1)[0]).sum()).backward()
    with pytest.raises(ValueError, match="max_norm is"):
        scaler.step(optimizer, max_norm=max_norm)
    scaler.step(optimizer)


def test_last_grad_norm_without_max_norm():
    m = model()
    scaler = GradScaler("cpu", init_scale=16.0)
    for make, measured in ((OPTIMIZERS["ours"], True), (OPTIMIZERS["torch"], False)):
        optimizer = make(m.parameters())
        optimizer.zero_grad()
        scaler.scale(m(batches(1)[0]).sum()).backward()
        expected = torch.nn.utils.get_total_norm([p.grad / 16 for p in m.parameters()])
        scaler.step(optimizer)
        scaler.update()
        if measured:
            torch.testing.assert_close(scaler.last_grad_norm, expected)
        else:
            assert scaler.last_grad_norm is None


@EACH
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
def test_no_host_read(make, max_norm, explicit, kind):
    """During step, update and the reads of the counters. One .item() is torch's contract for optimizers that cannot
    skip."""
    optimizer, scaler = make(params(6, (3, 2))), kind("cpu", init_scale=4.0, growth_interval=2)
    if kind is torch.amp.GradScaler and (max_norm is not None or explicit or not is_ours(optimizer)):
        return  # it drives ours without one, too
    skips_on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
    for _ in range(4):
        with Ops() as ops:
            iterate(scaler, optimizer, explicit=explicit, **({} if max_norm is None else {"max_norm": max_norm}))
            if kind is GradScaler:
                assert scaler.last_step_skipped is False
                assert scaler.consecutive_skips.shape == scaler.skipped_steps.shape == ()
                assert scaler.last_grad_norm is None or scaler.last_grad_norm.shape == ()
        assert len(ops.host_reads()) == (0 if skips_on_device else 1)


def test_a_step_is_one_read_one_update_and_one_op_of_scalars():
    """tests/gpu counts them as kernels on a GPU."""
    views = {"reshape", "view", "select", "detach", "alias", "_to_copy", "unbind", "full_like", "ones", "mul"}
    optimizer, scaler = AdamW(params(*range(1, 162))), GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        with Ops() as ops:
            iterate(scaler, optimizer, max_norm=1.0)
    names = [name.partition("::")[2] for name in ops.names]
    names = [name for name in names if name not in views and "record_function" not in name]
    assert names == ["check_and_norm", "adamw_", "update_scale_"]


# ---- whole loops ----


def test_two_optimizers_one_scaler():
    """One optimizer's inf skips only that optimizer; update() backs off once for everyone."""
    a, b = model(0), model(1)
    first, second = AdamW(a.parameters()), torch.optim.AdamW(b.parameters(), fused=True)
    scaler = GradScaler("cpu", init_scale=16.0)
    scaler.scale(a(batches(1)[0]).sum() + b(batches(1)[0]).sum()).backward()
    next(a.parameters()).grad.view(-1)[3] = torch.inf
    before_a, before_b = copy.deepcopy(a), copy.deepcopy(b)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert gap(a, before_a) == 0
    assert gap(b, before_b) > 0
    assert scaler.get_scale() == 8.0
    assert scaler.skipped_steps.item() == 1
    for bad in (False, True):  # two overflows in one iteration count once, and flags are not added up
        first.zero_grad()
        second.zero_grad()
        scaler.scale(a(batches(1)[0]).sum() + b(batches(1)[0]).sum()).backward()
        if bad:
            for m in (a, b):
                next(m.parameters()).grad.view(-1)[0] = torch.nan
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert scaler.skipped_steps.item() == 2


# ---- bounds ----


def drive(scaler, overflows):
    """The scale after each iteration."""
    optimizer = SGD(params(2), lr=0.0)
    return [iterate(scaler, optimizer, {0} if bad else ()) or scaler.get_scale() for bad in overflows]


@pytest.mark.parametrize(
    ("options", "overflows", "scales"),
    [
        ({"init_scale": 4.0, "min_scale": 1.0}, [1] * 5, [2.0, 1.0, 1.0, 1.0, 1.0]),
        ({"init_scale": 4.0, "max_scale": 12.0, "growth_interval": 1}, [0] * 4, [8.0, 12.0, 12.0, 12.0]),
        ({"init_scale": 4.0, "growth_interval": 0}, [0, 0, 1, 0], [4.0, 4.0, 2.0, 2.0]),
        ({"init_scale": 64.0, "growth_interval": 1, "dynamic": False}, [0, 1, 0, 1], [64.0] * 4),
        # A backoff from the third overflow on; the count starts over only when the scale grows (Megatron-LM's rule).
        (
            {"init_scale": 64.0, "hysteresis": 3, "growth_interval": 2},
            [1, 1, 0, 1, 1, 0, 0, 1, 1, 1],
            [64.0, 64.0, 64.0, 32.0, 16.0, 16.0, 32.0, 32.0, 32.0, 16.0],
        ),
        (  # DeepSpeed's other rule: from the second overflow in a row on
            {"init_scale": 64.0, "hysteresis": 2, "consecutive_hysteresis": True},
            [1, 0, 1, 0, 1, 1, 1, 0, 1],
            [64.0, 64.0, 64.0, 64.0, 64.0, 32.0, 16.0, 16.0, 16.0],
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bounds_of_the_scale(options, overflows, scales):
    scaler = GradScaler("cpu", **options)
    assert drive(scaler, overflows) == scales
    assert scaler.skipped_steps.item() == sum(overflows)
    assert scaler.last_step_skipped is bool(overflows[-1])

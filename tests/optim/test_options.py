"""Options that torch's optimizers lack or that groups may set apart: skips, averages, rounding, AMSGrad, zeroing."""

import pickle

import pytest
import torch

import amp_kernels.optim as akopt
from amp_kernels.amp import GradScaler

from .optimizers import (
    EACH,
    ELEMENTWISE,
    bf16,
    checkpoint,
    copies,
    distance,
    f16,
    f32,
    fill,
    make,
    params_of,
    reference,
    run,
    same,
    snapshot,
    weights,
)

HALVES = pytest.mark.parametrize("dtype", [f16, bf16])

# ---- skips ----


@EACH
@pytest.mark.parametrize("dtype", [f32, bf16, f16])
@pytest.mark.parametrize("mode", ["fp32", "split", "none"])
def test_a_skipped_step_changes_no_bit(name, dtype, mode):
    params = weights(dtype)
    options = {"master_weights": mode, "shadow_dtype": f16, "ema_decay": 0.9}
    optimizer = make(name, params, skip_nonfinite=True, **options)
    run(optimizer, 3)
    before = snapshot(optimizer)
    for bad in params[:2]:  # of Muon's groups one of each algorithm
        fill(params, 1.0)
        bad.grad.view(-1)[-1] = torch.inf
        optimizer.step()
        assert same(before, snapshot(optimizer))
    run(optimizer, 1)
    assert distance(params, before[1]) > 0


@EACH
def test_without_the_option_no_step_is_skipped(name):
    params = weights()
    optimizer = make(name, params)
    fill(params, 1.0)
    params[1].grad[2, 3] = torch.nan
    optimizer.step()
    assert not params[1].isfinite().all() or name == "Lion"  # the sign of NaN moves nothing
    assert distance(params[:1], weights()[:1]) > 0


# ---- averages ----


def test_average_without_one_in_the_checkpoint_starts_at_the_weight():
    for dtype in (f32, bf16):
        for mode in ("fp32", "split", "none"):
            first = make("AdamW", weights(dtype), master_weights=mode)
            run(first, 3)
            second = make("AdamW", copies(params_of(first)), master_weights=mode, ema_decay=0.5)
            second.load_state_dict(checkpoint(first))
            for p, values in zip(params_of(second), second.state_dict()["state"].values(), strict=True):
                assert torch.equal(values["ema"], values.get("master", p.detach().float()))
            third = make("AdamW", copies(params_of(second)), master_weights="none", ema_decay=0.5)
            third.load_state_dict(checkpoint(first))  # whose masters it does not take over
            for p in params_of(third):
                assert torch.equal(third.state[p]["ema"], p.detach().float())


@ELEMENTWISE
def test_decay_of_groups_and_schedulers(name):
    """A group may keep none; a decay that changes counts from the next step on; switched on late, the average starts
    at the weight, and the other state stays."""
    a, b = weights(), weights(seed=1)
    optimizer = make(name, [{"params": a, "ema_decay": None}, {"params": b}], ema_decay=0.5)
    twins = weights()
    plain = make(name, [*twins, *weights(seed=1)])
    run(optimizer, 2)
    run(plain, 2)
    assert "ema" not in optimizer.state.get(a[0], {})
    assert "ema" in optimizer.state[b[0]]
    optimizer.param_groups[0]["ema_decay"] = 0.0
    optimizer.param_groups[1]["ema_decay"] = None
    kept = optimizer.state[b[0]]["ema"].clone()
    start = a[0].detach().clone()
    run(optimizer, 1, seed=2)
    run(plain, 1, seed=2)
    for p in a:
        torch.testing.assert_close(optimizer.state[p]["ema"], p.detach())  # decay 0: the weight itself
    optimizer.load_state_dict(checkpoint(optimizer))
    assert torch.equal(optimizer.state[b[0]]["ema"], kept)
    assert all(torch.equal(p, q) for p, q in zip(a, twins, strict=True))
    optimizer.param_groups[0]["ema_decay"] = 0.5
    last = a[0].detach().clone()
    assert not torch.equal(start, last)
    run(optimizer, 1, seed=3)
    torch.testing.assert_close(optimizer.state[a[0]]["ema"], (last + a[0].detach()) / 2)


def test_torch_loads_a_checkpoint_with_all_of_it():
    ours = make("AdamW", weights(), ema_decay=0.5, amsgrad=True, master_weights="none")
    run(ours, 3)
    theirs = reference("AdamW", copies(params_of(ours)), amsgrad=True)
    theirs.load_state_dict(checkpoint(ours))
    again = make("AdamW", copies(params_of(ours)), ema_decay=0.25, amsgrad=True)
    again.load_state_dict(checkpoint(theirs))
    assert again.param_groups[0]["ema_decay"] == 0.5
    assert torch.equal(again.state[params_of(again)[0]]["ema"], ours.state_dict()["state"][0]["ema"])
    for p, q in zip(run(ours, 3), run(theirs, 3), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ---- AMSGrad ----


def test_amsgrad_switched_on_and_off():
    """On: the maximum starts from the next second moment. Off: it is kept, not used and not changed."""
    params = weights()
    optimizer, plain = make("AdamW", params), make("AdamW", weights())
    run(optimizer, 2)
    run(plain, 2)
    optimizer.param_groups[0]["amsgrad"] = True
    run(optimizer, 1, seed=2)
    run(plain, 1, seed=2)
    values = optimizer.state[params[0]]
    assert torch.equal(values["max_exp_avg_sq"], values["exp_avg_sq"])
    assert values["step"].item() == 3
    optimizer.param_groups[0]["amsgrad"] = False
    kept = values["max_exp_avg_sq"].clone()
    run(optimizer, 1, seed=3)
    run(plain, 1, seed=3)
    optimizer.load_state_dict(checkpoint(optimizer))
    assert torch.equal(optimizer.state[params[0]]["max_exp_avg_sq"], kept)
    assert all(torch.equal(p, q) for p, q in zip(params, params_of(plain), strict=True))


# ---- no masters ----


@EACH
@HALVES
def test_none_rne_is_the_float32_step_rounded_to_nearest(name, dtype):
    params = weights(dtype)
    optimizer = make(name, params, master_weights="none_rne")
    for step in range(5):
        twins = copies(params, f32)
        full = make(name, twins)
        if step:
            full.load_state_dict(checkpoint(optimizer))
        run(optimizer, 1, seed=step)
        for q, p in zip(twins, params, strict=True):
            q.grad = p.grad.float()
        full.step()
        assert all(torch.equal(p, q.to(dtype)) for p, q in zip(params, twins, strict=True))
    assert all("master" not in values for values in optimizer.state.values())


@EACH
@HALVES
def test_bits_follow_the_seed_and_are_in_the_state_dict(name, dtype):
    """The same seed gives the same run, another one another run; a resumed run takes the seed of the checkpoint and
    rounds on as the first would have, also where torch's optimizer counts no steps."""
    first, same_seed, other = (make(name, weights(dtype), master_weights="none", seed=s) for s in (5, 5, 6))
    params = [run(optimizer, 4) for optimizer in (first, same_seed, other)]
    assert all(torch.equal(p, q) for p, q in zip(*params[:2], strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(params[0], params[2], strict=True))
    resumed = make(name, copies(params[0]), master_weights="none")
    resumed.load_state_dict(checkpoint(first))
    assert resumed.seed == resumed.param_groups[0]["seed"] == 5
    unpickled = pickle.loads(pickle.dumps(first))
    wanted = run(first, 4, seed=2)
    for optimizer in (resumed, unpickled):
        assert all(torch.equal(p, q) for p, q in zip(run(optimizer, 4, seed=2), wanted, strict=True))


def test_a_seed_that_torch_does_not_know_stays():
    theirs = reference("AdamW", weights(bf16))
    run(theirs, 1)
    ours = make("AdamW", weights(bf16), master_weights="none", seed=9)
    ours.load_state_dict(checkpoint(theirs))
    assert ours.seed == ours.param_groups[0]["seed"] == 9
    with pytest.raises(ValueError, match=r"groups have the seeds \[3, 9\]"):
        ours.add_param_group({"params": weights(), "seed": 3})
    assert len(ours.param_groups) == 1


def test_numbers_of_parameters_are_those_of_the_state_dict():
    """Its number is part of a parameter's key: gradients that are missing must not shift the others' numbers."""
    results = []
    for active in ((0, 1, 2), (1, 2), (2,)):
        params = [torch.nn.Parameter(torch.ones(64, dtype=bf16)) for _ in range(3)]
        optimizer = akopt.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=2.0**-9, master_weights="none")
        fill([params[i] for i in active], 1.0)
        optimizer.step()
        results.append(params[2].detach())
        assert not torch.equal(params[2], params[1]) or 1 not in active
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_momentum_switched_on_starts_its_buffer_anew():
    """Although the steps were counted for the sake of the bits: torch's first buffer is the gradient, undamped."""
    p = torch.nn.Parameter(torch.ones(8, dtype=bf16))
    optimizer = akopt.SGD([p], lr=0.5, dampening=0.5, master_weights="none")
    fill([p], 1.0)
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 1
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()
    assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.ones(8))


# ---- unscaling gradients ----


@EACH
@pytest.mark.parametrize("value", [8.0, torch.inf])
@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
def test_unscaled_and_unclipped_gradients_are_left_behind(name, value, scaler_class):
    """And the step is that of a twin without the option, with the same skip, norm and clip factor."""
    found = {}
    for unscale_grads in (False, True):
        params = [*weights(), *weights(bf16)]
        optimizer = make(name, params, unscale_grads=unscale_grads, max_grad_norm=0.5)
        scaler = scaler_class("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        fill(params, 8.0)
        params[1].grad[2, 3] = value
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if value == torch.inf else 4.0)
        assert params[0].grad.eq(2.0 if unscale_grads else 8.0).all()
        assert params[-1].grad.eq(2.0 if unscale_grads else 8.0).all()
        assert params[1].grad[2, 3] == (value if value == torch.inf else 2.0 if unscale_grads else 8.0)
        found[unscale_grads] = copies(params)
    assert distance(found[False], found[True]) == 0


def test_unscaling_once():
    """Not after ``unscale_``, not without a scale, not of float16; and the option is read by torch's scaler after a pickle too."""
    params = weights()
    optimizer, scaler = make("AdamW", params, unscale_grads=True), GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    fill(params, 8.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert params[0].grad.eq(2.0).all()
    optimizer.step()
    GradScaler("cpu", enabled=False).step(optimizer)
    assert params[0].grad.eq(2.0).all()
    assert not pickle.loads(pickle.dumps(optimizer))._step_supports_amp_scaling
    optimizer = make("AdamW", halves := weights(f16), unscale_grads=True)
    fill(halves, 8.0)
    scaler.update()
    before = copies(halves)
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.step(optimizer)
    assert distance(halves, before) == 0
    assert halves[0].grad.eq(8.0).all()


# ---- zeroing gradients ----


@EACH
@pytest.mark.parametrize("value", [1.0, torch.inf])
def test_zero_grads(name, value):
    """In place, after a step that was taken and after one that was skipped; parameters without a gradient get none."""
    for scaler in (None, GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", init_scale=4.0)):
        params = [*weights(), *weights(bf16)]
        optimizer = make(name, params, zero_grads=True, skip_nonfinite=True, max_grad_norm=1.0)
        fill(params[1:], value)
        grads, before = [p.grad for p in params[1:]], copies(params)
        if scaler is None:
            optimizer.step()
        else:
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (2.0 if value == torch.inf else 4.0)
        assert params[0].grad is None
        for p, grad in zip(params[1:], grads, strict=True):
            assert p.grad is grad
            assert not grad.any()
        assert (distance(params, before) > 0) == (value == 1.0)


def test_zero_grads_keeps_what_the_scaler_reports():
    params = weights()
    optimizer, scaler = make("AdamW", params, zero_grads=True), GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    fill(params, 8.0)
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    count = sum(p.numel() for p in params)
    torch.testing.assert_close(scaler.last_grad_norm, torch.tensor(2.0 * count**0.5))
    params[0].grad.fill_(torch.nan)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step_skipped
    assert not params[0].grad.any()


def test_zero_grads_of_other_strides_reach_the_gradient_itself():
    p = torch.nn.Parameter(torch.ones(6, 8))
    optimizer = akopt.SGD([p], lr=0.5, zero_grads=True)
    p.grad = torch.ones(8, 6).t()  # the step works on a copy
    optimizer.step()
    assert not p.grad.any()
    p.grad = torch.ones(8).expand(6, 8)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"strides \(0, 1\).* overlaps itself; zero_grads=True cannot"):
        optimizer.step()
    assert torch.equal(p, before)
    optimizer = make("AdamW", [q := torch.nn.Parameter(torch.ones(3))])  # without it gradients stay
    fill([q], 1.0)
    optimizer.step()
    assert q.grad.all()

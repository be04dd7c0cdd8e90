"""Gradient release: the bits of the plain step in every order of events, and what is refused, before anything is written."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_kernels as ak
from amp_kernels._dispatch import nodes

from .optimizers import NAMES, bf16, f16
from .released import (
    BETWEEN,
    DEPTH,
    HOST,
    LAYOUTS,
    SIZE,
    assert_same,
    batch,
    fail_behind,
    make,
    small_buckets,  # noqa: F401  (a fixture)
    snapshot,
    step_under,
    train,
)

PLAIN = False, {}
#: If gradients are released and the state is in host memory.
WAYS = {"released": (True, {}), "host state": (False, HOST), "released, host state": (True, HOST)}

# ---- the bits of the plain step ----


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_bits(name, layout, way):
    dtype, options = LAYOUTS[layout]
    found = []
    for released, host in (PLAIN, WAYS[way]):
        own = make(name, dtype, released, **options, **host)
        train(*own, range(4), micros=2)
        found.append(snapshot(*own[:2]))
    assert_same(*found)


@pytest.mark.parametrize("walks", ["nodes", "python"])
@pytest.mark.parametrize("first", [False, True])
def test_bits_across_checkpoints_on_and_off(first, walks, monkeypatch):
    if walks == "python":
        monkeypatch.setattr(nodes, "step_walk", lambda: None)
    dtype, options = LAYOUTS["bf16 split24 8bit"]
    plain = make("AdamW", dtype, **options)
    train(*plain, range(6))
    model, optimizer, handle = make("AdamW", dtype, first, **options)
    train(model, optimizer, handle, range(3))
    weights, state = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    model, optimizer, handle = make("AdamW", dtype, not first, **options)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(model, optimizer, handle, range(3, 5))
    if handle is not None:
        handle.remove()
    train(model, optimizer, None, range(5, 6))  # the same optimizer, off
    assert_same(snapshot(model, optimizer), snapshot(*plain[:2]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", BETWEEN)
def test_bits_after_changes_between_steps(change, way):
    dtype, options = LAYOUTS["bf16 split24 8bit"]
    found = []
    for released, host in (PLAIN, WAYS[way]):
        model, optimizer, _ = make("AdamW", dtype, released, **options, **host)
        for step in range(7):
            if step == 3:
                BETWEEN[change](model, optimizer)
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
    assert_same(*found)


def test_step_takes_what_was_not_released_and_runs_its_hooks_once():
    found = []
    for released in (False, True):
        model, optimizer, handle = make("SGD", bf16, released, master_weights="split")
        calls = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("post"))
        with handle.hold() if released else contextlib.nullcontext():
            model.unused(batch(0).bfloat16()).square().mean().backward()  # held, and not in the next backward
        model(batch(1)).backward()
        model.frozen.weight.grad = torch.ones_like(model.frozen.weight)  # by hand
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[1]["params"].pop(0)  # no longer the optimizer's: its gradient stays
        model(batch(2)).backward()
        assert model.layers[1].weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        assert calls == ["pre", "post"] * 2
        found.append([model.state_dict(), *(dict(optimizer.state.get(p, {})) for p in model.parameters())])
    assert_same(*found)


def test_held_and_released_steps_in_turn_keep_what_a_weight_of_zero_lacks():
    """A split master below the least float16 is all remainder, and a step that took its own writes for those of others would drop it."""
    found = []
    for released in (False, True):
        weight = nn.Parameter(torch.zeros(8, dtype=f16))
        optimizer = ak.optim.SGD([weight], lr=2.0**-30, master_weights="split")
        handle = ak.optim.release_gradients(optimizer) if released else None
        for held in [True] * 3 + [False] * 3 + [True, False] * 2:
            with handle.hold() if released and held else contextlib.nullcontext():
                weight.sum().backward()
            optimizer.step()  # which ends the step also without zero_grad()
            weight.grad = None
        found.append([weight.data, optimizer.state_dict()["state"]])
    assert_same(*found)
    assert found[0][1][0]["master"].eq(-10 * 2.0**-30).all()


def test_a_scheduler_acts_as_on_a_plain_step(recwarn):
    found = []
    for released in (False, True):
        model, optimizer, _ = make("SGD", released=released)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
        for step in range(4):
            model(batch(step)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
    assert_same(*found)
    assert not recwarn.list


# ---- memory ----


@pytest.mark.parametrize(
    ("released", "options"), [(False, {}), (True, {}), (True, HOST), (True, {**HOST, "max_grad_norm": 1.0})]
)
def test_at_most_one_gradient_is_alive(released, options):
    model, kept, most = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(6)]), [], 0

    def count(param):
        nonlocal most
        kept.append(param.grad.untyped_storage()._weak_ref())
        most = max(most, sum(not torch.UntypedStorage._expired(ref) for ref in kept))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)  # before the handle's
    optimizer = ak.optim.AdamW(model.parameters(), **options)
    if released:
        ak.optim.release_gradients(optimizer)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        if released:
            assert all(map(torch.UntypedStorage._expired, kept))
        optimizer.step()
        optimizer.zero_grad()
    assert most == (1 if released else 6)


def test_a_dropped_optimizer_frees_its_state_and_leaves_hooks_that_do_nothing():
    model, optimizer, handle = make("AdamW", released=True)
    train(model, optimizer, handle, range(3))
    buffers = [weakref.ref(block) for block in optimizer._store.blocks]
    before = copy.deepcopy(model.state_dict())
    del optimizer
    gc.collect()
    assert [ref() for ref in buffers] == [None] * len(buffers)
    model(batch(0)).backward()
    assert model.layers[1].weight.grad is not None
    assert_same(model.state_dict(), before)
    handle.remove()


def test_a_copy_of_the_optimizer_is_a_plain_one():
    model, optimizer, handle = make("AdamW", released=True)
    train(model, optimizer, handle, range(2))
    model, optimizer = copy.deepcopy((model, optimizer))
    model(batch(0)).backward()
    assert model.layers[1].weight.grad is not None


@pytest.mark.skipif(nodes.step_walk() is None, reason="the module _nodes was not built for this torch")
def test_the_third_release_of_a_parameter_is_one_cached_launch(monkeypatch):
    model, optimizer, handle = make("AdamW", bf16, released=True, master_weights="split24", state_dtype="8bit")
    train(model, optimizer, handle, range(2))
    monkeypatch.setattr(optimizer._plan, "_plan_alone", None)
    train(model, optimizer, handle, range(2, 4))


# ---- failures ----


@pytest.mark.parametrize("layer", range(DEPTH - 1))  # the last has the weight of the first, whose gradient comes last
def test_a_failed_backward_leaves_what_came_before_it(layer):
    found = []
    for released in (False, True):
        model, optimizer, handle = make("SGD", released=released)
        train(model, optimizer, handle, range(2))
        hook = fail_behind(model, layer)
        with pytest.raises(ArithmeticError):
            model(batch(2)).backward()
        hook.remove()
        if not released and layer < DEPTH - 2:
            optimizer.step()  # of the gradients that came
        weights = snapshot(model, optimizer)
        if released and layer < DEPTH - 2:
            for loss in (model(batch(3)), model.unused(batch(3)).mean()):  # of parameters that are ahead, and of others
                with pytest.raises(RuntimeError, match=r"SGD: the backward before failed.*optimizer\.zero_grad\(\)"):
                    loss.backward()
            assert_same(snapshot(model, optimizer), weights)
        optimizer.zero_grad()
        train(model, optimizer, handle, range(3, 5))
        found += [weights, snapshot(model, optimizer)]
    assert_same(found[:2], found[2:])


def test_a_second_gradient_is_refused():
    model, optimizer, _ = make("SGD", released=True)
    model(batch(0)).backward()
    before = snapshot(model, optimizer)
    for hold in (contextlib.nullcontext, optimizer._released.hold):
        with (
            hold(),
            pytest.raises(RuntimeError, match=r"SGD: layers\.2\.weight, of shape \[64, 128\],.*hold.*use_reentrant"),
        ):
            model(batch(1)).backward()
    with pytest.raises(RuntimeError, match=r"layers\.2\.weight.*second gradient before step"):
        optimizer.step()
    assert_same(snapshot(model, optimizer), before)
    optimizer.zero_grad()
    train(model, optimizer, optimizer._released, [1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers(reentrant):
    found = []
    for released in (False, True):
        model, optimizer, _ = make("AdamW", released=released)
        for step in range(3):
            x = batch(step).requires_grad_()
            for layer in model.layers[:-1]:
                x = checkpoint(layer, x, use_reentrant=reentrant).tanh()
            model.unused(x).square().mean().backward()  # one gradient before the inner backwards
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
    assert_same(*found)
    x = batch(3).requires_grad_()
    x = checkpoint(model.layers[0], checkpoint(model.layers[0], x, use_reentrant=reentrant), use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="use_reentrant") if reentrant else contextlib.nullcontext():
        x.square().mean().backward()


# ---- scales ----


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_scaled_loss_is_refused_before_the_first_update(reentrant):
    for losses in (lambda loss: loss, lambda loss: [loss, loss]):
        model, optimizer, handle = make("SGD", released=True)
        before, x = snapshot(model, optimizer), batch(0).requires_grad_()
        loss = checkpoint(model, x, use_reentrant=True) if reentrant else model(x)
        scaled = ak.GradScaler("cpu").scale(losses(loss))
        with pytest.raises(RuntimeError, match="SGD: the loss was scaled by GradScaler"):
            torch.autograd.backward(scaled)
        assert_same(snapshot(model, optimizer), before)
        optimizer.zero_grad()
        train(model, optimizer, handle, range(2))  # and nothing is left of it


def test_a_scaler_that_comes_after_the_updates_is_refused():
    model, optimizer, _ = make("SGD", released=True)
    for scaler, arguments in (
        (torch.amp.GradScaler("cpu"), {}),
        (ak.GradScaler("cpu", enabled=False), {"max_norm": 1.0}),
    ):
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"SGD: a scaler, max_norm or an option .* after 3 parameters"):
            step_under(scaler, optimizer, model(batch(0)), **arguments)


@pytest.mark.parametrize("scaler", [ak.GradScaler, torch.amp.GradScaler])
def test_a_scaler_steps_gradients_that_were_all_held(scaler):
    found = []
    for released in (False, True):
        model, optimizer, handle = make("SGD", bf16, released, master_weights="split")
        own = scaler("cpu", init_scale=1024.0)
        for step in range(3):
            with handle.hold() if released else contextlib.nullcontext():
                step_under(own, optimizer, model(batch(step)))
            optimizer.zero_grad()
        step_under(scaler("cpu", enabled=False), optimizer, model(batch(3)))
        found.append(snapshot(model, optimizer))
    assert_same(*found)


# ---- refusals ----

REFUSED = {"independent_groups": True, "max_grad_norm": 0.0, "skip_nonfinite": True, "unscale_grads": True}


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_need_all_gradients_are_refused(option):
    match = f"SGD: {option} is {REFUSED[option]}, which needs all gradients.*accepted"
    with pytest.raises(ValueError, match=match):
        make("SGD", released=True, **{option: REFUSED[option]})
    model, optimizer, handle = make("SGD", released=True)
    setattr(optimizer, option, REFUSED[option])
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=match):
        model(batch(0)).backward()
    assert_same(snapshot(model, optimizer), before)
    setattr(optimizer, option, None)
    optimizer.zero_grad()
    train(model, optimizer, handle, range(2))


def test_an_option_that_comes_between_backward_and_step_is_refused():
    model, optimizer, _ = make("SGD", released=True)
    model(batch(0)).backward()
    optimizer.max_grad_norm = 1.0
    with pytest.raises(RuntimeError, match="SGD: a scaler, max_norm or an option"):
        optimizer.step()


def test_other_refusals():
    model, optimizer, handle = make("SGD", released=True)
    before = snapshot(model, optimizer)
    with pytest.raises(
        ValueError, match=r"release_gradients: SGD releases its gradients already; accepted: remove\(\)"
    ):
        ak.optim.release_gradients(optimizer)
    with pytest.raises(TypeError, match=r"release_gradients: optimizer has type torch\.optim\.sgd\.SGD; accepted"):
        ak.optim.release_gradients(torch.optim.SGD(model.parameters()))
    with pytest.raises(RuntimeError, match=r"SGD: a closure would run backward within step\(\).*accepted: None"):
        optimizer.step(lambda: pytest.fail("was called"))
    with pytest.raises(ValueError, match="graph_step: the optimizer releases its gradients"):
        ak.graph_step(lambda x: model(x), model=model, optimizer=optimizer)(batch(0))
    weight = model.layers[1].weight
    weight.main_grad = torch.zeros(weight.shape)
    with pytest.raises(ValueError, match=r"SGD: layers\.1\.weight has a main_grad.*accepted"):
        model(batch(0)).backward()
    handle.remove()
    with pytest.raises(ValueError, match=r"SGD: layers\.1\.weight has a main_grad"):
        ak.optim.release_gradients(optimizer)
    assert_same(snapshot(model, optimizer), before)
    del weight.main_grad
    optimizer.zero_grad()
    with ak.optim.release_gradients(optimizer):
        model(batch(0)).backward()
        assert weight.grad is None
        optimizer.step()
    model(batch(1)).backward()
    assert weight.grad is not None

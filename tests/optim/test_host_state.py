"""Optimizer state in host memory, with and without release (test_release.py has the bits of whole runs)."""

import contextlib
import copy
import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import amp_kernels as ak
from amp_kernels.optim import _gradients, _host, _state
from amp_kernels.optim._collect import Active

from .optimizers import NAMES, bf16, f16
from .released import (
    HOST,
    LAYOUTS,
    assert_close,
    assert_same,
    batch,
    fail_behind,
    make,
    small_buckets,  # noqa: F401  (a fixture)
    snapshot,
    step_under,
    train,
)

KINDS = pytest.mark.parametrize("released", [False, True])
SPLIT24 = LAYOUTS["bf16 split24 8bit"]


# ---- the bits of the plain step: state_device ----


def test_slots_hold_copies_of_gradients_and_weights():
    """On a machine without GPU the parameters' own memory stands for the card's."""
    model, optimizer, _ = make("AdamW", *SPLIT24[:1], **SPLIT24[1], **HOST)
    train(model, optimizer, None, range(2))
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    for place in optimizer._store.places.values():
        assert place.piece.untyped_storage().data_ptr() not in own
        assert torch.equal(place.piece, place.param)
    assert all(state[name].device.type == "cpu" for state in optimizer.state.values() for name in state)


@KINDS
@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 0.01}, {"skip_nonfinite": True}, {"max_grad_norm": 0.01, "zero_grads": True}]
)
@pytest.mark.parametrize("name", NAMES)
def test_one_decision_for_all_gradients(name, options, released):
    dtype, layout = LAYOUTS["f16 split"]
    plain, host = make(name, dtype, **layout, **options), make(name, dtype, released, **layout, **options, **HOST)
    for own in (plain, host):
        train(*own, range(4), micros=2)
    (assert_close if released else assert_same)(snapshot(*host[:2]), snapshot(*plain[:2]))


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_measured_before_they_leave_and_slots_made_before_the_first(scaled, monkeypatch):
    model, optimizer, _ = make("SGD", released=True, max_grad_norm=0.01, **HOST)
    assert list(optimizer._plan.host._lines) == [torch.device("cpu")]
    loss, before = model(batch(0)), snapshot(model, optimizer)[0]
    scaler = ak.GradScaler("cpu", enabled=scaled)
    scaler.scale(loss).backward()
    monkeypatch.setattr(_gradients, "check_and_norm", None)
    scaler.step(optimizer)
    assert not torch.equal(before["layers.1.weight"], model.layers[1].weight)


def test_a_measurement_is_of_one_step():
    found = []
    for released in (False, True):
        model, optimizer, handle = make("SGD", released=released, max_grad_norm=0.01, **HOST)
        for step in range(2):  # the second one's gradients, larger, are held
            with handle.hold() if released and step == 1 else contextlib.nullcontext():
                (model(batch(step)) * 1000.0**step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
    assert_close(*found)


@pytest.mark.parametrize("way", ["state_dict", "file"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_go_both_ways(layout, way, tmp_path):
    dtype, options = LAYOUTS[layout]
    plain = make("AdamW", dtype, **options)
    train(*plain[:2], None, range(6))
    model, optimizer, _ = make("AdamW", dtype, **options)
    for steps, kind in ((range(2), {}), (range(2, 4), HOST), (range(4, 6), {})):
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        ak.checkpoint.save(tmp_path / "1.pt", model=model, optimizer=optimizer)
        model, optimizer, _ = make("AdamW", dtype, **options, **kind)
        if way == "file":
            ak.checkpoint.load(tmp_path / "1.pt", model=model, optimizer=optimizer)
        else:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        assert_same(
            snapshot(model, optimizer)[:2],
            [saved[0], [saved[1]["state"].get(i) for i in range(len(optimizer._params()))]],
        )
        train(model, optimizer, None, steps)
        model, optimizer = copy.deepcopy((model, optimizer))
    assert_same(snapshot(model, optimizer), snapshot(*plain[:2]))


def test_exports_and_writes_see_weights_and_masters():
    dtype, options = LAYOUTS["bf16 master"]
    found = []
    for kind in ({}, HOST):
        model, optimizer, _ = make("AdamW", dtype, **options, ema_decay=0.5, **kind)
        train(model, optimizer, None, range(2))
        weight = model.layers[1].weight
        optimizer.state[weight]["master"].mul_(1.01)
        own = [ak.fp32_state_dict(model, optimizer), ak.fp32_state_dict(model, optimizer, ema=True)]
        weight.data.fill_(0.5)
        optimizer.reload_model_params()
        train(model, optimizer, None, [2])
        if kind:
            optimizer.offload_state()
            optimizer.reload_state()
        train(model, optimizer, None, [3])
        found.append([*own, snapshot(model, optimizer)])
    assert_same(*found)


# ---- steps that are not taken ----


@KINDS
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_skipped_step_changes_nothing(where, released):
    """A NaN in one gradient alone: the first, a middle one or the last of backward."""
    model, optimizer, handle = make("SGD", bf16, released, master_weights="split", skip_nonfinite=True, **HOST)
    plain = make("SGD", bf16, master_weights="split")
    params = [param for param in model.parameters() if param.requires_grad and param is not model.unused.weight]
    order = [model.layers[2].weight, model.layers[1].weight, model.layers[0].weight]  # in which they come
    assert {*map(id, order)} == {*map(id, params)}
    for own in ((model, optimizer, handle), plain):
        train(*own, range(2))
    before = snapshot(model, optimizer)
    hook = order[["first", "middle", "last"].index(where)].register_hook(
        lambda grad: grad.index_fill(0, torch.tensor([1]), torch.nan)
    )
    model(batch(2)).backward()
    hook.remove()
    optimizer.step()
    assert_same(snapshot(model, optimizer), before)
    optimizer.zero_grad()
    for own in ((model, optimizer, handle), plain):
        train(*own, range(3, 5))
    assert_same(snapshot(model, optimizer), snapshot(*plain[:2]))


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("layer", range(3))
def test_a_failed_backward(layer, decides):
    """It changes nothing if there is a decision to wait for; else as with state on the device."""
    options = {"max_grad_norm": 0.1} if decides else {}
    model, optimizer, handle = make("SGD", released=True, **options, **HOST)
    others = make("SGD", released=not decides, **options)
    for own in ((model, optimizer, handle), others):
        train(*own, range(2))
    before = snapshot(model, optimizer)
    for failing, of_failing in ((model, optimizer), others[:2]):
        hook = fail_behind(failing, layer)
        with pytest.raises(ArithmeticError):
            failing(batch(2)).backward()
        hook.remove()
        if layer < 2 and failing is model:  # a gradient has come
            optimizer.state_dict()  # waits for updates that are under way
            for call in (optimizer.step, model(batch(3)).backward)[not decides :]:
                with pytest.raises(RuntimeError, match=r"SGD: the backward before failed.*optimizer\.zero_grad\(\)"):
                    call()
        of_failing.zero_grad()
    if decides:
        assert_same(snapshot(model, optimizer), before)
    assert_same(snapshot(model, optimizer), snapshot(*others[:2]))
    for own in ((model, optimizer, handle), others):
        train(*own, range(3, 5))
    assert_same(snapshot(model, optimizer), snapshot(*others[:2]))


@pytest.mark.parametrize("then", ["zero_grad", "state_dict", "offload_state", "reload_model_params"])
def test_what_is_loaded_after_a_failed_backward_stays(then, monkeypatch):
    up = _host.Lanes.up  # takes so long that weights are on their way at the error
    monkeypatch.setattr(_host.Lanes, "up", lambda lanes, pairs: [time.sleep(0.02), up(lanes, pairs)])
    model, optimizer, handle = make("SGD", released=True, **HOST)
    train(model, optimizer, handle, range(2))
    saved, before = copy.deepcopy([model.state_dict(), optimizer.state_dict()]), snapshot(model, optimizer)
    for loads in (False, True):
        hook = fail_behind(model, 0)
        with pytest.raises(ArithmeticError):
            model(batch(2)).backward()
        hook.remove()
        model.load_state_dict(saved[0])
        if loads:
            optimizer.load_state_dict(saved[1])
        getattr(optimizer, then)()
        optimizer.zero_grad()
        assert_same(model.state_dict(), saved[0])
    assert_same(snapshot(model, optimizer), before)
    train(model, optimizer, handle, range(3, 5))


def test_an_interrupted_step_ends_with_what_it_took(monkeypatch):
    model, optimizer, _ = make("SGD", **HOST)
    plain = make("SGD")
    for own in ((model, optimizer), plain[:2]):
        train(*own, None, range(2))
        own[0](batch(2)).backward()
    taken, add = [], optimizer._plan.host.add

    def stumble(group, place, grad):
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append([param is place.param for param in model.parameters()].index(True))
        add(group, place, grad)

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._plan.host, "add", stumble)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    for i, param in enumerate(plain[0].parameters()):
        param.grad = param.grad if i in taken else None
    plain[1].step()
    for own in ((model, optimizer), plain[:2]):
        own[1].zero_grad()
        train(*own, None, range(3, 5))
    assert_same(snapshot(model, optimizer), snapshot(*plain[:2]))


def test_gradients_in_host_memory_stay_there_and_those_of_several_devices_are_apart(monkeypatch):
    """A parameter of no device stands for one on a second card."""
    model, optimizer, _ = make("SGD", **HOST)
    train(model, optimizer, None, range(2))
    plan, (first, *others) = optimizer._plan, optimizer._store.places.values()
    elsewhere = property(lambda it: it.param.detach().to("meta") if it is first else it.param)
    monkeypatch.setattr(_state.Place, "own", elsewhere)
    active = Active(groups=[0] * (1 + len(others)), places=[first, *others])
    batches = plan._make_batches(active, {id(param): i for i, param in enumerate(optimizer._params())})
    assert [(len(it.params), it.device.type) for it in batches] == [(1, "cpu"), (len(others), "cpu")]
    monkeypatch.setattr(_state.Place, "adopt_write", lambda _: None)
    grad = torch.ones_like(first.param)
    plan.host.add(0, first, grad)
    (bucket,) = plan.host._open.values()
    assert bucket.grads[0] is grad
    plan.host._open.clear()


@KINDS
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_scalers(released, max_norm):
    found = []
    for host in (False, True):
        model, optimizer, _ = make("SGD", f16, released and host, master_weights="split", **(HOST if host else {}))
        scaler = ak.GradScaler("cpu", init_scale=2.0**17, growth_interval=2)
        for step in range(6):  # the first ones overflow
            step_under(scaler, optimizer, model(batch(step)) * (2.0**9), max_norm=max_norm)
            optimizer.zero_grad()
        found.append([snapshot(model, optimizer), scaler.state_dict()])
        assert 0 < optimizer.state[model.layers[1].weight]["momentum_buffer"].abs().sum() < torch.inf
    assert_same(*found)


def test_a_scale_reaches_reentrant_checkpoints():
    found = []
    for host in (False, True):
        model, optimizer, _ = make("SGD", released=host, **(HOST if host else {}))
        scaler = ak.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            x = batch(step).requires_grad_()
            for layer in model.layers[:-1]:
                x = checkpoint(layer, x, use_reentrant=True).tanh()
            step_under(scaler, optimizer, x.square().mean())
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
    assert_same(*found)


def test_scaled_gradients_are_not_stepped_without_their_scale():
    model, optimizer, handle = make("SGD", f16, True, master_weights="split", **HOST)
    before, scaler = snapshot(model, optimizer), ak.GradScaler("cpu")
    scaler.scale(model(batch(0))).backward()
    with pytest.raises(RuntimeError, match=r"SGD: the released gradients carry the scale.*scaler\.step"):
        optimizer.step()
    optimizer.zero_grad()
    assert_same(snapshot(model, optimizer), before)
    train(model, optimizer, handle, range(2))


def test_kept_gradients_can_be_given_back_and_come_once():
    plain = make("SGD", max_grad_norm=0.01)
    model, optimizer, handle = make("SGD", released=True, max_grad_norm=0.01, **HOST)
    for own in (plain[0], model):
        own(batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"layers\.2\.weight.*second gradient before step"):
        model(batch(1)).backward()
    model.layers[2].weight.grad = None
    handle.remove()
    for own in (plain, (model, optimizer)):
        own[1].step()
    assert_same(snapshot(model, optimizer), snapshot(*plain[:2]))


# ---- refusals ----


def test_refusals():
    with pytest.raises(ValueError, match="AdamW: state_device is 'cuda'; accepted: None, 'cpu'"):
        make("AdamW", state_device="cuda")
    for option, value in (("independent_groups", True), ("spike_zscore", 6.0)):
        with pytest.raises(ValueError, match=f"AdamW: {option} is {value} and state_device is 'cpu'; accepted"):
            make("AdamW", **{option: value}, **HOST)
    optimizer = make("AdamW", **HOST)[1]
    with pytest.raises(ValueError, match=r"AdamW: spike_zscore is 6\.0 and state_device is 'cpu'"):
        optimizer.spike_zscore = 6.0
    for made, later in (("cpu", None), (None, "cpu")):
        with pytest.raises(
            ValueError, match=f"state_device is set to {later!r}, and the optimizer was made with {made!r}"
        ):
            make("AdamW", state_device=made)[1].state_device = later
    with pytest.raises(ValueError, match="SGD: unscale_grads is True, which needs all gradients"):
        make("SGD", released=True, unscale_grads=True, **HOST)
    model, optimizer, _ = make("SGD", **HOST)
    with pytest.raises(ValueError, match=r"graph_step: state_device of the optimizer is 'cpu'.*accepted: None"):
        ak.graph_step(lambda x: model(x), model=model, optimizer=optimizer)(batch(0))


# ---- the pipeline ----


def test_three_buckets_are_under_way_at_once_and_each_in_order():
    """Each stage works while the others do: no stage ends before the other two have begun theirs."""
    events, pipeline = [], _host.Pipeline(range(3), 1)
    meeting = threading.Barrier(3, timeout=60)  # broken if the stages come one after another

    def stage(name, bucket, meets):
        if meets:
            meeting.wait()
        events.append((name, bucket))

    count = 6
    for bucket in range(count):
        slot = pipeline.take()
        # The third bucket leaves the device while the second is updated and the first returns.
        stage("down", bucket, bucket >= 2)
        pipeline.put(
            slot,
            lambda _, b=bucket: stage("update", b, 1 <= b < count - 1),
            lambda _, b=bucket: stage("back", b, b < count - 2),
        )
    pipeline.drain()
    for name in ("down", "update", "back"):
        assert [b for n, b in events if n == name] == list(range(count))
    for bucket in range(count):
        assert [n for n, b in events if b == bucket] == ["down", "update", "back"]


def test_other_threads_keep_their_number_of_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pipeline, found = _host.Pipeline(range(1), 2), []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        pipeline.put(pipeline.take(), lambda _: found.append(torch.get_num_threads()), lambda _: None)
        pipeline.drain()
        assert [*found, torch.get_num_threads()] == [3, 2, 3]
    finally:
        torch.set_num_threads(before)


def test_an_error_of_a_bucket_reaches_the_step_and_frees_its_slot():
    pipeline, seen = _host.Pipeline(range(1), 1), []
    for bucket in range(3):
        fails = contextlib.nullcontext() if bucket != 1 else pytest.raises(ZeroDivisionError)
        pipeline.put(pipeline.take(), lambda _, b=bucket: 1 / (b - 1), lambda _, b=bucket: seen.append(b))
        with fails:
            pipeline.drain()
    assert seen == [0, 2]

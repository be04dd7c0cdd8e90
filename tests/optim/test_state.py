"""State: its memory, its creation, and users' edits of it."""

import copy
import gc
import sys

import pytest
import torch

import amp_kernels as ak
import amp_kernels.optim as akopt
from amp_kernels.ops import _shadows
from amp_kernels.ops._shadows import fresh_shadow
from amp_kernels.optim import _base

from ..helpers.generators import normal
from .optimizers import EACH, ELEMENTWISE_STATEFUL, STATEFUL, bf16, copies, f16, f32, fill, make, reference


def param(*shape, dtype=f32, seed=0):
    return torch.nn.Parameter(normal(*shape, dtype=dtype, seed=seed))


def step(optimizer, params, value=1.0):
    fill(params, value)
    optimizer.step()


def pair(name, *params, lr=0.1, **options):
    """Ours and the reference, each over copies of its own."""
    lists = copies(params), copies(params)
    return list(
        zip((make(name, lists[0], lr, **options), reference(name, lists[1], lr, **options)), lists, strict=True)
    )


def assert_agree(both, **tolerance):
    for p, q in zip(both[0][1], both[1][1], strict=True):
        torch.testing.assert_close(p, q, check_stride=False, **(tolerance or {"rtol": 1e-6, "atol": 1e-6}))


@STATEFUL
def test_state_keys_dtypes_and_shapes_are_the_references(name, options):
    both = pair(name, param(3, 4), **options)
    for optimizer, params in both:
        step(optimizer, params)
    ours, theirs = (optimizer.state[params[0]] for optimizer, params in both)
    assert list(ours) == (["step"] if name == "LAMB" else []) + list(theirs)  # Apex counts for a group
    for key, value in theirs.items():
        assert (ours[key].shape, ours[key].dtype) == (value.shape, value.dtype)
    assert ours.get("step", 1) == 1
    plain = akopt.SGD([p := param(3)])
    step(plain, [p])
    assert not plain.state


def test_state_of_one_group_and_dtype_shares_flat_buffers():
    ps = [param(3, 4), param(7), param(2, dtype=bf16)]
    optimizer = akopt.AdamW(ps)
    step(optimizer, ps)
    address = [optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() for p in ps]
    assert address[0] == address[1] != address[2]
    assert all(optimizer.state[p]["exp_avg"].data_ptr() % 64 == address[i] % 64 for i, p in enumerate(ps))


def test_state_has_its_parameters_strides():
    p = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    optimizer = akopt.AdamW([p])
    step(optimizer, [p])
    assert optimizer.state[p]["exp_avg"].stride() == p.stride()


@ELEMENTWISE_STATEFUL
def test_state_is_lazy(name, options):
    """No state without a gradient; a parameter that joins later starts at step 1, not at the others' count."""
    options = {**options, "bias_correction": False} if name == "LAMB" else options  # Apex' count is the group's
    both = pair(name, *(param(5, seed=i) for i in range(3)), **options)
    assert not both[0][0].state
    for active in ([0], [0, 2], [2], [0, 1, 2], [1]):
        for optimizer, params in both:
            optimizer.zero_grad()
            for i in active:
                params[i].grad = torch.linspace(-1, 1, 5) * (i + 1)
            optimizer.step()
        with_state = [{i for i in range(3) if ps[i] in optimizer.state} for optimizer, ps in both]
        assert with_state[0] == with_state[1]
        assert_agree(both)
    if "step" in (state := both[0][0].state)[both[0][1][0]]:
        assert [state[p]["step"].item() for p in both[0][1]] == [3, 2, 3]


@STATEFUL
def test_no_gradient_at_all(name, options):
    p = param(3)
    optimizer = make(name, [p], max_grad_norm=1.0, skip_nonfinite=True, **options)
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)
    assert not optimizer.state


@ELEMENTWISE_STATEFUL
@pytest.mark.parametrize("how", ["clear", "replace", "delete", "own values"])
def test_a_user_may_replace_the_state(name, options, how):
    """The buffers behind it must follow: otherwise `opt.state.clear()`, the usual reset, would do nothing."""
    options = {**options, "bias_correction": False} if name == "LAMB" else options
    both = pair(name, param(6), **options)
    for optimizer, (p,) in both:
        step(optimizer, [p], 3.0)
        step(optimizer, [p], -1.0)
        if how == "clear":
            optimizer.state.clear()
        elif how == "replace":
            optimizer.state = type(optimizer.state)(dict)
        elif how == "delete":
            del optimizer.state[p]
        else:
            optimizer.state[p] = {k: torch.full_like(v, 2.0) for k, v in optimizer.state[p].items()}
        step(optimizer, [p], 0.5)
    assert_agree(both)


def test_in_place_edits_of_state_take_effect():
    both = pair("SGD", param(6), momentum=0.9)
    for optimizer, (p,) in both:
        step(optimizer, [p])
        optimizer.state[p]["momentum_buffer"].zero_()
        step(optimizer, [p], 0.0)
    assert_agree(both)


def test_momentum_switched_on_and_off():
    both = pair("SGD", param(6), dampening=0.5)
    for i, momentum in enumerate([0.0, 0.9, 0.9, 0.0, 0.0, 0.8]):
        for optimizer, params in both:
            optimizer.param_groups[0]["momentum"] = momentum
            step(optimizer, params, i + 1.0)
        assert_agree(both)


def test_state_follows_a_parameter_that_changes_layout_or_dtype():
    both = pair("AdamW", param(2, 3, 4, 4))
    grad = torch.randn(2, 3, 4, 4)
    for last in (False, True):
        for optimizer, (p,) in both:
            if last and optimizer is both[0][0]:
                p.data = p.data.to(memory_format=torch.channels_last)
            p.grad = grad.clone(memory_format=torch.preserve_format)
            optimizer.step()
    assert_agree(both)
    ours, (p,) = both[0]
    exp_avg = ours.state[p]["exp_avg"].clone()
    p.grad = None
    p.data = p.data.bfloat16()
    step(ours, [p], 0.0)
    torch.testing.assert_close(ours.state[p]["exp_avg"], exp_avg * 0.9)
    assert ours.state[p]["master"].dtype == f32


@pytest.mark.own_backend
def test_parameters_on_several_devices():
    """One pass per device; the meta device stands for a second one."""
    ps, away = [param(5), param(7, 3), param(2)], torch.nn.Parameter(torch.ones(5, device="meta"))
    mixed, alone = akopt.AdamW([*ps[:1], away, *ps[1:]], lr=0.1), akopt.AdamW(twins := copies(ps), lr=0.1)
    for value in (1.0, -2.0, 0.5):
        step(mixed, [*ps, away], value)
        step(alone, twins, value)
    assert all(torch.equal(p, q) for p, q in zip(ps, twins, strict=True))
    assert mixed.state[away]["exp_avg"].is_meta


@EACH
def test_closure_and_profiler_name(name):
    p = param(3)
    optimizer = make(name, [p])
    calls = []

    def closure():
        calls.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.profiler.profile() as profile:
        loss = optimizer.step(closure)
    assert loss.requires_grad
    assert calls == ["closure"]
    assert any(event.key == f"Optimizer.step#{name}.step" for event in profile.key_averages())
    assert optimizer.step() is None


@pytest.mark.parametrize("pre", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("of_all", [False, True], ids=["of one optimizer", "of all"])
def test_each_kind_of_hook_alone(pre, of_all):
    p = param(3)
    optimizer = make("AdamW", [p])
    calls = []
    name = f"register_{'optimizer_' if of_all else ''}step_{'pre' if pre else 'post'}_hook"
    handle = getattr(sys.modules["torch.optim.optimizer"] if of_all else optimizer, name)(
        lambda *_: calls.append(p.detach().clone())
    )
    before = p.detach().clone()
    try:
        step(optimizer, [p])
    finally:
        handle.remove()
    assert len(calls) == 1
    assert torch.equal(calls[0], before) == pre
    step(optimizer, [p])
    assert len(calls) == 1


def test_schedulers_drive_it():
    both = pair("AdamW", param(3))
    for optimizer, params in both:
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),  # moves betas too
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]
        for i in range(10):
            step(optimizer, params, i - 4.0)
            for scheduler in schedulers:
                scheduler.step()
    assert_agree(both, rtol=1e-5, atol=1e-6)


# ---- shadows ----


@EACH
@pytest.mark.parametrize("dtype", [f16, bf16])
def test_shadow_is_the_rounded_weight_after_each_step(name, dtype):
    ps = [param(5, 3), param(2, 3, 4, 4), param(3, dtype=bf16)]
    ps[1].data = ps[1].data.to(memory_format=torch.channels_last)
    optimizer = make(name, ps, 0.1, shadow_dtype=dtype)
    for i in range(3):
        step(optimizer, ps, i - 1.0)
        for p in ps[:2]:
            shadow = fresh_shadow(p, dtype)
            assert torch.equal(shadow, p.to(dtype))
            assert shadow.stride() == p.stride()
            assert fresh_shadow(p, f16 if dtype == bf16 else bf16) is None
        assert fresh_shadow(ps[2], dtype) is None  # a 16-bit parameter needs none


def test_shadow_is_stale_after_any_write():
    p = param(4)
    optimizer = akopt.SGD([p], lr=0.1, shadow_dtype=f16)
    assert fresh_shadow(p, f16) is None
    step(optimizer, [p])
    with torch.no_grad():
        p.mul_(2)
    assert fresh_shadow(p, f16) is None
    step(optimizer, [p])
    assert torch.equal(fresh_shadow(p, f16), p.half())
    p.data = p.data * 3  # another address
    assert fresh_shadow(p, f16) is None


def test_shadow_after_a_skipped_step_is_not_that_of_an_older_weight():
    """The step would have written it; skipped on the device, it does not, and the host cannot know."""
    p = param(4)
    optimizer = akopt.SGD([p], lr=0.1, shadow_dtype=f16, skip_nonfinite=True)
    step(optimizer, [p])
    with torch.no_grad():
        p.add_(1)
    step(optimizer, [p], torch.inf)
    assert torch.equal(fresh_shadow(p, f16), p.half())


def test_shadow_dies_with_its_optimizer_and_is_not_pickled():
    p = param(4)
    optimizer = akopt.SGD([p], shadow_dtype=f16)
    step(optimizer, [p])
    assert fresh_shadow(copy.deepcopy(p), f16) is None
    assert not p.__dict__
    del optimizer
    gc.collect()
    assert fresh_shadow(p, f16) is None


def test_shadow_is_not_used_while_tracing():
    p = param(4)
    optimizer = akopt.SGD([p], shadow_dtype=f16)
    step(optimizer, [p])
    found = []

    @torch.compile(backend="eager")
    def look(x):
        found.append(fresh_shadow(x, f16) is None)
        return x + 1

    look(p)
    assert found == [True]


@pytest.mark.parametrize("checked", [False, True])
def test_writes_that_versions_do_not_see_need_a_refresh(checked, monkeypatch):
    monkeypatch.setattr(_shadows, "_CHECK", checked)  # as AMP_KERNELS_CHECK_SHADOWS=1 does
    model = torch.nn.Linear(3, 2)
    optimizer = akopt.SGD(model.parameters(), shadow_dtype=f16)
    step(optimizer, list(model.parameters()))
    assert fresh_shadow(model.weight, f16) is not None
    model.weight.data.mul_(2)
    x = torch.ones(1, 3)
    with torch.autocast("cpu", f16):
        with torch.no_grad():  # evaluation reads no shadow
            assert torch.equal(ak.linear(x, model.weight), ak.linear(x.half(), model.weight.half()))
        if checked:
            with pytest.raises(RuntimeError, match=r"^the .* is out of date.*amp_kernels.refresh_shadows"):
                ak.linear(x, model.weight)
    ak.refresh_shadows(model)
    assert torch.equal(fresh_shadow(model.weight, f16), model.weight.half())


def test_whoever_clips_inside_a_closure_may():
    """Lightning refuses to clip the gradients of an optimizer that says it unscales them, and asks inside the closure, where
    they have no scale; torch's scaler asks outside."""
    p = param(5)
    optimizer = akopt.SGD([p], lr=1.0)
    before = p.detach().clone()

    def closure():
        assert not getattr(optimizer, "_step_supports_amp_scaling", False)
        fill([p], 3.0)
        torch.nn.utils.clip_grad_norm_([p], 0.5)

    def broken():
        raise KeyError

    optimizer.step(closure)
    torch.testing.assert_close((p - before).norm(), torch.tensor(0.5))
    assert optimizer._step_supports_amp_scaling
    with pytest.raises(KeyError):
        optimizer.step(broken)
    assert optimizer._step_supports_amp_scaling


@pytest.mark.parametrize("options", [{}, {"master_weights": "split24", "state_dtype": "8bit"}], ids=["fp32", "packed"])
def test_state_is_not_moved_to_another_device_piece_by_piece(options):
    """Loops that offload it would copy each value into its flat buffer, and free nothing."""
    p = param(64, 64, dtype=bf16)
    optimizer = make("AdamW", [p], **options)
    step(optimizer, [p])
    state, before = optimizer.state[p], {key: value.clone() for key, value in optimizer.state[p].items()}
    for name in [*state, *before]:
        for write in (state.__setitem__, lambda key, value: state.update({key: value})):
            with pytest.raises(
                ValueError, match=rf"optimizer.state: {name} is on meta; accepted: a tensor on cpu \(all state"
            ):
                write(name, state[name].to("meta"))
    with pytest.raises(ValueError, match="is on meta"):
        state.update(step=torch.tensor(9.0), exp_avg=state["exp_avg"].to("meta"))
    assert all(torch.equal(value, before[key]) for key, value in state.items())
    weight = p.detach().clone()
    optimizer.state[p] = {name: value.to("meta") for name, value in state.items()}
    with pytest.raises(ValueError, match=r"optimizer.state: step is on meta; accepted: a tensor on cpu \(all state"):
        step(optimizer, [p])
    assert torch.equal(p.detach(), weight)
    optimizer.state[p] = state
    state["step"] = torch.tensor(7.0)
    state.update({name: state[name].clone() for name in state})
    assert optimizer.state_dict()["state"][0]["step"] == 7


@pytest.mark.parametrize("options", [{}, {"master_weights": "split24", "state_dtype": "8bit"}], ids=["fp32", "packed"])
def test_what_an_interrupt_stops_is_undone(options, monkeypatch):
    """A load before and after it has copied weights and taken over state, and a group that is not complete."""
    p = param(64, 64, dtype=bf16)
    optimizer = make("AdamW", [p], **options)
    step(optimizer, [p])
    saved = copy.deepcopy(optimizer.state_dict())
    step(optimizer, [p])
    before, weight = copy.deepcopy(optimizer.state_dict()), p.detach().clone()

    def interrupt(*_):
        raise KeyboardInterrupt

    calls = [
        (optimizer._store, "commit", lambda: optimizer.load_state_dict(saved)),
        (_base, "CompiledHandle", lambda: optimizer.load_state_dict(saved)),
        (optimizer._checks, "check_params", lambda: optimizer.add_param_group({"params": [param(3)]})),
    ]
    for owner, name, call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                call()
    for key in ("master", "exp_avg"):
        assert torch.equal(optimizer.state_dict()["state"][0][key], before["state"][0][key])
    assert torch.equal(p.detach(), weight)
    assert len(optimizer.param_groups) == 1


def test_the_seed_is_saved_once_it_counts():
    """A checkpoint of torch's AdamW has none, and loads where nothing is rounded stochastically."""
    for options, dtype, shape in [
        ({"master_weights": "none"}, f32, (64, 64)),
        ({"state_dtype": "8bit"}, f32, (8,)),
        ({"state_dtype": "8bit"}, f32, (64, 64)),
        ({"master_weights": "split24"}, bf16, (8,)),
    ]:
        optimizer = akopt.AdamW([p := param(*shape, dtype=dtype)], seed=3, **options)
        assert "seed" not in optimizer.state_dict()["param_groups"][0]
        step(optimizer, [p])
        draws = dtype == bf16 or (options == {"state_dtype": "8bit"} and p.numel() >= 4096)
        assert ("seed" in optimizer.state_dict()["param_groups"][0]) == draws

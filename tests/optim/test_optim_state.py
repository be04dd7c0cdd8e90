"""Where state lives, when it comes into being, and what users may do to it."""

import gc

import pytest
import torch

import amp_kernels.optim as akopt
from amp_kernels.ops import _shadows
from amp_kernels.ops._shadows import fresh_shadow, refresh_shadows
from amp_kernels.optim._state import ALIGN, state_layout

EACH = pytest.mark.parametrize(
    ("name", "options"), [("AdamW", {}), ("Adam", {"weight_decay": 0.1}), ("SGD", {"momentum": 0.9, "dampening": 0.5})]
)


def param(*shape, dtype=torch.float32, seed=0):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def step(optimizer, params, value=1.0):
    for p in params:
        p.grad = torch.full_like(p, value)
    optimizer.step()


def test_layout():
    offsets, total = state_layout([5, 0, 16, 17, 1])
    assert (offsets, total) == ([0, 16, 16, 32, 64], 80)
    assert all(offset % ALIGN == 0 for offset in offsets)
    assert state_layout([]) == ([], 0)


def test_state_keys_dtypes_and_shapes_are_torchs():
    p = param(3, 4)
    adamw, sgd, plain = akopt.AdamW([p]), akopt.SGD([p], momentum=0.9), akopt.SGD([p])
    for optimizer in (adamw, sgd, plain):
        step(optimizer, [p])
    state = adamw.state[p]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    assert state["step"].shape == ()
    assert state["step"].dtype == torch.float32
    assert state["step"].item() == 1
    assert state["exp_avg"].shape == p.shape
    assert list(sgd.state[p]) == ["momentum_buffer"]
    assert not plain.state


def test_state_of_one_group_and_dtype_shares_flat_buffers():
    ps = [param(3, 4), param(7), param(2, dtype=torch.bfloat16)]
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


@EACH
def test_state_is_lazy(name, options):
    """No state without a gradient; a parameter that joins later starts at step 1, not at the others' count."""
    ps, twins = [param(5, seed=i) for i in range(3)], [param(5, seed=i) for i in range(3)]
    ours, theirs = getattr(akopt, name)(ps, lr=0.1, **options), getattr(torch.optim, name)(twins, lr=0.1, **options)
    assert not ours.state
    for active in ([0], [0, 2], [2], [0, 1, 2], [1]):
        for optimizer, params in ((ours, ps), (theirs, twins)):
            optimizer.zero_grad()
            for i in active:
                params[i].grad = torch.linspace(-1, 1, 5) * (i + 1)
            optimizer.step()
        assert {i for i in range(3) if ps[i] in ours.state} == {i for i in range(3) if twins[i] in theirs.state}
        for p, q in zip(ps, twins, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    if name != "SGD":
        assert [ours.state[p]["step"].item() for p in ps] == [3, 2, 3]


@EACH
def test_no_gradient_at_all(name, options):
    p = param(3)
    optimizer = getattr(akopt, name)([p], max_grad_norm=1.0, skip_nonfinite=True, **options)
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)
    assert not optimizer.state


@EACH
def test_add_param_group(name, options):
    a, b = param(4), param(4, seed=1)
    optimizer = getattr(akopt, name)([a], lr=0.1, **options)
    step(optimizer, [a])
    kept = optimizer.state[a]
    optimizer.add_param_group({"params": [b], "lr": 0.0, "weight_decay": 0.0})
    before = b.detach().clone()
    step(optimizer, [a, b])
    assert optimizer.state[a] is kept
    assert torch.equal(b, before)
    assert optimizer.param_groups[1]["fused"] is True


@EACH
@pytest.mark.parametrize("how", ["clear", "replace", "delete", "own values"])
def test_a_user_may_replace_the_state(name, options, how):
    """The buffers behind it must follow: otherwise `opt.state.clear()`, the usual reset, would do nothing."""
    p, q = param(6), param(6)
    ours, theirs = getattr(akopt, name)([p], lr=0.1, **options), getattr(torch.optim, name)([q], lr=0.1, **options)
    for optimizer, parameter in ((ours, p), (theirs, q)):
        step(optimizer, [parameter], 3.0)
        step(optimizer, [parameter], -1.0)
        if how == "clear":
            optimizer.state.clear()
        elif how == "replace":
            optimizer.state = type(optimizer.state)(dict)
        elif how == "delete":
            del optimizer.state[parameter]
        else:
            optimizer.state[parameter] = {k: torch.full_like(v, 2.0) for k, v in optimizer.state[parameter].items()}
        step(optimizer, [parameter], 0.5)
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_in_place_edits_of_state_take_effect():
    p, q = param(6), param(6)
    ours, theirs = akopt.SGD([p], lr=0.1, momentum=0.9), torch.optim.SGD([q], lr=0.1, momentum=0.9)
    for optimizer, parameter in ((ours, p), (theirs, q)):
        step(optimizer, [parameter])
        optimizer.state[parameter]["momentum_buffer"].zero_()
        step(optimizer, [parameter], 0.0)
    torch.testing.assert_close(p, q)


def test_momentum_switched_on_and_off():
    p, q = param(6), param(6)
    ours, theirs = akopt.SGD([p], lr=0.1, dampening=0.5), torch.optim.SGD([q], lr=0.1, dampening=0.5)
    for i, momentum in enumerate([0.0, 0.9, 0.9, 0.0, 0.0, 0.8]):
        for optimizer, parameter in ((ours, p), (theirs, q)):
            optimizer.param_groups[0]["momentum"] = momentum
            step(optimizer, [parameter], i + 1.0)
        torch.testing.assert_close(p, q)


def test_state_follows_a_parameter_that_changes_layout_or_dtype():
    p, q = param(2, 3, 4, 4), param(2, 3, 4, 4)
    ours, theirs = akopt.AdamW([p], lr=0.1), torch.optim.AdamW([q], lr=0.1)
    grad = torch.randn(2, 3, 4, 4)
    for last in (False, True):
        if last:
            p.data = p.data.to(memory_format=torch.channels_last)
        for optimizer, parameter in ((ours, p), (theirs, q)):
            parameter.grad = grad.clone(memory_format=torch.preserve_format)
            optimizer.step()
    torch.testing.assert_close(p, q.detach(), check_stride=False)
    exp_avg = ours.state[p]["exp_avg"].clone()
    p.grad = None
    p.data = p.data.bfloat16()
    p.grad = torch.zeros_like(p)
    ours.step()
    torch.testing.assert_close(ours.state[p]["exp_avg"], exp_avg * 0.9)
    assert ours.state[p]["master"].dtype == torch.float32


@pytest.mark.parametrize("mode", ["fp32", "split"])
def test_reload_model_params(mode):
    p = param(5, dtype=torch.bfloat16)
    optimizer = akopt.SGD([p], lr=2.0**-12, master_weights=mode)
    step(optimizer, [p])
    with torch.no_grad():
        p.copy_(torch.arange(5))
    optimizer.reload_model_params()
    step(optimizer, [p], 1.0)
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], torch.arange(5) - 2.0**-12)


def test_step_between_forward_and_backward_is_noticed():
    """Kernels of the stable ABI do not bump version counters by themselves; autograd would use the new weights
    silently."""
    p = param(3)
    optimizer = akopt.AdamW([p])
    out = (p * p).sum()
    step(optimizer, [p])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@EACH
def test_closure_hooks_and_profiler_name(name, options):
    p = param(3)
    optimizer = getattr(akopt, name)([p], lr=0.1, **options)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

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
    assert calls == ["pre", "closure", "post"]
    assert any(event.key == f"Optimizer.step#{name}.step" for event in profile.key_averages())
    assert optimizer.step() is None


def test_schedulers_drive_it():
    p, q = param(3), param(3)
    ours, theirs = akopt.AdamW([p], lr=0.1), torch.optim.AdamW([q], lr=0.1)
    for optimizer, parameter in ((ours, p), (theirs, q)):
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),  # moves betas too
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]
        for i in range(10):
            step(optimizer, [parameter], i - 4.0)
            for scheduler in schedulers:
                scheduler.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ---- shadows ----


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shadow_is_the_rounded_weight_after_each_step(name, dtype):
    ps = [param(5, 3), param(2, 3, 4, 4), param(3, dtype=torch.bfloat16)]
    ps[1].data = ps[1].data.to(memory_format=torch.channels_last)
    optimizer = getattr(akopt, name)(ps, lr=0.1, shadow_dtype=dtype)
    for i in range(3):
        step(optimizer, ps, i - 1.0)
        for p in ps[:2]:
            shadow = fresh_shadow(p, dtype)
            assert torch.equal(shadow, p.to(dtype))
            assert shadow.stride() == p.stride()
            assert fresh_shadow(p, torch.float16 if dtype == torch.bfloat16 else torch.bfloat16) is None
        assert fresh_shadow(ps[2], dtype) is None  # a 16-bit parameter needs none


def test_shadow_is_stale_after_any_write():
    p = param(4)
    optimizer = akopt.SGD([p], lr=0.1, shadow_dtype=torch.float16)
    assert fresh_shadow(p, torch.float16) is None
    step(optimizer, [p])
    with torch.no_grad():
        p.mul_(2)
    assert fresh_shadow(p, torch.float16) is None
    step(optimizer, [p])
    assert torch.equal(fresh_shadow(p, torch.float16), p.half())
    p.data = p.data * 3  # another address
    assert fresh_shadow(p, torch.float16) is None


def test_shadow_after_a_skipped_step_is_not_that_of_an_older_weight():
    """The step would have written it; skipped on the device, it does not, and the host cannot know."""
    p = param(4)
    optimizer = akopt.SGD([p], lr=0.1, shadow_dtype=torch.float16, skip_nonfinite=True)
    step(optimizer, [p])
    with torch.no_grad():
        p.add_(1)
    step(optimizer, [p], torch.inf)
    assert torch.equal(fresh_shadow(p, torch.float16), p.half())


def test_refresh_shadows_after_writes_through_data():
    model = torch.nn.Linear(3, 2)
    optimizer = akopt.SGD(model.parameters(), shadow_dtype=torch.bfloat16)
    step(optimizer, list(model.parameters()))
    model.weight.data.mul_(2)
    refresh_shadows(model)
    assert torch.equal(fresh_shadow(model.weight, torch.bfloat16), model.weight.bfloat16())


def test_shadow_dies_with_its_optimizer_and_is_not_pickled():
    import copy

    p = param(4)
    optimizer = akopt.SGD([p], shadow_dtype=torch.float16)
    step(optimizer, [p])
    twin = copy.deepcopy(p)
    assert fresh_shadow(twin, torch.float16) is None
    assert not p.__dict__
    del optimizer
    gc.collect()
    assert fresh_shadow(p, torch.float16) is None


def test_shadow_is_not_used_while_tracing():
    p = param(4)
    optimizer = akopt.SGD([p], shadow_dtype=torch.float16)
    step(optimizer, [p])
    found = []

    @torch.compile(backend="eager")
    def look(x):
        found.append(fresh_shadow(x, torch.float16) is None)
        return x + 1

    look(p)
    assert found == [True]


def test_check_mode_catches_writes_that_versions_do_not_see(monkeypatch):
    monkeypatch.setattr(_shadows, "_CHECK", True)
    model = torch.nn.Linear(3, 2)
    optimizer = akopt.SGD(model.parameters(), shadow_dtype=torch.float16)
    step(optimizer, list(model.parameters()))
    assert fresh_shadow(model.weight, torch.float16) is not None
    model.weight.data.mul_(2)
    with pytest.raises(RuntimeError, match="is out of date"):
        fresh_shadow(model.weight, torch.float16)
    refresh_shadows(model)
    assert fresh_shadow(model.weight, torch.float16) is not None

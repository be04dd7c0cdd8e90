"""torch.amp.GradScaler's contract, line by line, on ours: the same script must behave the same."""

import math
import pickle
import re

import pytest
import torch

import amp_kernels as ak
from amp_kernels._checks.types import type_name
from amp_kernels.amp import GradScaler

from .scaling import EACH, OPTIMIZERS, is_ours


def setup(make=OPTIMIZERS["ours"], n=4, **options):
    p = torch.nn.Parameter(torch.arange(1.0, n + 1))
    return p, make([p]), GradScaler("cpu", **{"init_scale": 8.0, **options})


def growth_tracker(scaler):
    return scaler.state_dict()["_growth_tracker"]


def backward(scaler, p, factor=1.0):
    p.grad = None
    scaler.scale((p * factor).sum()).backward()


def test_constructor():
    scaler = GradScaler("cpu")
    assert isinstance(scaler, torch.amp.GradScaler)
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (65536.0, 2.0, 0.5)
    assert (scaler.get_growth_interval(), growth_tracker(scaler), scaler.is_enabled()) == (2000, 0, True)
    positional = GradScaler("cpu", 4.0, 3.0, 0.25, 7, True)
    assert (positional.get_scale(), positional.get_growth_factor()) == (4.0, 3.0)
    with pytest.raises(AssertionError, match="growth factor must be > 1"):
        GradScaler("cpu", growth_factor=1.0)
    with pytest.raises(AssertionError, match="backoff factor must be < 1"):
        GradScaler("cpu", backoff_factor=1.0)
    GradScaler("cpu", growth_factor=1.0, enabled=False)  # checked only when enabled
    assert ak.GradScaler is GradScaler


def test_completion_shows_documented_names_only():
    added = {name for name in dir(GradScaler("cpu")) if not name.startswith("_")} - set(dir(torch.amp.GradScaler))
    assert added == {"last_grad_norm", "last_step_skipped", "skipped_steps", "consecutive_skips"}


@pytest.mark.parametrize(
    ("option", "value"),
    [("min_scale", -1.0), ("max_scale", 0.5), ("hysteresis", 0), ("init_scale", 0.0), ("growth_interval", -1)]
    + [(k, float("nan")) for k in ("min_scale", "max_scale", "init_scale", "growth_factor", "backoff_factor")],
)
def test_bad_options(option, value):
    with pytest.raises(ValueError, match=f"GradScaler: {option} is {value}"):
        GradScaler("cpu", **{"min_scale": 1.0, option: value})


def test_the_first_scale_is_within_the_lower_bound():
    """Else the first overflow would raise it. (torch has no bounds.)"""
    with pytest.raises(ValueError, match=r"GradScaler: init_scale is 8\.0; accepted: a number from 16\.0 to 3\.4"):
        GradScaler("cpu", init_scale=8.0, min_scale=16.0)
    for enabled, init_scale in ((True, 16.0), (False, 8.0)):
        GradScaler("cpu", init_scale=init_scale, min_scale=16.0, enabled=enabled)


@pytest.mark.parametrize("option", ["hysteresis", "growth_interval", "growth_factor", "max_scale"])
@pytest.mark.parametrize("value", ["a", None, [1]])
def test_options_that_are_no_numbers(option, value):
    kind = "whole number" if option in ("hysteresis", "growth_interval") else "number"
    message = re.escape(f"GradScaler: {option} is {value!r}, of type {type_name(value)}; accepted: a {kind} from ")
    with pytest.raises(TypeError, match=message):
        GradScaler("cpu", **{option: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without CUDA")
def test_without_cuda_it_warns_and_is_disabled():
    said = r"^GradScaler: device is 'cuda' and CUDA is not available, so .* accepted: GradScaler\('cpu'\)"
    with pytest.warns(UserWarning, match=said) as caught:
        scaler = GradScaler()
    assert [warning.filename for warning in caught] == [__file__]
    assert not scaler.is_enabled()


def test_scale_keeps_containers():
    scaler = setup()[2]
    nest = scaler.scale([torch.ones(2), (torch.ones(1), [torch.ones(())])])
    assert isinstance(nest, list)
    assert isinstance(nest[1], tuple)
    assert nest[1][1][0].item() == 8.0
    assert isinstance(scaler.scale(iter([torch.ones(1)])), map)
    assert scaler.scale(torch.ones((), dtype=torch.float16)).dtype == torch.float32
    assert scaler.scale(torch.ones(1, dtype=torch.float16)).dtype == torch.float16
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale([3])


@EACH
def test_methods_before_scale(make):
    _, optimizer, scaler = setup(make)
    for call, name in [
        (lambda: scaler.unscale_(optimizer), "unscale_"),
        (lambda: scaler.step(optimizer), "step"),
        (lambda: scaler.update(), "update"),
    ]:
        with pytest.raises(AssertionError, match=f"Attempted {name} but _scale is None"):
            call()


@EACH
def test_order_of_calls(make):
    p, optimizer, scaler = setup(make)
    backward(scaler, p)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(
        RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since the last update"
    ):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update"):
        scaler.step(optimizer)
    scaler.update()
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update()


@EACH
@pytest.mark.parametrize("how", ["keyword", "positional"])
def test_closures_are_refused(make, how):
    """torch's guard sees the keyword only; a positional closure's gradients would be neither unscaled nor checked."""
    p, optimizer, scaler = setup(make)
    backward(scaler, p)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: None) if how == "keyword" else scaler.step(optimizer, lambda: None)
    assert torch.equal(p, before)
    disabled = GradScaler("cpu", enabled=False)
    assert disabled.step(optimizer, lambda: 3) == 3  # a disabled scaler just steps


@EACH
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_step_updates_or_skips_as_torchs(make, explicit, bad):
    p, optimizer, scaler = setup(make)
    q, reference, theirs = setup(make)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        for param, opt, s in ((p, optimizer, scaler), (q, reference, theirs)):
            backward(s, param, 2.0)
            if bad is not None and growth_tracker(s) == 1:
                param.grad[1] = bad
            if explicit:
                s.unscale_(opt)
            s.step(opt)
            s.update()
    assert torch.equal(p, q)
    assert scaler.state_dict().items() >= theirs.state_dict().items()
    assert scaler.skipped_steps.item() == (bad is not None)


@EACH
def test_gradients_after_the_step(make):
    """Ours stay scaled. torch's unfused are unscaled in place, its fused are rewritten unscaled by the kernel
    itself."""
    p, optimizer, scaler = setup(make)
    backward(scaler, p)
    scaler.step(optimizer)
    assert torch.equal(p.grad, torch.full_like(p, 8.0 if is_ours(optimizer) else 1.0))


@EACH
def test_no_recheck_after_an_explicit_unscale(make):
    p, optimizer, scaler = setup(make)
    backward(scaler, p)
    scaler.unscale_(optimizer)
    p.grad[0] = torch.nan
    scaler.step(optimizer)
    scaler.update()
    assert p[0].isnan()
    assert not p[1:].isnan().any()
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("make", [OPTIMIZERS["ours sgd"], lambda p: torch.optim.SGD(p, lr=0.1, fused=True)])
def test_preset_grad_scale_multiplies_in(make):
    """Users fold a clipping factor into it. (SGD, because Adam's update hardly depends on the gradient's scale.)"""
    p, optimizer, scaler = setup(make)
    q, reference, theirs = setup(make)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0)
    for param, opt, s in ((p, optimizer, scaler), (q, reference, theirs)):
        backward(s, param)
        opt.grad_scale = torch.tensor(4.0)
        s.step(opt)
        assert not hasattr(opt, "grad_scale")
        assert not hasattr(opt, "found_inf")
        s.update()
    assert torch.equal(p, q)


@EACH
def test_return_value_and_arguments(make):
    p, optimizer, scaler = setup(make)
    seen = []
    original = type(optimizer).step
    optimizer.step = lambda *args, **kwargs: seen.append((args, kwargs)) or original(optimizer) or 42
    backward(scaler, p)
    assert scaler.step(optimizer, "x", y=1) == 42
    assert seen == [(("x",), {"y": 1})]


def test_optimizer_with_a_grad_scaler_argument():
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            self.got = grad_scaler
            grad_scaler.unscale_(self)
            return super().step()

    p, optimizer, scaler = setup(lambda ps: Old(ps, lr=0.1))
    backward(scaler, p)
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        scaler.step(optimizer)
    assert optimizer.got is scaler


def test_optimizers_without_gradients():
    _, optimizer, scaler = setup(OPTIMIZERS["torch"])
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)
    for name in ("ours", "torch fused"):  # counts as clean
        _, optimizer, scaler = setup(OPTIMIZERS[name])
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert growth_tracker(scaler) == 1
        assert not scaler.last_step_skipped


@EACH
def test_half_gradients(make):
    """The explicit unscale_ raises as torch's and says what to do instead; the fused paths accept them."""
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer, scaler = make([p]), GradScaler("cpu", init_scale=8.0)
    backward(scaler, p)
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients.*step\(optimizer, max_norm="):
        scaler.unscale_(optimizer)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, p)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        scaler.step(optimizer)
        assert (p < 1).all()
    else:
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.step(optimizer)


@EACH
def test_bfloat16_gradients_may_be_unscaled(make):
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer, scaler = make([p]), GradScaler("cpu", init_scale=8.0)
    backward(scaler, p)
    scaler.unscale_(optimizer)
    assert torch.equal(p.grad, torch.ones_like(p))


def test_sparse_gradients():
    """Only torch's optimizers take them. Duplicate float16 entries are added up before the check: here to inf."""
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.nn.functional.embedding(torch.tensor([1, 1]), weight, sparse=True).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight[1], torch.full((2,), -1.0))
    half = torch.nn.Parameter(torch.ones(3, 1, dtype=torch.float16))
    half.grad = torch.sparse_coo_tensor([[1, 1]], torch.full((2, 1), 6e4, dtype=torch.float16), (3, 1))

    class Fused(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            assert self.found_inf == 1

    scaler.step(Fused([half], lr=1.0))
    assert half.grad.is_coalesced()


def test_strided_gradients_that_do_not_cover_their_memory():
    p = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    memory = torch.full((8,), 4.0)
    p.grad = memory[::2]
    scaler.step(optimizer)
    assert torch.equal(memory, torch.tensor([1.0, 4.0] * 4))
    assert not p.any()


def test_update_with_a_new_scale():
    p, optimizer, scaler = setup()
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 5})
    for value, expected in [(2.0, 2.0), (4, 4.0), (torch.tensor(16.0), 16.0), (torch.tensor([32.0]), 32.0)]:
        scaler.update(value)
        assert scaler.get_scale() == expected
        assert growth_tracker(scaler) == 5
    tensor = torch.tensor(3.0)
    scaler.update(tensor)
    tensor.fill_(9.0)
    assert scaler.get_scale() == 3.0
    for bad in (torch.ones(2), torch.ones((), requires_grad=True), torch.ones((), device="meta")):
        with pytest.raises(AssertionError, match="new_scale should be a float or a 1-element"):
            scaler.update(bad)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="new_scale is"):
            scaler.update(bad)


def test_growth_backoff_and_interval():
    p, optimizer, scaler = setup(growth_interval=2, growth_factor=4.0, backoff_factor=0.25)
    scales = []
    for bad in (0, 0, 0, 1, 0, 0, 1, 1):
        backward(scaler, p, torch.inf if bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 32.0, 32.0, 8.0, 8.0, 32.0, 8.0, 2.0]
    scaler.set_growth_interval(1)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.5)
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 6.0


@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("growth_factor", 0.5), ("growth_factor", math.nan), ("backoff_factor", 0.0), ("backoff_factor", 1.5),
        ("growth_interval", -1), ("growth_interval", 0.5),
    ],
)  # fmt: skip
def test_numbers_that_would_spoil_the_scale(setter, value):
    """The op that updates the scale does not look at them again."""
    _, _, scaler = setup()
    before = scaler.state_dict()
    with pytest.raises((TypeError, ValueError), match=f"set_{setter}: {setter} is {value}"):
        getattr(scaler, f"set_{setter}")(value)
    with pytest.raises((TypeError, ValueError), match=f"load_state_dict: {setter} is {value}"):
        scaler.load_state_dict({**before, setter: value})
    assert scaler.state_dict() == before


def test_disabled():
    p, optimizer, scaler = setup(enabled=False)
    out = torch.ones(2)
    assert scaler.scale(out) is out
    p.grad = torch.ones(4)
    scaler.unscale_(optimizer)
    assert torch.equal(p.grad, torch.ones(4))
    before = p.detach().clone()
    scaler.step(optimizer)
    assert not torch.equal(p, before)
    scaler.update()
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 2000)
    scaler.load_state_dict({})
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()
    assert scaler.skipped_steps.item() == 0

"""Bugs that torch, Apex, Transformer Engine, DeepSpeed and Keras have had in this place, as tests of ours."""

import copy

import pytest
import torch

from amp_kernels._raw.check_and_norm import check_and_norm
from amp_kernels.amp import GradScaler
from amp_kernels.amp._records import combined
from amp_kernels.optim import SGD, AdamW
from amp_kernels.testing.generators import normal


def param(n=4, dtype=torch.float32):
    return torch.nn.Parameter(torch.ones(n, dtype=dtype))


def one_step(scaler, optimizer, p, grad, **kw):
    scaler.scale(torch.ones(()))
    p.grad = grad * scaler.get_scale()
    scaler.step(optimizer, **kw)
    scaler.update()


@pytest.mark.parametrize("scaler_type", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_overflow_on_the_first_step_does_not_leave_a_momentum_buffer(scaler_type, dampening):
    """torch's fused SGD allocates it uninitialised, returns early, and takes it for history at the next step."""
    p, q = param(), param()
    ours = SGD([p], lr=0.1, momentum=0.9, dampening=dampening)
    theirs = torch.optim.SGD([q], lr=0.1, momentum=0.9, dampening=dampening)
    scaler, reference = scaler_type("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    one_step(scaler, ours, p, torch.full((4,), torch.inf))
    one_step(reference, theirs, q, torch.full((4,), torch.inf))
    for i in range(3):
        one_step(scaler, ours, p, torch.full((4,), i + 1.0))
        one_step(reference, theirs, q, torch.full((4,), i + 1.0))
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("found", [1.0, 2.0, 8.0, 0.5])
def test_any_positive_found_inf_skips(found):
    """Flags summed over devices or ranks give 2.0, which torch's fused kernels compare with 1 and so apply the NaN."""
    for optimizer_type in (AdamW, SGD):
        p = param()
        optimizer = optimizer_type([p], lr=0.1)
        p.grad = torch.ones(4)
        optimizer.step()
        before = copy.deepcopy([p.detach(), optimizer.state_dict()["state"]])
        p.grad = torch.full((4,), torch.nan)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        assert torch.equal(p, before[0])
        assert str(optimizer.state_dict()["state"]) == str(before[1])


def test_found_infs_of_devices_are_combined_by_maximum():
    """torch adds them up in place."""
    flags = {"a": torch.ones(()), "b": torch.ones(()), "c": torch.zeros(())}
    assert combined({"found_inf_per_device": flags}, torch.device("cpu")) == 1.0
    assert [flag.item() for flag in flags.values()] == [1.0, 1.0, 0.0]


def test_the_scale_need_not_decay_to_zero():
    """torch's halves until it is 0; its inverse is then infinite for good. A floor is one option, and 0 is never below
    it."""
    p = param()
    optimizer, scaler = SGD([p]), GradScaler("cpu", init_scale=2.0**-140, min_scale=2.0**-148)
    for _ in range(20):
        one_step(scaler, optimizer, p, torch.full((4,), torch.inf))
    assert scaler.get_scale() == 2.0**-148


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    "make", [AdamW, SGD, lambda p: torch.optim.AdamW(p, fused=True), lambda p: torch.optim.SGD(p, lr=0.1)]
)
def test_gradient_that_overflows_only_once_unscaled(make, explicit):
    """Scale 2^-30 and a scaled gradient of 1e30: finite, so torch applies 1e39 = inf to the weights."""
    p = param()
    optimizer, scaler = make([p]), GradScaler("cpu", init_scale=2.0**-30)
    scaler.scale(torch.ones(()))
    p.grad = torch.full((4,), 1e30)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, torch.ones(4))
    assert scaler.get_scale() == 2.0**-31


def test_finite_gradients_whose_squares_overflow_are_not_an_overflow():
    """A flag taken from the norm (or from a sum of elements) would skip this step."""
    sum_sq, found_inf = check_and_norm([torch.full((4,), 1e30), torch.full((3,), -3e38)])
    assert (sum_sq.item(), found_inf.item()) == (torch.inf, 0.0)
    p = param()
    one_step(GradScaler("cpu", init_scale=1.0), SGD([p], lr=2.0**-100), p, torch.full((4,), 2.0**100))
    assert torch.equal(p, torch.zeros(4))


def test_one_check_for_all_groups_and_dtypes():
    """DeepSpeed counted a step twice for a group of both 16-bit types; Apex checked once per group."""
    ps = [param(3, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    optimizer = AdamW([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.5}])
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.float().sum() for p in ps)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert [optimizer.state[p]["step"].item() for p in ps] == [1, 1, 1]
    before = [p.detach().clone() for p in ps]
    scaler.scale(sum(p.float().sum() for p in ps)).backward()
    ps[2].grad[0] = torch.inf  # in one group: none may step
    scaler.step(optimizer)
    assert all(torch.equal(p, b) for p, b in zip(ps, before, strict=True))


def test_reciprocal_of_the_scale_is_taken_in_double():
    """Not all scales are powers of two once a user sets them; the bits must be torch's."""
    for scale in (3.0, 1000.0, 65537.0, 1.1):
        p, q = param(64), param(64)
        grad = normal(64, seed=1)
        for scaler, parameter in (
            (GradScaler("cpu", init_scale=scale), p),
            (torch.amp.GradScaler("cpu", init_scale=scale), q),
        ):
            scaler.scale(torch.ones(()))
            parameter.grad = grad.clone()
            scaler.step(torch.optim.SGD([parameter], lr=1.0) if parameter is q else SGD([parameter], lr=1.0))
        assert torch.equal(p, q)

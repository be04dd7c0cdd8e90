"""Bugs that torch, Apex, Transformer Engine, DeepSpeed and Keras have had in this place, as tests of ours."""

import pytest
import torch

from amp_kernels.amp import GradScaler
from amp_kernels.amp._records import combined
from amp_kernels.optim import SGD, AdamW


def param(n=4, dtype=torch.float32):
    return torch.nn.Parameter(torch.ones(n, dtype=dtype))


def test_found_infs_of_devices_are_combined_by_maximum():
    """torch adds them up in place."""
    flags = {"a": torch.ones(()), "b": torch.ones(()), "c": torch.zeros(())}
    assert combined({"found_inf_per_device": flags}, torch.device("cpu")) == 1.0
    assert [flag.item() for flag in flags.values()] == [1.0, 1.0, 0.0]


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

"""csrc/gradients/loss_scale.h: torch's rule with the defaults, and Megatron-LM's bounds and hysteresis."""

import math
import random

import pytest
import torch

from amp_kernels import _host


@pytest.mark.parametrize("growth_interval", [1, 3, 0])
@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.7, 0.3)])
def test_defaults_are_torchs_rule(growth_interval, factors):
    """Along a random sequence of overflows, bit for bit; torch multiplies in double and rounds once."""
    growth, backoff = factors
    scale, tracker = torch.tensor(65536.0), torch.zeros((), dtype=torch.int32)
    ours = (65536.0, 0, 1)
    draw = random.Random(5)
    for _ in range(400):
        overflow = draw.random() < 0.3
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), growth, backoff, growth_interval)
        ours = _host.update_loss_scale(
            *ours, overflow, growth_factor=growth, backoff_factor=backoff, growth_interval=growth_interval
        )
        assert ours[:2] == (scale.item(), tracker.item())


def test_growth_stops_before_infinity():
    assert _host.update_loss_scale(3e38, 1, 1, False, growth_interval=2) == (torch.tensor(3e38).item(), 0, 1)


def test_bounds():
    assert _host.update_loss_scale(1.5, 0, 1, True, min_scale=1.0)[0] == 1.0
    assert _host.update_loss_scale(1000.0, 1, 1, False, growth_interval=2, max_scale=1500.0)[0] == 1500.0
    assert _host.update_loss_scale(2.0**-149, 0, 1, True)[0] == 0.0  # torch's rule has no floor


def test_hysteresis_counts_overflows_and_is_refilled_by_growth_only():
    state = (1024.0, 0, 3)
    seen = []
    #          tolerated   yields each time  a good step      grows and refills
    for bad in (True, True, True, True, False, False, True):
        state = _host.update_loss_scale(*state, bad, growth_interval=2, hysteresis=3)
        seen.append(state)
    assert seen == [
        (1024.0, 0, 2),
        (1024.0, 0, 1),
        (512.0, 0, 0),
        (256.0, 0, -1),
        (256.0, 1, -1),
        (512.0, 0, 3),
        (512.0, 0, 2),
    ]


def test_consecutive_hysteresis_counts_overflows_in_a_row():
    """DeepSpeed's DynamicLossScaler with consecutive_hysteresis: any good step fills it up again."""
    state, scales = (1024.0, 0, 2), []
    for bad in (True, False, True, False, True, True, True, False, True):
        state = _host.update_loss_scale(*state, bad, growth_interval=10, hysteresis=2, consecutive=True)
        scales.append(state[0])
    assert scales == [1024.0, 1024.0, 1024.0, 1024.0, 1024.0, 512.0, 256.0, 256.0, 256.0]


def test_no_refill_when_the_scale_could_not_grow():
    assert _host.update_loss_scale(3e38, 1, 0, False, growth_interval=2, hysteresis=3)[2] == 0
    assert not math.isinf(_host.update_loss_scale(3e38, 1, 0, False, growth_interval=2)[0])

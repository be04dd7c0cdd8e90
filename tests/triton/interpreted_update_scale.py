"""update_scale_'s Triton kernel in the interpreter, against the CPU op bit for bit; run by test_interpreted.py."""

import itertools
import math

import pytest
import torch

from amp_kernels._triton import update_scale as module

from ..helpers.bits import assert_same_bits


def check(
    scale,
    streak,
    tolerated,
    found,
    growth=2.0,
    backoff=0.5,
    interval=3,
    low=0.0,
    high=math.inf,
    hysteresis=1,
    rule=False,
):
    states = []
    for run in (torch.ops.amp_kernels.update_scale_, module.update_scale_):
        state = torch.tensor(scale), *(torch.tensor(x, dtype=torch.int32) for x in (streak, tolerated))
        counters = torch.tensor(2**33), torch.tensor(5)
        run(*state, [torch.tensor(f) for f in found], growth, backoff, interval, low, high, hysteresis, rule, *counters)
        states.append((*state, *counters))
    names = "scale", "growth_tracker", "hysteresis_tracker", "skipped_steps", "consecutive_skips"
    for name, wanted, got in zip(names, *states, strict=True):
        assert_same_bits(got, wanted, f"{name} after {(scale, streak, tolerated, found[:4])}")
    return tuple(x.item() for x in states[1][:3])


@pytest.mark.parametrize(("low", "high"), [(0.0, math.inf), (100.0, 1500.0)])
@pytest.mark.parametrize("interval", [0, 1, 3, 2**40])
def test_every_case_of_the_rule(interval, low, high):
    for found, streak, tolerated, scale in itertools.product((0.0, 1.0), (0, 2), (-1, 1, 2), (128.0, 1024.0, 3e38)):
        for rule in (False, True):
            check(scale, streak, tolerated, [found], interval=interval, low=low, high=high, hysteresis=2, rule=rule)


def test_factors_and_bounds_are_doubles():
    """Factors rounded to fp32 first would give another scale."""
    grown, *_ = check(3.0, 2, 1, [0.0], growth=1.0000001)
    assert grown == torch.tensor(3.0 * 1.0000001).item()
    check(16777215.0, 2, 1, [1.0], backoff=0.1)
    check(3.0, 2, 1, [1.0], low=2.9999999)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_flag_at_any_place(count):
    for at in {0, count // 2, count - 1}:
        found = [0.0] * count
        assert check(8.0, 0, 1, found)[0] == 8.0
        found[at] = 1e-30
        assert check(8.0, 0, 1, found)[0] == 4.0


def test_flags_are_not_added_up():
    assert check(8.0, 0, 1, [1.0, -1.0])[0] == 4.0
    assert check(8.0, 0, 1, [math.nan, 1.0])[0] == 4.0
    assert check(8.0, 0, 1, [math.nan, -1.0])[0] == 8.0

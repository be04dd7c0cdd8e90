"""update_scale_: the rule of csrc/gradients/loss_scale.h (tests/math/test_loss_scale.py) over tensors.

tests/triton/test_interpreted.py runs it with the Triton kernel as well, of which each launch takes milliseconds there.
"""

import itertools
import os
import random

import pytest
import torch

import amp_kernels as ak
import amp_kernels._raw.update_scale as module
from amp_kernels import _host

OP = torch.ops.amp_kernels.update_scale_.default
CHECKING = {"compiled": OP, "emulate": module.op.emulated, "reference": module.op.reference}
OPS = {"triton": ak.backend("triton")(module.op)} if os.environ.get("TRITON_INTERPRET") == "1" else CHECKING
EACH = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def state(scale=1024.0, growth=0, hysteresis=1):
    return torch.tensor(scale), torch.tensor(growth, dtype=torch.int32), torch.tensor(hysteresis, dtype=torch.int32)


RULE = {"growth_interval": 2, "min_scale": 0.0, "max_scale": float("inf"), "hysteresis": 1, "consecutive": False}


def run(tensors, found, growth=2.0, backoff=0.5, op=OP, **rule):
    op(*tensors, [torch.tensor(f) for f in found], growth, backoff, **{**RULE, **rule})
    return tuple(t.item() for t in tensors)


@EACH
def test_follows_the_rule(op):
    """All combinations of state, flag and options, against the formula."""
    states = itertools.product((1024.0, 2.0**-149, 3e38, 1.5), (0, 1, 4), (-1, 0, 1, 2), (False, True))
    rules = itertools.product((0, 1, 2), (0.0, 1.0), (2000.0, float("inf")), (1, 3), (False, True))
    cases = [*itertools.product(states, rules)]
    for (*before, overflow), values in random.Random(0).sample(cases, 200) if "triton" in OPS else cases:
        rule = dict(zip(RULE, values, strict=True))
        wanted = _host.update_loss_scale(*before, overflow, 1.9, 0.4, **rule)
        assert run(state(*before), [float(overflow)], 1.9, 0.4, op, **rule) == wanted, (before, overflow, rule)


@EACH
@pytest.mark.parametrize(
    ("found", "overflow"),
    [
        ([0.0], False),
        ([0.0, 0.0], False),
        ([2.0], True),
        ([0.0, 1.0], True),
        ([1.0, 0.0, 0.0], True),
        ([1e-30], True),
        ([-1.0], False),
        ([float("nan")], False),
        ([float("nan"), 1.0, float("nan")], True),
        ([-2.0, 1.0], True),
        ([], False),
    ],
)
def test_any_positive_flag_is_an_overflow(op, found, overflow):
    """2.0 is the sum of two devices' flags; flags of several optimizers are not added, so they cannot cancel."""
    assert run(state(), found, op=op)[0] == (512.0 if overflow else 1024.0)


@EACH
def test_factors_and_bounds_are_doubles(op):
    """Factors rounded to fp32 first would give another scale."""
    for before, found, options in (
        (3.0, False, {"growth": 1.0000001}),
        (16777215.0, True, {"backoff": 0.1}),
        (3.0, True, {"min_scale": 2.9999999}),
    ):
        factors = options.pop("growth", 2.0), options.pop("backoff", 0.5)
        wanted = _host.update_loss_scale(before, 1, 1, found, *factors, **{**RULE, **options})
        assert run(state(before, 1), [float(found)], *factors, op, **options) == wanted


@EACH
@pytest.mark.parametrize("count", [33, 64, 65, 256, 257, 600])
def test_an_overflow_at_any_place_of_many_flags(op, count):
    """Of one launch and of several; what comes after it does not hide it, nor does it count twice."""
    flags, skipped = [torch.tensor(0.0) for _ in range(count)], torch.tensor(0)
    for place in {0, 1, 31, 32, 63, 64, count // 2, 255, 256, 511, 512, count - 1} & set(range(count)):
        flags[place].fill_(1.0)
        tensors = state()
        op(*tensors, flags, 2.0, 0.5, 1, 0.0, 1e9, 1, skipped_steps=skipped.zero_())
        assert (tensors[0].item(), skipped.item()) == (512.0, 1), place
        flags[place].zero_()
    op(*tensors, flags, 2.0, 0.5, 1, 0.0, 1e9, 1, skipped_steps=skipped)
    assert (tensors[0].item(), skipped.item()) == (1024.0, 1)


def test_equals_torchs_op_along_a_sequence():
    ours, (scale, tracker, _) = state(65536.0), state(65536.0)
    for overflow in [0, 0, 1, 0, 0, 0, 1, 1, 0, 0]:
        run(ours, [float(overflow)])
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 2)
        assert (ours[0].item(), ours[1].item()) == (scale.item(), tracker.item())


@EACH
def test_counts_skips(op):
    """Each counter, alone or with the other: in all, and the last ones in a row."""
    total, consecutive, other = torch.tensor(3), torch.tensor(9), torch.tensor(2**40)
    seen = []
    for found in ([1.0], [0.0, 2.0], [0.0], [-1.0], [float("nan")], [float("inf")]):
        flags = [torch.tensor(f) for f in found]
        op(*state(), flags, 2.0, 0.5, 2, 0.0, 1e9, 1, False, total, consecutive)
        op(*state(), flags, 2.0, 0.5, 2, 0.0, 1e9, 1, False, other)
        op(*state(), flags, 2.0, 0.5, 2, 0.0, 1e9, 1, consecutive_skips=(alone := consecutive.clone()))
        assert alone.item() == (consecutive.item() + 1 if consecutive.item() else 0)
        seen.append((total.item(), consecutive.item(), other.item() - 2**40))
    assert seen == [(4, 10, 1), (5, 11, 2), (5, 0, 2), (5, 0, 2), (5, 0, 2), (6, 1, 3)]


def test_bad_counters_change_nothing():
    tensors = state()
    for name, counter in (("skipped_steps", torch.tensor(1.0)), ("consecutive_skips", torch.tensor([1, 2]))):
        with pytest.raises(RuntimeError, match=f"update_scale_: {name} must have"):
            OP(*tensors, [torch.tensor(1.0)], 2.0, 0.5, 2, 0.0, 1e9, 1, **{name: counter})
        assert counter.sum().item() in (1.0, 3)
    assert [t.item() for t in tensors] == [1024.0, 0, 1]


@EACH
def test_shape_one_is_accepted(op):
    for one in range(3):
        tensors = tuple(t.reshape(1) if i == one else t for i, t in enumerate(state()))
        assert run(tensors, [1.0], op=op)[0] == 512.0


@EACH
def test_numbers_beyond_the_range_of_their_tensors(op):
    """Bounds of the scale are kept in float32; an interval is a 64-bit count."""
    for found, options, wanted in [
        (1.0, {"min_scale": 1e300}, (float("inf"), 0, 0)),
        (0.0, {"max_scale": 1e300, "growth_interval": 1}, (2048.0, 0, 1)),
        (0.0, {"growth_interval": 2**32 + 1}, (1024.0, 1, 1)),
    ]:
        assert run(state(), [found], op=op, **options) == wanted


@pytest.mark.parametrize("op", CHECKING.values(), ids=CHECKING)
@pytest.mark.parametrize("hysteresis", [0, -(2**63), 2**31, 2**63 - 1])
def test_a_hysteresis_that_does_not_fit_into_its_tracker(op, hysteresis):
    tensors, message = state(), f"hysteresis is {hysteresis}; accepted: a number from 1 to 2147483647"
    with pytest.raises((ValueError, RuntimeError), match=message):
        run(tensors, [1.0], hysteresis=hysteresis, op=op)
    assert [t.item() for t in tensors] == [1024.0, 0, 1]


@pytest.mark.parametrize(
    ("position", "tensor", "message"),
    [
        (0, torch.tensor(1.0, dtype=torch.float64), "scale must have dtype float32; got float64"),
        (0, torch.ones(2), "scale must have one element"),
        (1, torch.tensor(0), "growth_tracker must have dtype int32; got int64"),
        (2, torch.tensor(0.0), "hysteresis_tracker must have dtype int32; got float32"),
    ],
)
def test_bad_calls_change_nothing(position, tensor, message):
    tensors = list(state())
    tensors[position] = tensor
    before = [t.clone() for t in tensors]
    with pytest.raises(RuntimeError, match=f"update_scale_: {message}"):
        OP(*tensors, [torch.tensor(1.0)], 2.0, 0.5, 2, 0.0, 1e9, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_bad_flag_changes_nothing():
    tensors = state()
    with pytest.raises(RuntimeError, match=r"found_infs\[1\] must have dtype float32; got int64"):
        OP(*tensors, [torch.tensor(1.0), torch.tensor(1)], 2.0, 0.5, 2, 0.0, 1e9, 1)
    assert [t.item() for t in tensors] == [1024.0, 0, 1]

"""lamb_ on the CPU: against float64, its Python reference and the formula of csrc/math, with every rule of the trust ratio.

What the updates share is tested in test_adamw.py, and here once more where lamb_ has code of its own.
"""

import math

import numpy as np
import pytest
import torch

import amp_kernels.ops.lamb as lamb_module
from amp_kernels import _host

from .update_oracle import (
    BF16,
    F16,
    F32,
    KINDS,
    Kind,
    Update,
    assert_averaged,
    assert_close,
    assert_visible,
    flat,
    store_error,
)

U = 2.0**-24
MAXIMIZE, NO_CORRECTION, ADAPT_ALL = 1, 16, 32
LR, B1, B2, EPS, WD = 1e-2, 0.9, 0.99, 1e-6, 0.1  # of Update.lamb
BACKENDS = pytest.mark.parametrize("op", [None, lamb_module.op.reference], ids=["cpu", "reference"])


def stepped(update_args: dict, **call) -> tuple[Update, Update]:
    update, before = Update(**update_args), Update(**update_args)
    update.lamb(**call)
    for got, kept in zip(update.grads, before.grads, strict=True):
        assert torch.equal(got, kept)
    return update, before


def norm(x: torch.Tensor) -> float:
    return x.double().norm().item()


def check_against_float64(update: Update, before: Update, *, flags=0, scale=1.0, clip=1.0, lr=LR, wd=WD):
    """The moments must be those of float64; the weight must be that of float64 from the moments as they are stored,
    which both passes read."""
    for i, grad in enumerate(before.grads):
        p, m, v = before.weight(i).double(), before.moment(0, i).double(), before.moment(1, i).double()
        step = before.step(i) + 1
        assert update.step(i) == step
        g = flat(grad).double() / scale * clip * (-1 if flags & MAXIMIZE else 1)
        half = 2.0**-8 if update.moment_dtype == BF16 else 0.0
        wanted_m, wanted_v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        assert_close(update.moment(0, i), wanted_m, half * wanted_m.abs() + 6 * U * (m.abs() + g.abs()), "exp_avg")
        assert_close(update.moment(1, i), wanted_v, (half + 8 * U) * wanted_v + 2.0**-149, "exp_avg_sq")

        m, v = update.moment(0, i).double(), update.moment(1, i).double()
        corrected = not flags & NO_CORRECTION
        correction1, correction2 = (1 - B1**step, 1 - B2**step) if corrected else (1.0, 1.0)
        adam = m / correction1 / ((v / correction2).sqrt() + EPS)
        u = adam + wd * p
        # Six roundings of Adam's direction, one of the sum; the norm of u is off by no more than that of its error.
        direction_error = 8 * U * adam.abs() + 2 * U * (wd * p).abs()
        rate, rate_error = lr, U * lr
        if (wd or flags & ADAPT_ALL) and norm(p) and norm(u):
            rate = lr * norm(p) / norm(u)
            rate_error = rate * (2 * U + norm(direction_error) / norm(u))
        wanted = p - rate * u
        bound = rate * direction_error + 2 * rate_error * u.abs() + U * wanted.abs()
        assert_close(update.weight(i), wanted, bound + store_error(before.pieces(i)[0], wanted), "weight")
        assert_averaged(update, before, i, wanted, bound)
        assert_visible(update, i)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("grad_dtype", [F16, BF16, F32])
@pytest.mark.parametrize("moment_dtype", [F32, BF16])
def test_every_way_to_keep_a_weight(kind, grad_dtype, moment_dtype):
    check_against_float64(*stepped({"kinds": [kind], "grad_dtype": grad_dtype, "moment_dtype": moment_dtype}))


@pytest.mark.parametrize("flags", [0, MAXIMIZE, NO_CORRECTION, ADAPT_ALL, MAXIMIZE | NO_CORRECTION | ADAPT_ALL])
@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("first", [False, True])
def test_options(flags, wd, first):
    """Without decay only ADAPT_ALL scales the steps."""
    update, before = stepped({"kinds": [Kind(F32)], "first": first}, flags=flags, weight_decay=wd)
    check_against_float64(update, before, flags=flags, wd=wd)


def test_scale_and_clip_are_folded_in():
    """The moments' start at zero would hide them: the trust ratio takes any factor out of the direction again."""
    call = {"grad_scale": 1024.0, "sum_sq": 400.0, "max_norm": 2.0, "found_inf": 0.0}
    check_against_float64(*stepped({"kinds": [Kind(F16, master=F32)]}, **call), scale=1024.0, clip=2 / (20 + 1e-6))


def test_groups_and_lr_tensors():
    kinds = [Kind(F32), Kind(F32)]
    options = {"weight_decay": [0.0, 0.25], "flags": [NO_CORRECTION, ADAPT_ALL], "eps": [1e-3, 1e-8]}
    options |= {"beta1": [0.5, 0.9], "beta2": [0.75, 0.99]}
    together, _ = stepped({"kinds": kinds}, lrs=[0.5, 0.125], lr=9.0, **options)
    for block, lr in enumerate((0.5, 0.125)):
        alone, _ = stepped({"kinds": kinds}, lr=lr, **{key: values[block] for key, values in options.items()})
        for i in range(len(alone.params)):
            if alone.pieces(i)[2] == block:
                assert torch.equal(together.weight(i), alone.weight(i))
                assert torch.equal(together.moment(1, i), alone.moment(1, i))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("moment_dtype", [F32, BF16])
def test_the_python_reference_has_the_same_bits(kind, moment_dtype):
    call = {"grad_scale": 64.0, "sum_sq": 9.0, "max_norm": 1.0, "found_inf": 0.0}
    compiled, _ = stepped({"kinds": [kind], "moment_dtype": moment_dtype}, **call)
    reference, _ = stepped({"kinds": [kind], "moment_dtype": moment_dtype}, **call, op=lamb_module.op.reference)
    for a, b in zip(compiled.tensors, reference.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# ---- the trust ratio ----


def one(weights, grads, *, op=None, **call) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of one tensor before and after a step with empty moments."""
    update = Update([Kind(F32)], shapes=((len(weights),),), first=True)
    update.params[0].copy_(torch.tensor(weights))
    update.grads[0].copy_(torch.tensor(grads))
    before = update.weight(0).clone()
    update.lamb(op=op, **call)
    return before, update.weight(0)


@BACKENDS
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e5, 1e30])
def test_a_step_is_a_fraction_of_the_weights(op, scale):
    """Whatever the size of weights and gradients, and where fp32 has no squares of them."""
    before, after = one([scale * x for x in (1.0, -2.0, 2.0)], [1.0, -1.0, 3.0], op=op, eps=0.0, weight_decay=1e-40)
    assert norm(after.double() - before.double()) == pytest.approx(LR * norm(before), rel=1e-5)


@BACKENDS
def test_small_directions_have_a_norm(op):
    """u = 1e-30: its square is 0 in fp32, and the ratio would be 1."""
    before, after = one([1.0, 1.0], [1e-30, 1e-30], op=op, eps=1.0, weight_decay=0.0, flags=ADAPT_ALL)
    assert torch.allclose(after, before * (1 - LR), rtol=1e-6, atol=0)


@BACKENDS
@pytest.mark.parametrize("flags", [0, ADAPT_ALL])
def test_zero_weights_take_steps_of_lr(op, flags):
    _, after = one([0.0] * 3, [2.0, -3.0, 0.5], op=op, flags=flags)
    assert torch.allclose(after, torch.tensor([-LR, LR, -LR]), rtol=1e-4, atol=0)


@BACKENDS
def test_no_direction_leaves_the_weights(op):
    """0 / 0 is no ratio."""
    before, after = one([1.0, -2.0], [0.0, 0.0], op=op, weight_decay=0.0, flags=ADAPT_ALL)
    assert torch.equal(before, after)


@BACKENDS
def test_decay_alone_is_a_direction(op):
    """u = wd p: the ratio takes the decay out again."""
    before, after = one([1.0, -2.0], [0.0, 0.0], op=op, weight_decay=0.5)
    assert torch.allclose(after, before * (1 - LR), rtol=1e-6, atol=0)


@BACKENDS
@pytest.mark.parametrize(("flags", "wd"), [(0, 0.0), (ADAPT_ALL, 0.0), (0, 1e-30), (ADAPT_ALL, 1e-30)])
def test_who_adapts(op, flags, wd):
    before, after = one([30.0, 40.0], [1.0, 1.0], op=op, flags=flags, weight_decay=wd)
    length = LR * 50 if flags or wd else LR * math.sqrt(2)
    assert norm(after - before) == pytest.approx(length, rel=1e-4)


@BACKENDS
def test_without_bias_correction_the_ratio_makes_up_for_it(op):
    """(1 - beta1) / sqrt(1 - beta2) is a factor of the direction: gone with a ratio, and there without."""
    options = {"op": op, "beta2": 0.75, "eps": 0.0, "weight_decay": 0.0}
    for flags, factor in ((ADAPT_ALL, 1.0), (0, (1 - B1) / math.sqrt(1 - 0.75))):
        before, plain = one([3.0, 4.0], [1.0, 1.0], flags=flags, **options)
        _, raw = one([3.0, 4.0], [1.0, 1.0], flags=flags | NO_CORRECTION, **options)
        assert torch.allclose(raw - before, factor * (plain - before), rtol=1e-3, atol=0)


@BACKENDS
def test_the_norm_is_of_the_direction_from_the_stored_moments(op):
    """A first moment of 1 + 2^-8 + 2^-12 is stored as 1 + 2^-7 in bf16; the step is lr |p| long for the stored one."""
    update = Update([Kind(F32)], shapes=((64,),), moment_dtype=BF16)
    update.params[0].fill_(1.0)
    update.grads[0].fill_(10 * (1 + 2.0**-8 + 2.0**-12) - 9)
    update.buffers[0][0].fill_(1.0)
    before = update.weight(0).clone()
    update.lamb(op=op, weight_decay=0.0, flags=ADAPT_ALL)
    assert (update.moment(0, 0) == 1 + 2.0**-7).all()
    assert norm(update.weight(0).double() - before.double()) == pytest.approx(LR * norm(before), rel=1e-5)


@BACKENDS
@pytest.mark.parametrize("where", ["weight", "grad", "moment"])
def test_a_nan_shows_in_every_weight_of_its_tensor(op, where):
    """It is in a norm; another tensor has nothing to do with it."""
    update = Update([Kind(F32)], shapes=((3,), (5,)))
    target = {"weight": update.params[0], "grad": update.grads[0], "moment": update.buffers[0][0][16:19]}[where]
    target[1] = math.nan
    update.lamb(op=op)
    assert update.weight(0).isnan().all()
    assert not update.weight(1).isnan().any()


@BACKENDS
def test_an_infinite_weight_does_not_reach_the_moments(op):
    update = Update([Kind(F32)], shapes=((3,),))
    update.params[0][1] = math.inf
    update.lamb(op=op, weight_decay=0.0)  # no ratio
    assert update.weight(0).isinf().tolist() == [False, True, False]
    assert update.moment(0, 0).isfinite().all()


# ---- bits, threads, skips ----


@pytest.mark.parametrize("n", [1, 15, 16, 17, 1024, 1025, 16385, 40000])
def test_the_formula_at_every_tail(n):
    update, before = (Update([Kind(F32)], shapes=((n,),)) for _ in range(2))
    update.lamb(grad_scale=3.0)
    p, m, v = before.weight(0).numpy(), before.moment(0, 0).numpy(), before.moment(1, 0).numpy()
    options = {"lr": LR, "beta1": B1, "beta2": B2, "eps": EPS, "weight_decay": WD}
    _host.lamb(p, m, v, before.grads[0].numpy(), before.step(0) + 1, inv_scale=_host.inverse_scale(3.0), **options)
    for wanted, got in ((p, update.weight(0)), (m, update.moment(0, 0)), (v, update.moment(1, 0))):
        assert np.array_equal(wanted.view(np.uint32), got.numpy().view(np.uint32))


def test_same_bits_for_any_number_of_threads():
    results, threads = [], torch.get_num_threads()
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            results.append(stepped({"kinds": [Kind(F32)], "shapes": ((200_007,), (5,), (70_000,))})[0].tensors)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@BACKENDS
@pytest.mark.parametrize("found_inf", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_skipped_step_changes_nothing(kind, found_inf, op):
    update = Update([kind])
    for grad in update.grads:
        grad.fill_(torch.nan)
    before = update.snapshot()
    update.lamb(found_inf=found_inf, op=op)
    for a, b in zip(before, update.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda u: u.buffers[0].__setitem__(0, torch.zeros(64)), "of its block's exp_avgs on, which has 64"),
        (lambda u: u.buffers[1].__setitem__(0, torch.zeros(0)), "of its block's exp_avg_sqs on, which has 0"),
        (lambda u: u.buffers[1].__setitem__(0, u.buffers[1][0].half()), r"exp_avg_sqs\[0\] must have dtype"),
        (lambda u: u.buffers[0].pop(), "exp_avgs has 0 entries and steps 1"),
    ],
)
def test_bad_calls_raise_and_change_nothing(spoil, message):
    update = Update([Kind(F32)])
    spoil(update)
    before = update.snapshot()
    with pytest.raises(RuntimeError, match=message):
        update.lamb()
    assert all(torch.equal(a, b) for a, b in zip(before, update.tensors, strict=True))


@pytest.mark.parametrize("name", ["beta1", "beta2", "eps", "weight_decay", "ema_decay", "flags"])
def test_one_value_per_group(name):
    update = Update([Kind(F32)])
    with pytest.raises(RuntimeError, match=f"lamb_: {name} has 2 entries and lr 1"):
        update.lamb(**{name: [0, 0]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, r"lr\[0\] is -1.0"),
        ({"beta1": 1.0}, r"beta1\[0\] is 1.0"),
        ({"beta2": math.nan}, r"beta2\[0\] is nan"),
        ({"eps": -1e-8}, r"eps\[0\] is -1e-08"),
        ({"weight_decay": math.nan}, r"weight_decay\[0\] is nan"),
        ({"ema_decay": 1.0}, r"ema_decay\[0\] is 1.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    update = Update([Kind(F32)])
    before = update.snapshot()
    with pytest.raises(ValueError, match=f"lamb_: {message}"):
        update.lamb(op=lamb_module.lamb_, **change)
    assert all(torch.equal(a, b) for a, b in zip(before, update.tensors, strict=True))

"""lion_ on the CPU: against float64, its Python reference and the formula of csrc/math.

What the updates share is tested in test_adamw.py, and here once more where lion_ has code of its own.
"""

import math

import numpy as np
import pytest
import torch

import amp_kernels.ops.lion as lion_module
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
MAXIMIZE = 1
LR, B1, B2, WD = 1e-2, 0.9, 0.99, 0.1  # of Update.lion


def stepped(update_args: dict, **call) -> tuple[Update, Update]:
    update, before = Update(moments=1, **update_args), Update(moments=1, **update_args)
    update.lion(**call)
    for got, kept in zip(update.grads, before.grads, strict=True):
        assert torch.equal(got, kept)
    return update, before


def check_against_float64(update: Update, before: Update, *, flags=0, scale=1.0, clip=1.0, lr=LR):
    for i, grad in enumerate(before.grads):
        p, m = before.weight(i).double(), before.moment(0, i).double()
        assert update.step(i) == before.step(i) + 1
        g = flat(grad).double() / scale * clip * (-1 if flags & MAXIMIZE else 1)
        c = B1 * m + (1 - B1) * g
        doubt = c.abs() <= 8 * U * (m.abs() + g.abs())  # rounding may turn the sign
        assert doubt.sum() <= 2
        wanted = p - lr * (c.sign() + WD * p)
        bound = 3 * U * p.abs() + U * lr + 2 * U * wanted.abs() + 2 * lr * doubt
        assert_close(update.weight(i), wanted, bound + store_error(before.pieces(i)[0], wanted), "weight")
        assert_averaged(update, before, i, wanted, bound)
        wanted = B2 * m + (1 - B2) * g
        half = 2.0**-8 if update.moment_dtype == BF16 else 0.0
        assert_close(update.moment(0, i), wanted, half * wanted.abs() + 6 * U * (m.abs() + g.abs()), "exp_avg")
        assert_visible(update, i)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("grad_dtype", [F16, BF16, F32])
def test_every_way_to_keep_a_weight(kind, grad_dtype):
    check_against_float64(*stepped({"kinds": [kind], "grad_dtype": grad_dtype}))


@pytest.mark.parametrize("flags", [0, MAXIMIZE])
@pytest.mark.parametrize("moment_dtype", [F32, BF16])
def test_options(flags, moment_dtype):
    check_against_float64(*stepped({"kinds": [Kind(F32)], "moment_dtype": moment_dtype}, flags=flags), flags=flags)


def test_scale_and_clip_are_folded_in():
    """They do not change a sign, but the direction, a mean of old and new, and the moment."""
    call = {"grad_scale": 1024.0, "sum_sq": 400.0, "max_norm": 2.0, "found_inf": 0.0}
    check_against_float64(*stepped({"kinds": [Kind(F16, master=F32)]}, **call), scale=1024.0, clip=2 / (20 + 1e-6))


def test_groups_and_lr_tensors():
    kinds = [Kind(F32), Kind(F32)]
    options = {"weight_decay": [0.0, 0.25], "flags": [0, MAXIMIZE], "beta1": [0.5, 0.9], "beta2": [0.75, 0.99]}
    together, _ = stepped({"kinds": kinds}, lrs=[0.5, 0.125], lr=9.0, **options)
    for block, lr in enumerate((0.5, 0.125)):
        alone, _ = stepped({"kinds": kinds}, lr=lr, **{key: values[block] for key, values in options.items()})
        for i in range(len(alone.params)):
            if alone.pieces(i)[2] == block:
                assert torch.equal(together.weight(i), alone.weight(i))
                assert torch.equal(together.moment(0, i), alone.moment(0, i))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_python_reference_has_the_same_bits(kind):
    call = {"grad_scale": 64.0, "sum_sq": 9.0, "max_norm": 1.0, "found_inf": 0.0}
    compiled, _ = stepped({"kinds": [kind]}, **call)
    reference, _ = stepped({"kinds": [kind]}, **call, op=lion_module.op.reference)
    for a, b in zip(compiled.tensors, reference.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", [None, lion_module.op.reference], ids=["cpu", "reference"])
def test_a_nan_gradient_reaches_the_weight(op):
    update = Update([Kind(F32)], shapes=((3,),), moments=1)
    update.grads[0][1] = math.nan
    update.lion(op=op)
    assert update.weight(0).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("n", [1, 15, 16, 17, 1024, 1025, 16385, 40000])
def test_bit_for_bit_the_formula_at_every_tail(n):
    update, before = (Update([Kind(F32)], shapes=((n,),), moments=1) for _ in range(2))
    update.lion(grad_scale=3.0)
    p, m = before.weight(0).numpy(), before.moment(0, 0).numpy()
    options = {"lr": LR, "beta1": B1, "beta2": B2, "weight_decay": WD, "inv_scale": _host.inverse_scale(3.0)}
    _host.lion(p, m, before.grads[0].numpy(), **options)
    assert np.array_equal(p.view(np.uint32), update.weight(0).numpy().view(np.uint32))
    assert np.array_equal(m.view(np.uint32), update.moment(0, 0).numpy().view(np.uint32))


@pytest.mark.parametrize("found_inf", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_skipped_step_changes_nothing(kind, found_inf):
    update = Update([kind], moments=1)
    for grad in update.grads:
        grad.fill_(torch.nan)
    before = update.snapshot()
    update.lion(found_inf=found_inf)
    for a, b in zip(before, update.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda u: u.buffers[0].__setitem__(0, torch.zeros(64)), "of its block's exp_avgs on, which has 64"),
        (lambda u: u.buffers[0].__setitem__(0, torch.zeros(0)), "of its block's exp_avgs on, which has 0"),
        (lambda u: u.buffers[0].__setitem__(0, u.buffers[0][0].half()), r"exp_avgs\[0\] must have dtype"),
        (lambda u: u.buffers[0].pop(), "exp_avgs has 0 entries and steps 1"),
    ],
)
def test_bad_calls_raise_and_change_nothing(spoil, message):
    update = Update([Kind(F32)], moments=1)
    spoil(update)
    before = update.snapshot()
    with pytest.raises(RuntimeError, match=message):
        update.lion()
    assert all(torch.equal(a, b) for a, b in zip(before, update.tensors, strict=True))


@pytest.mark.parametrize("name", ["beta1", "beta2", "weight_decay", "ema_decay", "flags"])
def test_one_value_per_group(name):
    update = Update([Kind(F32)], moments=1)
    with pytest.raises(RuntimeError, match=f"lion_: {name} has 2 entries and lr 1"):
        update.lion(**{name: [0, 0]})

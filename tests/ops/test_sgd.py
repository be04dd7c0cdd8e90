"""sgd_ on the CPU: against float64, its Python reference and torch, and the first step after an overflow.

What adamw_ and sgd_ share is tested in test_adamw.py, and here once more where sgd_ has code of its own.
"""

import math

import numpy as np
import pytest
import torch

import amp_kernels.ops.sgd as sgd_module
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
MAXIMIZE, NESTEROV = 1, 2
MOMENTA = [(0.0, 0.0, 0), (0.9, 0.0, 0), (0.9, 0.3, 0), (0.9, 0.0, NESTEROV), (0.9, 0.0, NESTEROV | MAXIMIZE)]


def stepped(update_args: dict, *, momentum=0.9, **call) -> tuple[Update, Update]:
    update, before = Update(moments=1, **update_args), Update(moments=1, **update_args)
    if momentum == 0.0:
        update.buffers[0] = [b[:0] for b in update.buffers[0]]
    update.sgd(momentum=momentum, **call)
    for got, kept in zip(update.grads, before.grads, strict=True):
        assert torch.equal(got, kept)
    return update, before


def check_against_float64(update: Update, before: Update, *, momentum, dampening, flags, scale=1.0, clip=1.0):
    for i, grad in enumerate(before.grads):
        p, buffer = before.weight(i).double(), before.moment(0, i).double()
        t = before.step(i) + 1
        assert update.step(i) == t
        g = flat(grad).double() / scale * clip * (-1 if flags & MAXIMIZE else 1) + 0.01 * p
        size = g.abs() + p.abs() + buffer.abs()
        if momentum:
            buffer = g if t == 1 else momentum * buffer + (1 - dampening) * g
            half = 2.0**-8 if update.moment_dtype == BF16 else 0.0
            assert_close(update.moment(0, i), buffer, half * buffer.abs() + 6 * U * size, "momentum_buffer")
            g = g + momentum * buffer if flags & NESTEROV else buffer
        wanted = p - 0.01 * g
        bound = 2 * U * p.abs() + 0.01 * 12 * U * size + 2 * U * wanted.abs()
        assert_close(update.weight(i), wanted, bound + store_error(before.pieces(i)[0], wanted), "weight")
        assert_visible(update, i)
        assert_averaged(update, before, i, wanted, bound)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("grad_dtype", [F16, BF16, F32])
def test_every_way_to_keep_a_weight(kind, grad_dtype):
    options = {"momentum": 0.9, "dampening": 0.0, "flags": 0}
    check_against_float64(*stepped({"kinds": [kind], "grad_dtype": grad_dtype}, **options), **options)


@pytest.mark.parametrize(("momentum", "dampening", "flags"), MOMENTA)
@pytest.mark.parametrize("moment_dtype", [F32, BF16])
def test_momentum_options(momentum, dampening, flags, moment_dtype):
    """Parameter 0 takes its first step, where dampening does not count, the others later ones."""
    options = {"momentum": momentum, "dampening": dampening, "flags": flags}
    check_against_float64(*stepped({"kinds": [Kind(F32)], "moment_dtype": moment_dtype}, **options), **options)


def test_scale_and_clip_are_folded_in():
    options = {"momentum": 0.9, "dampening": 0.0, "flags": 0}
    call = {"grad_scale": 1024.0, "sum_sq": 400.0, "max_norm": 2.0, "found_inf": 0.0}
    result = stepped({"kinds": [Kind(F16, master=F32)]}, **options, **call)
    check_against_float64(*result, **options, scale=1024.0, clip=2 / (20 + 1e-6))


def test_groups_and_lr_tensors():
    kinds = [Kind(F32), Kind(F32)]
    together, _ = stepped(
        {"kinds": kinds}, lrs=[0.5, 0.125], lr=9.0, weight_decay=[0.0, 0.25], flags=[0, MAXIMIZE], dampening=[0.0, 0.5]
    )
    for block, call in enumerate(
        [{"lr": 0.5, "weight_decay": 0.0}, {"lr": 0.125, "weight_decay": 0.25, "flags": MAXIMIZE, "dampening": 0.5}]
    ):
        alone, _ = stepped({"kinds": kinds}, **call)
        for i in range(len(alone.params)):
            if alone.pieces(i)[2] == block:
                assert torch.equal(together.weight(i), alone.weight(i))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_agrees_with_the_python_reference(kind, momentum):
    call = {"grad_scale": 64.0, "sum_sq": 9.0, "max_norm": 1.0, "found_inf": 0.0}
    compiled, before = stepped({"kinds": [kind]}, momentum=momentum, **call)
    reference, _ = stepped({"kinds": [kind]}, momentum=momentum, **call, op=sgd_module.op.reference)
    for i in range(len(compiled.params)):
        expected = reference.weight(i).double()
        bound = 4 * U * (before.weight(i).abs() + expected.abs()) + 2 * store_error(kind, expected)
        assert_close(compiled.weight(i), expected, bound, "weight")
        assert compiled.step(i) == reference.step(i)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 1024, 1025, 16385, 40000])
def test_bit_for_bit_the_formula_at_every_tail(n, momentum):
    for steps_before in (0.0, 1.0):
        update, before = Update([Kind(F32)], shapes=((n,),), moments=1), Update([Kind(F32)], shapes=((n,),), moments=1)
        update.steps[0].fill_(steps_before)
        if not momentum:
            update.buffers[0] = [torch.zeros(0)]
        update.sgd(momentum=momentum, grad_scale=3.0, weight_decay=0.1)
        p, b = before.weight(0).numpy(), before.moment(0, 0).numpy()
        options = {"lr": 1e-2, "momentum": momentum, "dampening": 0.0, "weight_decay": 0.1}
        g = before.grads[0].numpy()
        _host.sgd(p, b if momentum else None, g, step=steps_before + 1, inv_scale=_host.inverse_scale(3.0), **options)
        assert np.array_equal(p.view(np.uint32), update.weight(0).numpy().view(np.uint32))
        if momentum:
            assert np.array_equal(b.view(np.uint32), update.moment(0, 0).numpy().view(np.uint32))


def test_first_step_overflows():
    """torch's fused SGD allocates the buffer uninitialised, skips, and takes its content for history from then on."""
    update = Update([Kind(F32)], shapes=((100,),), moments=1, first=True)
    update.buffers[0][0].fill_(torch.nan)  # what uninitialised memory may hold
    start = update.params[0].clone()
    update.sgd(found_inf=1.0)
    assert torch.equal(update.params[0], start)
    assert update.step(0) == 0
    update.sgd(found_inf=0.0, weight_decay=0.0)
    assert update.step(0) == 1
    assert torch.equal(update.moment(0, 0), update.grads[0])
    torch.testing.assert_close(update.params[0], start - 1e-2 * update.grads[0])


@pytest.mark.parametrize("found_inf", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_skipped_step_changes_nothing(kind, found_inf):
    update = Update([kind], moments=1)
    for grad in update.grads:
        grad.fill_(torch.nan)
    before = update.snapshot()
    update.sgd(found_inf=found_inf)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(before, update.tensors, strict=True)
    )


def test_same_bits_for_any_number_of_threads():
    results = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            results.append(
                stepped({"kinds": [Kind(BF16, master=torch.int16)], "shapes": ((300_007,), (5,), (70_000,))})[0].tensors
            )
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(results[0], other, strict=True))


def test_channels_last():
    plain, other = (Update([Kind(F32)], shapes=((3, 4, 5, 6),), moments=1, first=True) for _ in range(2))
    other.params, other.grads = (
        [t.to(memory_format=torch.channels_last) for t in ts] for ts in (other.params, other.grads)
    )
    plain.sgd()
    other.sgd()
    assert other.params[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(other.params[0], plain.params[0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda u: u.grads.__setitem__(0, u.grads[0].t().contiguous().t()), r"grads\[0\] has .* strides \(1, 7\)"),
        (lambda u: u.buffers[0].__setitem__(0, torch.zeros(64)), "of its block's momentum_buffers on, which has 64"),
        (lambda u: u.buffers[0].__setitem__(0, u.buffers[0][0].half()), r"momentum_buffers\[0\] must have dtype"),
        (lambda u: u.buffers[0].pop(), "momentum_buffers has 0 entries and steps 1"),
    ],
)
def test_bad_calls_raise_and_change_nothing(spoil, message):
    update = Update([Kind(F32)], moments=1)
    spoil(update)
    before = update.snapshot()
    with pytest.raises(RuntimeError, match=message):
        update.sgd()
    assert all(torch.equal(a, b) for a, b in zip(before, update.tensors, strict=True))


@pytest.mark.parametrize("name", ["momentum", "dampening", "weight_decay", "ema_decay", "flags"])
def test_one_value_per_group(name):
    update = Update([Kind(F32)], moments=1)
    with pytest.raises(RuntimeError, match=f"sgd_: {name} has 2 entries and lr 1"):
        update.sgd(**{name: [0, 0]})


def test_a_step_between_forward_and_backward_is_noticed():
    update = Update([Kind(F32)], shapes=((4, 4),), moments=1)
    update.params[0].requires_grad_()
    loss = update.params[0].square().sum()
    with torch.no_grad():
        update.sgd()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.5, False), (0.9, 0.0, True)]
)
def test_follows_torch_over_many_steps(momentum, dampening, nesterov):
    g = torch.Generator().manual_seed(9)
    ours = Update([Kind(F32)], shapes=((500,),), moments=1, first=True)
    theirs = torch.nn.Parameter(ours.params[0].clone())
    options = {"momentum": momentum, "dampening": dampening}
    optimizer = torch.optim.SGD([theirs], lr=1e-2, weight_decay=0.01, nesterov=nesterov, foreach=False, **options)
    if not momentum:
        ours.buffers[0] = [torch.zeros(0)]
    for _ in range(20):
        grad = torch.randn(500, generator=g)
        theirs.grad = grad.clone()
        optimizer.step()
        ours.grads = [grad]
        ours.sgd(flags=NESTEROV if nesterov else 0, **options)
    torch.testing.assert_close(ours.params[0], theirs.detach(), rtol=2e-6, atol=2e-6)

"""adamw_ on the CPU: against float64, its reference and csrc/math (bit for bit), and what it must leave alone."""

import math

import numpy as np
import pytest
import torch

import amp_kernels.ops.adamw as adamw_module
from amp_kernels import _host

from .update_oracle import (
    BF16,
    EMA_DECAY,
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
MAXIMIZE, COUPLED = 1, 4


def check_against_float64(update: Update, before: Update, *, scale=1.0, clip=1.0, lr=1e-3, wd=0.01, flags=0, eps=1e-8):
    for i, grad in enumerate(before.grads):
        kind = before.pieces(i)[0]
        p, m, v = before.weight(i).double(), before.moment(0, i).double(), before.moment(1, i).double()
        t = before.step(i) + 1
        assert update.step(i) == t
        g = flat(grad).double() / scale * clip * (-1 if flags & MAXIMIZE else 1)
        if flags & COUPLED:
            g = g + wd * p
        else:
            p = p * (1 - lr * wd)
        wanted_m = m + (1 - 0.9) * (g - m)
        wanted_v = 0.99 * v + (1 - 0.99) * g * g
        largest = torch.maximum(before.moment(2, i).double(), wanted_v) if update.amsgrad else wanted_v
        denominator = (largest / (1 - 0.99**t)).sqrt() + eps
        wanted = p - lr / (1 - 0.9**t) * wanted_m / denominator
        half = update.moment_dtype == BF16
        magnitude = m.abs() + g.abs()
        assert_close(
            update.moment(0, i), wanted_m, (2.0**-8 if half else 0) * wanted_m.abs() + 6 * U * magnitude, "exp_avg"
        )
        relative = (2.0**-8 if half else 6 * U) * (1 + 6 * U)
        assert_close(update.moment(1, i), wanted_v, relative * wanted_v, "exp_avg_sq")
        if update.amsgrad:
            assert_close(update.moment(2, i), largest, relative * largest, "max_exp_avg_sq")
        error_m = 6 * U * magnitude * lr / (1 - 0.9**t) / denominator
        bound = 3 * U * p.abs() + error_m + 12 * U * (wanted - p).abs()
        assert_close(update.weight(i), wanted, bound + store_error(kind, wanted), "weight")
        assert_visible(update, i)
        assert_averaged(update, before, i, wanted, bound)


def stepped(update_args: dict, **call) -> tuple[Update, Update]:
    update, before = Update(**update_args), Update(**update_args)
    update.adamw(**call)
    for got, kept in zip(update.grads, before.grads, strict=True):
        assert torch.equal(got, kept)  # gradients are never written
    return update, before


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("grad_dtype", [F16, BF16, F32])
def test_every_way_to_keep_a_weight(kind, grad_dtype):
    check_against_float64(*stepped({"kinds": [kind], "grad_dtype": grad_dtype}))


@pytest.mark.parametrize("kind", [Kind(F32), Kind(BF16, master=torch.int16)], ids=str)
@pytest.mark.parametrize("flags", [0, MAXIMIZE, COUPLED, MAXIMIZE | COUPLED])
@pytest.mark.parametrize("moment_dtype", [F32, BF16])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_flags_and_moment_dtypes(kind, flags, moment_dtype, amsgrad):
    options = {"kinds": [kind], "moment_dtype": moment_dtype, "amsgrad": amsgrad}
    check_against_float64(*stepped(options, flags=flags), flags=flags)


def test_scale_and_clip_are_folded_in():
    call = {"grad_scale": 1024.0, "sum_sq": 400.0, "max_norm": 2.0, "found_inf": 0.0}
    check_against_float64(*stepped({"kinds": [Kind(BF16, master=F32)]}, **call), scale=1024.0, clip=2 / (20 + 1e-6))
    check_against_float64(*stepped({"kinds": [Kind(F32)]}, sum_sq=1.0, max_norm=2.0))  # never scaled up


def test_first_step():
    check_against_float64(*stepped({"kinds": [Kind(F32)], "first": True}))


def test_groups_have_their_own_options():
    """Two blocks in two groups against two calls with one group each."""
    kinds = [Kind(F32), Kind(F16, master=F32)]
    both = Update(kinds, seed=3)
    both.adamw(
        lr=[1e-3, 5e-2],
        beta1=[0.9, 0.5],
        beta2=[0.99, 0.9],
        eps=[1e-8, 1e-3],
        weight_decay=[0.0, 0.3],
        flags=[COUPLED, MAXIMIZE],
    )
    options = [
        {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "flags": COUPLED},
        {"lr": 5e-2, "beta1": 0.5, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3, "flags": MAXIMIZE},
    ]
    for block, call in enumerate(options):
        alone = Update(kinds, seed=3)
        alone.adamw(**call)
        for i in range(len(alone.params)):
            if alone.pieces(i)[2] == block:
                assert torch.equal(both.weight(i), alone.weight(i))


def test_lr_tensors_override_lr():
    by_tensor, by_number = Update([Kind(F32)] * 2), Update([Kind(F32)] * 2)
    lrs = [torch.tensor(0.25).item(), torch.tensor(0.003).item()]
    by_tensor.adamw(lrs=lrs, lr=7.0)
    by_number.adamw(lr=lrs)
    for a, b in zip(by_tensor.tensors, by_number.tensors, strict=True):
        assert torch.equal(a, b) or a.isnan().all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_agrees_with_the_python_reference(kind, amsgrad):
    call = {"grad_scale": 64.0, "sum_sq": 9.0, "max_norm": 1.0, "found_inf": 0.0}
    compiled, before = stepped({"kinds": [kind, Kind(F32)], "amsgrad": amsgrad}, **call)
    reference = Update([kind, Kind(F32)], amsgrad=amsgrad)
    reference.adamw(**call, op=adamw_module.op.reference)
    for i in range(len(compiled.params)):
        expected = reference.weight(i).double()
        bound = 8 * U * (before.weight(i).abs() + expected.abs()) + 2 * store_error(before.pieces(i)[0], expected)
        assert_close(compiled.weight(i), expected, bound, "weight")
        assert compiled.step(i) == reference.step(i)
        if compiled.pieces(i)[0].ema:
            size = before.ema(i).abs() + expected.abs()
            assert_close(compiled.ema(i), reference.ema(i).double(), 8 * U * size, "ema")
        if amsgrad:
            assert torch.equal(compiled.moment(2, i), reference.moment(2, i))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 17, 1023, 1024, 1025, 16383, 16384, 16385, 40000])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_bit_for_bit_the_formula_at_every_tail(n, amsgrad):
    """csrc/math compiled for any CPU, in a plain loop, against the op's loops for this CPU."""
    update, before = stepped(
        {"kinds": [Kind(F32, ema=True)], "shapes": ((n,),), "amsgrad": amsgrad},
        grad_scale=3.0,
        sum_sq=50.0,
        max_norm=1.0,
    )
    p, m, v, a = (t.numpy() for t in (before.weight(0), before.moment(0, 0), before.moment(1, 0), before.ema(0)))
    largest = before.moment(2, 0).numpy() if amsgrad else None
    scalars = {"inv_scale": _host.inverse_scale(3.0), "clip": _host.clip_factor(50.0, 1.0)}
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}
    _host.adamw(p, m, v, before.grads[0].numpy(), step=1, max_v=largest, **options, **scalars)
    _host.ema(a, p, EMA_DECAY)
    pairs = [(p, update.weight(0)), (m, update.moment(0, 0)), (v, update.moment(1, 0)), (a, update.ema(0))]
    if amsgrad:
        pairs.append((largest, update.moment(2, 0)))
    for wanted, got in pairs:
        assert np.array_equal(wanted.view(np.uint32), got.numpy().view(np.uint32))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_same_bits_for_any_number_of_threads(kind):
    results = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            results.append(stepped({"kinds": [kind], "shapes": ((300_007,), (5,), (70_000,))})[0].tensors)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(results[0], other, strict=True))


def test_elements_of_nobody_stay():
    """The gaps between the parameters in a block, NaN before the step, are NaN after it, and nothing else is."""
    update = Update([Kind(BF16, master=F32), Kind(F32, shadow=F16, ema=True)], amsgrad=True)
    taken = [torch.zeros_like(b, dtype=torch.bool) for b in update.buffers[0]]
    for i in range(len(update.params)):
        _, piece, block, _ = update.pieces(i)
        taken[block][piece] = True
    buffers = [*update.buffers, update.maxima, update.masters, update.shadows, update.emas]
    for blocks in buffers:
        for block, buffer in enumerate(blocks):
            if buffer.numel():
                buffer[~taken[block]] = torch.nan
    update.adamw()
    for blocks in buffers:
        for block, buffer in enumerate(blocks):
            if buffer.numel():
                assert torch.equal(buffer.isnan(), ~taken[block])


@pytest.mark.parametrize("found_inf", [1.0, 2.0, 1e-30, math.inf])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_skipped_step_changes_nothing(kind, found_inf):
    """Also for a flag of 2, the sum of two devices, which torch's fused kernels take for "no overflow"."""
    update = Update([kind], amsgrad=True)
    update.grads[0].fill_(torch.nan)
    update.grads[3][-1] = torch.inf
    before = update.snapshot()
    update.adamw(found_inf=found_inf, sum_sq=math.nan, max_norm=1.0, grad_scale=2.0)
    for kept, now in zip(before, update.tensors, strict=True):
        assert (
            torch.equal(kept.view(torch.uint8) if kept.dim() else kept, now.view(torch.uint8) if now.dim() else now)
            or kept.isnan().any()
        )
        assert torch.equal(kept.isnan(), now.isnan())


def test_no_recheck_after_unscale():
    """Gradients that turn bad after the check reach the weights: the flag decides, as in torch."""
    update = Update([Kind(F32)])
    update.grads[3][5] = torch.nan
    update.adamw(found_inf=0.0)
    assert update.weight(3).isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize(
    "relayout",
    [
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    ],
    ids=["channels_last", "permuted"],
)
def test_dense_strides_in_memory_order(relayout):
    """A parameter in another memory format is updated like the contiguous one, and keeps its format."""
    plain = Update([Kind(F32)], shapes=((3, 4, 5, 6),), first=True)
    other = Update([Kind(F32)], shapes=((3, 4, 5, 6),), first=True)
    other.params, other.grads = [relayout(other.params[0])], [relayout(other.grads[0])]
    strides = other.params[0].stride()
    assert strides != plain.params[0].stride()
    plain.adamw()
    other.adamw()
    assert other.params[0].stride() == strides
    assert torch.equal(other.params[0], plain.params[0])


def test_strides_of_size_one_dimensions_do_not_count():
    update, plain = Update([Kind(F32)], shapes=((8, 1),)), Update([Kind(F32)], shapes=((8, 1),))
    update.grads[0] = torch.empty_strided((8, 1), (1, 8)).copy_(update.grads[0])
    assert update.grads[0].stride() != update.params[0].stride()
    update.adamw()
    plain.adamw()
    assert torch.equal(update.params[0], plain.params[0])


def changed(name, i, change):
    """Replaces entry i of one of the update's lists by ``change(entry)``."""
    return lambda update: getattr(update, name).__setitem__(i, change(getattr(update, name)[i]))


def moments(k, change):
    return lambda update: update.buffers[k].__setitem__(0, change(update.buffers[k][0]))


def row(i, *values):
    return lambda update: update.layout[i].copy_(torch.tensor(values))


def with_gaps(update):
    update.params[3] = update.grads[3] = torch.zeros(2062)[::2]


BAD_CALLS = {
    "strides": (
        changed("grads", 0, lambda t: t.t().contiguous().t()),
        r"grads\[0\] .* \(1, 7\), params\[0\] .* \(5, 1\)",
    ),
    "shape": (changed("grads", 3, lambda t: t[:-1]), r"grads\[3\] has shape \(1030\)"),
    "gaps": (with_gaps, r"params\[3\] must cover"),
    "grad dtype": (changed("grads", 3, torch.Tensor.double), r"grads\[3\] must have dtype .*; got float64"),
    "param dtype": (changed("params", 3, torch.Tensor.double), r"params\[3\] must have dtype .*; got float64"),
    "moment dtype": (moments(1, torch.Tensor.half), r"exp_avg_sqs\[0\] must have dtype float32, bfloat16; got float16"),
    "missing grad": (lambda u: u.grads.pop(), "there are 5 params and 4 grads"),
    "missing block": (lambda u: u.masters.pop(), "masters has 0 entries and steps 1"),
    "block": (row(2, 1, 0, 0, 0, 2), r"layout\[2\] names block 1; there are 1"),
    "group": (row(2, 0, 0, 0, -1, 2), r"layout\[2\] names group -1"),
    "index": (row(2, 0, 0, 0, 0, -1), r"layout\[2\] has index -1; accepted: 0 to 4294967295"),
    "large index": (row(2, 0, 0, 0, 0, 1 << 32), r"layout\[2\] has index 4294967296"),
    "slot": (
        row(2, 0, 0, 5, 0, 2),
        r"params\[2\] needs 1 elements from element 5 of its block's steps on, which has 5",
    ),
    "offset": (
        row(4, 0, 1 << 40, 4, 0, 4),
        r"params\[4\] needs 17003 elements from element .* of its block's exp_avgs on",
    ),
    "end": (row(4, 0, 2000, 4, 0, 4), r"params\[4\] needs 17003 elements from element 2000"),
    "overflowing end": (row(4, 0, (1 << 63) - 16, 4, 0, 4), r"params\[4\] needs 17003 elements"),
    "negative offset": (row(4, 0, -16, 4, 0, 4), r"params\[4\] needs 17003 elements from element -16"),
    "layout shape": (lambda u: setattr(u, "layout", u.layout[:, :4].contiguous()), r"layout .* shape \(5, 5\)"),
    "layout dtype": (lambda u: setattr(u, "layout", u.layout.int()), "layout must have dtype int64"),
    "ema dtype": (changed("emas", 0, torch.Tensor.bfloat16), r"emas\[0\] must have dtype float32; got bfloat16"),
    "ema size": (changed("emas", 0, lambda t: torch.zeros(64)), r"of its block's emas on, which has 64"),
    "missing ema": (lambda u: u.emas.pop(), "emas has 0 entries and steps 1"),
    "maximum size": (changed("maxima", 0, lambda t: torch.zeros(64)), "block's max_exp_avg_sqs on, which has 64"),
    "maximum dtype": (changed("maxima", 0, torch.Tensor.half), r"max_exp_avg_sqs\[0\] must have dtype .*; got float16"),
    "no moments": (moments(0, lambda t: t[:0]), r"exp_avgs on, which has 0"),
    "master of fp32": (changed("masters", 0, lambda t: torch.zeros(50_000)), r"params\[0\] is float32 .* has masters"),
    "shadow in fp32": (changed("shadows", 0, lambda t: torch.zeros(50_000)), "has float32 shadows"),
    "buffer strides": (moments(0, lambda t: torch.zeros(100_000)[::2]), r"exp_avgs\[0\] must be contiguous"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_raise_and_change_nothing(case):
    spoil, message = BAD_CALLS[case]
    update = Update([Kind(F32)])
    spoil(update)
    before = update.snapshot()
    with pytest.raises(RuntimeError, match=message):
        update.adamw()
    assert all(torch.equal(a, b) for a, b in zip(before, update.tensors, strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"lr": [1e-3, 1e-3]}, "beta1 has 1 entries and lr 2"),
        ({"ema_decay": [0.5, 0.5]}, "ema_decay has 2 entries and lr 1"),
        ({"lrs": [1.0, 2.0]}, "lrs has 2 entries and lr 1"),
        ({"found_inf": [0.0, 0.0]}, r"found_inf must have one element; got shape \(2\)"),
        ({"sum_sq": 1}, "sum_sq must have dtype float32; got int64"),
    ],
)
def test_bad_scalars_raise_and_change_nothing(call, message):
    update = Update([Kind(F32)])
    before = update.snapshot()
    with pytest.raises(RuntimeError, match=message):
        update.adamw(**call)
    assert all(torch.equal(a, b) for a, b in zip(before, update.tensors, strict=True))


def test_shadows_of_half_params_are_refused():
    update = Update([Kind(BF16, shadow=F16)])
    with pytest.raises(RuntimeError, match="bfloat16 and its block has float16 shadows"):
        update.adamw()


def test_a_step_between_forward_and_backward_is_noticed():
    update = Update([Kind(F32)], shapes=((4, 4),))
    update.params[0].requires_grad_()
    loss = update.params[0].square().sum()  # saves the parameter
    with torch.no_grad():
        update.adamw()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_many_tiny_parameters():
    update, before = stepped({"kinds": [Kind(F32)], "shapes": ((3,),) * 3000})
    assert all(not torch.equal(a, b) for a, b in zip(update.params, before.params, strict=True))
    check_against_float64(update, before)


@pytest.mark.parametrize("fused", [False, True])
def test_follows_torch_over_many_steps(fused):
    """A parameter that misses gradients keeps its own step count: bias correction is per parameter, as in torch."""
    g = torch.Generator().manual_seed(8)
    weights = [torch.randn(500, generator=g), torch.randn(33, 3, generator=g)]
    theirs = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, fused=fused, foreach=False)
    ours = Update([Kind(F32)], shapes=((500,), (33, 3)), first=True)
    ours.params = weights
    layout = ours.layout.clone()
    for step in range(20):
        grads = [torch.randn(w.shape, generator=g) for w in weights]
        active = [0, 1] if step % 3 else [0]
        for i, t in enumerate(theirs):
            t.grad = grads[i] if i in active else None
        optimizer.step()
        ours.params, ours.grads, ours.layout = [weights[i] for i in active], [grads[i] for i in active], layout[active]
        ours.adamw(lr=1e-2, weight_decay=0.1)
    assert ours.steps[0].tolist() == [20.0, 13.0]
    for w, t in zip(weights, theirs, strict=True):
        torch.testing.assert_close(w, t.detach(), rtol=2e-6, atol=2e-6)

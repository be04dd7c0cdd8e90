"""The update ops on the CPU, each rule by its row of the table: against float64, the reference and the formula (bit for bit),
and what a step must leave alone."""

import math

import numpy as np
import pytest
import torch

from amp_kernels import _host
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._updates.op import RULES
from amp_kernels._updates.samples import Kind
from amp_kernels._updates.state import COUPLED_DECAY, MAXIMIZE

from ..helpers.updates import KINDS, Update
from .moments8 import SPLIT24
from .update_rules import BF16, EMA_DECAY, F16, F32, TABLE, check_against_float64, formula

RULE = pytest.mark.parametrize("rule", TABLE)
SCALED = {"grad_scale": 1024.0, "sum_sq": 400.0, "max_norm": 2.0, "found_inf": 0.0}
OF_UPDATE = ("shapes", "grad_dtype", "moment_dtype", "optional", "first")


def stepped(rule, kinds, op=None, **call) -> tuple[Update, Update]:
    """After and before a step; ``call``: arguments of both."""
    made = {key: call.pop(key) for key in OF_UPDATE if key in call}
    return Update(rule, kinds, **made).step(op, **call), Update(rule, kinds, **made)


def assert_same(update, other):
    torch.testing.assert_close([*update.tensors], [*other.tensors], rtol=0, atol=0, equal_nan=True)


def test_every_rule_has_a_row():
    assert set(TABLE) == set(RULES)


# ---- the formula


@RULE
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("grad_dtype", [F16, BF16, F32])
def test_every_way_to_keep_a_weight(rule, kind, grad_dtype):
    check_against_float64(*stepped(rule, [kind], grad_dtype=grad_dtype))


@pytest.mark.parametrize(("rule", "call"), [(rule, call) for rule, row in TABLE.items() for call in row.calls])
@pytest.mark.parametrize("kind", [Kind(F32), Kind(BF16, master=torch.int16)], ids=str)
@pytest.mark.parametrize("moment_dtype", [F32, BF16])
@pytest.mark.parametrize("first", [False, True])
def test_options(rule, call, kind, moment_dtype, first):
    first &= not call.get("flags", 0) & COUPLED_DECAY  # it would divide by gradients that cancel
    updates = stepped(rule, [kind], moment_dtype=moment_dtype, first=first, **call)
    check_against_float64(*updates, **{key: value for key, value in call.items() if key not in OF_UPDATE})


@RULE
@pytest.mark.parametrize("kind", [Kind(BF16, master=F32), Kind(F16, master=F32)], ids=str)
def test_scale_and_clip_are_folded_in(rule, kind):
    check_against_float64(*stepped(rule, [kind], **SCALED), scale=1024.0, clip=2 / (20 + 1e-6))
    check_against_float64(*stepped(rule, [kind], sum_sq=1.0, max_norm=2.0))  # never scaled up


@RULE
def test_groups_have_their_own_options(rule):
    """Two blocks in two groups against two calls with one option for both; learning rates and weight decays also as tensors."""
    kinds, options = [Kind(F32), Kind(F16, master=F32)], RULES[rule].declared.options
    each = {name: [value, value / 2 + 0.01] for name, value in options.items()}
    each |= {"lr": [0.25, 0.0625], "flags": [0, MAXIMIZE]}
    by_number, _ = stepped(rule, kinds, **each)
    by_tensor, _ = stepped(
        rule, kinds, lrs=each["lr"], weight_decays=each["weight_decay"], **{**each, "lr": 7.0, "weight_decay": 7.0}
    )
    assert_same(by_number, by_tensor)
    for block in range(2):
        alone, _ = stepped(rule, kinds, **{name: values[block] for name, values in each.items()})
        for i in (i for i in range(len(alone.params)) if alone.place(i)[2] == block):
            assert torch.equal(by_number.weight(i), alone.weight(i))
            for k in range(len(alone.moments)):
                assert torch.equal(by_number.moment(k, i), alone.moment(k, i))


@RULE
@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 17, 1023, 1024, 1025, 16383, 16384, 16385, 40000])
@pytest.mark.parametrize("optional", [False, True])
def test_bit_for_bit_the_formula_at_every_tail(rule, n, optional):
    """The formula compiled for any CPU, in a plain loop, against the op's loops for this CPU."""
    call = {"grad_scale": 3.0, "sum_sq": 50.0, "max_norm": 1.0}
    for before_step in (0.0, 1.0):
        update, before = (Update(rule, [Kind(F32, ema=True)], shapes=((n,),), optional=optional) for _ in range(2))
        update.steps[0].fill_(before_step)
        update.step(**call)
        there = [k for k, buffers in enumerate(before.moments) if buffers[0].numel()]
        p, average = before.weight(0).numpy(), before.ema(0).numpy()
        moments = [before.moment(k, 0).numpy() for k in there]
        scalars = {"inv_scale": _host.inverse_scale(3.0), "clip": _host.clip_factor(50.0, 1.0)}
        formula(rule, p, moments, before.grads[0].numpy(), step=before_step + 1, **scalars)
        _host.ema(average, p, EMA_DECAY)
        got = [update.weight(0), update.ema(0), *(update.moment(k, 0) for k in there)]
        for a, b in zip(got, [p, average, *moments], strict=True):
            assert np.array_equal(a.numpy().view(np.uint32), b.view(np.uint32))


def shifted(tensor, by):
    """The tensor behind so many elements: an address that is no multiple of 16 bytes."""
    memory = torch.empty(tensor.numel() + by, dtype=tensor.dtype)[by:]
    return torch.as_strided(memory, tensor.shape, tensor.stride(), memory.storage_offset()).copy_(tensor)


@RULE
@pytest.mark.parametrize("moment_dtype", [F32, BF16])
@pytest.mark.parametrize("moved", [(), ("params",), ("grads",), ("moments",), ("masters", "shadows", "emas")], ids=str)
def test_emulated_kernels_have_the_cpus_bits(rule, moment_dtype, moved):
    """Every way to keep a weight in one list, with options for each group, around vectors and units; ``moved`` operands begin at odd
    elements. Three steps, the first with moments of 0 or none, the last skipped."""
    kinds, options = [*KINDS, *SPLIT24], RULES[rule].declared.options
    count = len(kinds)
    each = {name: [value * (1 + i / 8) for i in range(count)] for name, value in options.items()}
    each |= {"flags": [MAXIMIZE * (i % 2) for i in range(count)], "ema_decay": [0.5 + i / 32 for i in range(count)]}
    lrs, decays = [0.01 * i for i in range(count)], [0.1 + i / 64 for i in range(count)]
    for optional, grad_dtype in ((True, None), (False, F32)):
        made = {"optional": optional, "moment_dtype": moment_dtype, "grad_dtype": grad_dtype, "first": optional}
        shapes = ((7, 5), (0, 3), (), (1031,), (128,))
        updates = [Update(rule, kinds, shapes, **made) for _ in range(2)]
        for update in updates:
            update.layout[4::5, 4] += 3 << 32  # rows of a wider tensor, behind its first 3 * 32 elements
            update.layout[4::5, 5:] = torch.tensor([32, 2**34])
            for name in moved:
                lists = update.moments if name == "moments" else [getattr(update, name)]
                for tensors_ in lists:
                    tensors_[:] = [shifted(t, 1) for t in tensors_]
        call = each | ({"lrs": lrs, "weight_decays": decays} if optional else {})
        for scalars in ({}, SCALED, SCALED | {"found_inf": 1.0}):
            updates[0].step(**call, **scalars)
            updates[1].step(RULES[rule].op.emulated, **call, **scalars)
            assert_same(*updates)


@RULE
def test_same_bits_for_any_number_of_threads(rule, same_bits_for):
    kinds = [Kind(F32, shadow=F16), Kind(BF16, master=torch.int16), Kind(F16, stochastic=True, ema=True)]
    same_bits_for((1, 2, 5), lambda: stepped(rule, kinds, shapes=((200_007,), (5,), (70_000,)))[0].tensors)


# ---- of one rule alone (LAMB's trust ratio: test_lamb.py)


@pytest.mark.parametrize("op", [None, REGISTRY["adamw_"].reference], ids=["cpu", "reference"])
def test_the_maximum_keeps_a_nan(op):
    """torch.maximum: NaN if either is; a maximum that drops it would hide a broken moment for good."""
    update = Update("adamw_", [Kind(F32)], shapes=((4,),))
    update.moments[2][0][16:20] = torch.tensor([math.nan, 0.0, 1e30, 1e-30])
    update.grads[0][1] = math.nan
    update.step(op)
    assert update.moment(2, 0).isnan().tolist() == [True, True, False, False]
    assert update.moment(2, 0)[2] == 1e30
    assert update.weight(0).isnan().tolist() == [True, True, False, False]


def test_amsgrad_of_one_block_only():
    kinds = [Kind(F32), Kind(F32)]
    plain, ams = Update("adamw_", kinds, optional=False), Update("adamw_", kinds)
    ams.moments[2][0] = ams.moments[2][0][:0]
    plain.step()
    ams.step()
    for i in range(len(plain.params)):
        same = torch.equal(plain.weight(i), ams.weight(i))
        assert same == (plain.place(i)[2] == 0) or plain.params[i].numel() < 2


def test_first_step_overflows():
    """torch's fused SGD allocates the buffer uninitialised, skips, and takes its content for history from then on."""
    update = Update("sgd_", [Kind(F32)], shapes=((100,),), first=True)
    update.moments[0][0].fill_(torch.nan)  # what uninitialised memory may hold
    start = update.params[0].clone()
    update.step(found_inf=1.0)
    assert torch.equal(update.params[0], start)
    assert update.count(0) == 0
    update.step(found_inf=0.0, weight_decay=0.0)
    assert update.count(0) == 1
    assert torch.equal(update.moment(0, 0), update.grads[0])
    torch.testing.assert_close(update.params[0], start - 1e-2 * update.grads[0])


# ---- what a step leaves alone


@RULE
def test_elements_of_nobody_stay(rule):
    """The gaps between the parameters in a block, NaN before the step, are NaN after it, and nothing else is."""
    update = Update(rule, [Kind(BF16, master=F32, ema=True), Kind(F32, shadow=F16, ema=True)])
    taken = [torch.zeros_like(buffer, dtype=torch.bool) for buffer in update.emas]
    for i in range(len(update.params)):
        _, piece, block, _ = update.place(i)
        taken[block][piece] = True
    buffers = [
        (buffer, taken[block])
        for blocks in (*update.moments, update.masters, update.shadows, update.emas)
        for block, buffer in enumerate(blocks)
        if buffer.numel()
    ]
    for buffer, of_params in buffers:
        buffer[~of_params] = torch.nan
    update.step()
    for buffer, of_params in buffers:
        assert torch.equal(buffer.isnan(), ~of_params)


@RULE
@pytest.mark.parametrize("found_inf", [1.0, 2.0, 1e-30, math.inf])
@pytest.mark.parametrize("op", ["cpu", "reference"])
def test_a_skipped_step_changes_nothing(rule, found_inf, op):
    """Also for a flag of 2, the sum of two devices, which torch's fused kernels take for "no overflow"."""
    update, before = Update(rule, KINDS), Update(rule, KINDS)
    for grad in (*update.grads, *before.grads):
        grad.fill_(torch.nan)
    call = {"found_inf": found_inf, "sum_sq": math.nan, "max_norm": 1.0, "grad_scale": 2.0}
    update.step(REGISTRY[rule].reference if op == "reference" else None, **call)
    assert_same(update, before)


@RULE
def test_no_recheck_after_unscale(rule):
    """Gradients that turn bad after the check reach the weights: the flag decides, as in torch."""
    update = Update(rule, [Kind(F32)])
    update.grads[3][5] = torch.nan
    update.step(found_inf=0.0)
    assert update.weight(3).isnan()[5]
    assert not update.weight(4).isnan().any()


@RULE
def test_strides_of_size_one_dimensions_do_not_count(rule):
    update, plain = (Update(rule, [Kind(F32)], shapes=((8, 1),)) for _ in range(2))
    update.grads[0] = torch.empty_strided((8, 1), (1, 17)).copy_(update.grads[0])
    assert update.grads[0].stride() != update.params[0].stride()
    assert torch.equal(update.step().params[0], plain.step().params[0])


@RULE
def test_many_tiny_parameters(rule):
    update, before = stepped(rule, [Kind(F32)], shapes=((3,),) * 2000)
    assert all(not torch.equal(a, b) for a, b in zip(update.params, before.params, strict=True))
    check_against_float64(update, before)


# ---- calls that the compiled op refuses


def changed(name, i, change):
    """Replaces entry i of one of the update's lists by ``change(entry)``."""
    return lambda update: getattr(update, name).__setitem__(i, change(getattr(update, name)[i]))


def last_moment(change):
    return lambda update: update.moments[-1].__setitem__(0, change(update.moments[-1][0]))


def row(i, *values, rows=(0, 0)):
    return lambda update: update.layout[i].copy_(torch.tensor((*values, *rows)))


def with_gaps(update):
    update.params[3] = update.grads[3] = torch.zeros(2062)[::2]


LAST = r"moments\[\d\]"
BAD_LISTS = {
    "strides": (changed("grads", 0, torch.Tensor.contiguous), r"grads\[0\] .* \(5, 1\), params\[0\] .* \(1, 7\)"),
    "shape": (changed("grads", 3, lambda t: t[:-1]), r"grads\[3\] has shape \(1030\)"),
    "gaps": (with_gaps, r"params\[3\] must cover"),
    "grad dtype": (changed("grads", 3, torch.Tensor.double), r"grads\[3\] must have dtype .*; got float64"),
    "param dtype": (changed("params", 3, torch.Tensor.double), r"params\[3\] must have dtype .*; got float64"),
    "moment dtype": (last_moment(torch.Tensor.half), rf"{LAST} must have dtype float32, bfloat16, uint8; got float16"),
    "moment size": (last_moment(lambda t: torch.zeros(64)), rf"of {LAST} on, which has 64"),
    "missing moment": (lambda u: u.moments[-1].pop(), r"moments has \d entries and steps 1; accepted: \d per block"),
    "missing grad": (lambda u: u.grads.pop(), "there are 5 params and 4 grads"),
    "missing block": (lambda u: u.masters.pop(), "masters has 0 entries and steps 1"),
    "block": (row(2, 1, 0, 0, 0, 2), r"layout\[2\] names block 1; there are 1"),
    "group": (row(2, 0, 0, 0, -1, 2), r"layout\[2\] names group -1"),
    "index": (row(2, 0, 0, 0, 0, -1), r"layout\[2\] has index -1; accepted: 0 to 9223372036854775807"),
    "width": (row(4, 0, 1120, 4, 0, 4, rows=(48, 64)), r"layout\[4\] has width 48 and pitch 64; accepted: multiples of 32"),
    "pitch": (row(4, 0, 1120, 4, 0, 4, rows=(64, 32)), r"layout\[4\] has width 64 and pitch 32; .* of at most the pitch"),
    "no width": (row(4, 0, 1120, 4, 0, 4, rows=(0, 32)), r"layout\[4\] has width 0 and pitch 32; .* or 0 and 0"),
    "far rows": (row(4, 0, 1120, 4, 0, 4, rows=(32, 2**34 + 32)), r"pitch 17179869216; .* a pitch of at most 2\^34"),
    "part of a row": (row(4, 0, 1120, 4, 0, 4, rows=(32, 64)), r"layout\[4\] has width 32 and 17003 elements; .* whole rows"),
    "slot": (row(2, 0, 0, 5, 0, 2), r"params\[2\] needs 1 elements from element 5 of steps\[0\] on, which has 5"),
    "offset": (row(4, 0, 1 << 40, 4, 0, 4), r"params\[4\] needs 17003 elements from element .* of moments\[0\] on"),
    "end": (row(4, 0, 2000, 4, 0, 4), r"params\[4\] needs 17003 elements from element 2000"),
    "overflowing end": (row(4, 0, (1 << 63) - 16, 4, 0, 4), r"params\[4\] needs 17003 elements"),
    "negative offset": (row(4, 0, -16, 4, 0, 4), r"params\[4\] needs 17003 elements from element -16"),
    "layout shape": (lambda u: setattr(u, "layout", u.layout[:, :4].contiguous()), r"layout .* shape \(5, 7\)"),
    "layout dtype": (lambda u: setattr(u, "layout", u.layout.int()), "layout must have dtype int64"),
    "ema dtype": (changed("emas", 0, lambda t: t.bfloat16()), r"emas\[0\] must have dtype float32; got bfloat16"),
    "ema size": (changed("emas", 0, lambda t: torch.zeros(64)), r"of emas\[0\] on, which has 64"),
    "missing ema": (lambda u: u.emas.pop(), "emas has 0 entries and steps 1"),
    "master of fp32": (changed("masters", 0, lambda t: torch.zeros(50_000)), r"params\[0\] is float32 .* has masters"),
    "shadow in fp32": (changed("shadows", 0, lambda t: torch.zeros(50_000)), "has float32 shadows"),
    "buffer strides": (last_moment(lambda t: torch.zeros(100_000)[::2]), rf"{LAST} must be contiguous"),
}  # fmt: skip


def assert_refused(update, message, **call):
    before = [t.clone() for t in update.tensors]
    with pytest.raises(RuntimeError, match=f"^{update.declared.name}: .*{message}"):
        update.step(**call)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, update.tensors, strict=True))


@RULE
@pytest.mark.parametrize("case", BAD_LISTS)
def test_bad_lists_raise_and_change_nothing(rule, case):
    spoil, message = BAD_LISTS[case]
    update = Update(rule, [Kind(F32)])
    spoil(update)
    assert_refused(update, message)


@RULE
def test_required_moments_must_be_there(rule):
    update = Update(rule, [Kind(F32)])
    for k, name in enumerate(update.declared.moments):
        kept, update.moments[k] = update.moments[k], [torch.zeros(0)]
        if name in update.declared.optional:
            update.step()
        else:
            assert_refused(update, rf"of moments\[{k}\] on, which has 0")
        update.moments[k] = kept


@RULE
@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("options", lambda x: x[1:], r"options has \d entries and flags 1; accepted: \d per param group"),
        ("options", lambda x: [*x, 0.0], r"options has \d entries and flags 1"),
        ("ema_decay", lambda x: [*x, 0.5], "ema_decay has 2 entries and flags 1; accepted: 1 per param group"),
        ("flags", lambda x: [*x, 0], r"options has \d entries and flags 2"),
        ("lrs", lambda x: [torch.ones(())] * 2, "lrs has 2 entries and flags 1"),
        ("weight_decays", lambda x: [torch.ones(())], r"weight_decays\[0\] must have dtype float64; got float32"),
        ("found_inf", lambda x: torch.zeros(2), r"found_inf must have one element; got shape \(2\)"),
        ("sum_sq", lambda x: torch.tensor(1), "sum_sq must have dtype float32; got int64"),
    ],
)
def test_bad_numbers_raise_and_change_nothing(rule, argument, change, message):
    names = [a.name for a in RULES[rule].op.schema.arguments]

    def op(*args):
        call = dict(zip(names, args, strict=True))
        RULES[rule].op.overload(*{**call, argument: change(call[argument])}.values())

    assert_refused(Update(rule, [Kind(F32)]), message, op=op)


@RULE
def test_shadows_of_half_params_are_refused(rule):
    assert_refused(Update(rule, [Kind(BF16, shadow=F16)]), "bfloat16 and its block has float16 shadows")

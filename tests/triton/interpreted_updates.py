"""The update ops in Triton, in the interpreter, against the CPU ops bit for bit; run by test_interpreted.py."""

import math

import numpy as np
import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._triton import _tables, _update, lamb
from amp_kernels._updates.op import RULES
from amp_kernels._updates.samples import Kind
from amp_kernels._updates.state import ADAPT_ALL, COUPLED_DECAY
from amp_kernels._updates.state import STOCHASTIC as FLAG_STOCHASTIC

from ..helpers.bits import assert_same_bits
from ..helpers.updates import KINDS, Update, flat
from ..ops.update_rules import BF16, F16, F32, TABLE

SHAPES = ((7, 5), (0, 3), (), (1031,))
SPLIT = Kind(BF16, master=torch.int16)
STOCHASTIC = Kind(BF16, stochastic=True, ema=True)


def check(
    op, kinds, change=None, *, shapes=SHAPES, grad_dtype=None, moment_dtype=F32, first=False, optional=None, **call
):
    """One step of the CPU op and one of Triton's give the same bits everywhere, beside the parameters too.

    ``change(update)`` may alter the arguments; ``optional``: with the moments that a block may lack, by default all but AMSGrad's.
    Returns Triton's.
    """
    options = {"grad_dtype": grad_dtype, "moment_dtype": moment_dtype, "first": first}
    optional = op != "adamw_" if optional is None else optional
    runs = [Update(op, kinds, shapes, optional=optional, **options) for _ in range(2)]
    for run, function in zip(runs, (None, REGISTRY[op].triton), strict=True):
        if change:
            change(run)
        run.step(function, **call)
        for i, param in enumerate(run.params):  # the remainder of a weight that is NaN holds bits of its payload
            kind, piece, block, _ = run.place(i)
            if kind.master in (torch.int16, torch.int8):
                run.masters[block][piece][flat(param).isnan()] = 0
    for i, (wanted, got) in enumerate(zip(runs[0].tensors, runs[1].tensors, strict=True)):
        assert_same_bits(flat(got), flat(wanted), f"{op}, tensor {i}")
    return runs[1]


@pytest.mark.parametrize(
    ("op", "optional"),
    [(op, optional) for op, rule in RULES.items() for optional in (True, False) if optional or rule.declared.optional],
)
@pytest.mark.parametrize(("grad_dtype", "moment_dtype"), [(F16, F32), (BF16, BF16), (F32, F32)])
def test_every_way_to_keep_a_weight(op, optional, grad_dtype, moment_dtype):
    """All in one call, each with a learning rate and a decay of its own, scaled and clipped."""
    groups = range(len(KINDS))
    check(
        op,
        KINDS,
        optional=optional,
        grad_dtype=grad_dtype,
        moment_dtype=moment_dtype,
        ema_decay=[0.9 - 0.05 * i for i in groups],
        lr=[1e-3 * (i + 1) for i in groups],
        weight_decay=[0.01 * i for i in groups],
        grad_scale=3.0,
        sum_sq=50.0,
        max_norm=2.0,
        found_inf=0.0,
    )


@pytest.mark.parametrize(("op", "optional"), [*((op, None) for op in RULES), ("adamw_", True)])
def test_moments_in_8_bits(op, optional):
    """With every way to keep a weight, around the ends of a block of 32 and of Triton's, and pieces of parameters, also within rows
    of which Triton's blocks have one and a half, and four."""

    def move(update):
        update.layout[:, 4] += torch.arange(len(update.params)) << 34
        for i, param in enumerate(update.params):
            if param.numel() in (1536, 2048):
                update.layout[i, 5:] = torch.tensor({1536: (768, 2**33), 2048: (256, 416)}[param.numel()])

    kinds = [*KINDS, Kind(F16, master=torch.int8), Kind(BF16, master=torch.int8, ema=True)]
    shapes = ((7, 5), (0, 3), (32,), (1031,), (1536,), (2048,))
    scaled = {"grad_scale": 3.0, "sum_sq": 50.0, "max_norm": 2.0, "found_inf": 0.0}
    check(op, kinds, move, shapes=shapes, moment_dtype=torch.uint8, grad_dtype=BF16, optional=optional, **scaled)


@pytest.mark.parametrize("op", RULES)
def test_moments_in_8_bits_of_any_bits(op):
    """Codes and exponents that no encoding makes, and values that are not finite; and a skip."""

    def plant(update):
        generator = torch.Generator().manual_seed(1)
        for buffers in update.moments:
            for buffer in buffers:
                elements = buffer.numel() // 33 * 32
                buffer[:elements] = torch.randint(0, 256, (elements,), generator=generator, dtype=torch.uint8)
                scales = torch.randint(48, 256, (buffer.numel() - elements,), generator=generator, dtype=torch.uint8)
                buffer[elements:] = scales
        update.grads[0].view(-1)[::97] = math.nan
        update.grads[0].view(-1)[40] = math.inf

    kinds = [Kind(F32), Kind(BF16, master=torch.int8)]
    with np.errstate(all="ignore"):
        for found in (0.0, 1.0):
            check(op, kinds, plant, shapes=((1000,),), moment_dtype=torch.uint8, grad_dtype=F32, found_inf=found)


@pytest.mark.parametrize("op", RULES)
def test_fp32_weights_and_masters_are_never_rounded_stochastically(op):
    check(op, KINDS, flags=FLAG_STOCHASTIC)


def test_largest_second_moment_is_nan_if_either_is():
    special = torch.tensor([math.inf, math.nan, 0.0, 1e-45, 1.0, 3e38])

    def plant(update):
        update.moments[1][0][16:52] = special.repeat(len(special))
        update.moments[2][0][16:52] = special.repeat_interleave(len(special))

    with np.errstate(all="ignore"):
        check("adamw_", [Kind(F32)], plant, shapes=((36,),), optional=True)


@pytest.mark.parametrize(("op", "call"), [(op, call) for op, row in TABLE.items() for call in row.calls])
@pytest.mark.parametrize("first", [False, True])
def test_flags_and_options(op, call, first):
    """Beside a group of other numbers. An eps of 0 makes a NaN of every lane that is not an element."""
    other = {"flags": 0, "eps": 0.0}
    usual = {name: value for name, value in RULES[op].declared.options.items() if name in ("lr", "eps")}
    each = {name: [value, other.get(name, 0.3)] for name, value in (usual | call).items() if name != "optional"}

    def no_direction(update):
        for t in (*update.grads, *update.moments[0]):
            flat(t)[::7] = 0

    kinds = [Kind(F32), SPLIT]
    check(op, kinds, no_direction if op == "lion_" else None, first=first, optional=call.get("optional"), **each)


@pytest.mark.parametrize("flags", [0, ADAPT_ALL])
@pytest.mark.parametrize("zero", ["weights", "directions", "both"])
def test_lamb_without_a_norm(zero, flags):
    def clear(update):
        tensors = (update.params if zero != "directions" else []) + (update.grads if zero != "weights" else [])
        for t in tensors + (update.moments[0] if zero != "weights" else []):
            t.zero_()

    check("lamb_", [Kind(F32)], clear, flags=flags, weight_decay=0.0 if flags else 0.1 * (zero != "directions"))


@pytest.mark.parametrize(
    ("kind", "moment_dtype"), [(SPLIT, BF16), (STOCHASTIC, F32), (Kind(F32, shadow=F16), BF16)], ids=str
)
def test_lamb_of_many_chunks(kind, moment_dtype, monkeypatch):
    """More chunks of a tensor than are added side by side, and tables that begin with another tensor."""
    monkeypatch.setattr(_tables, "TENSORS_PER_TABLE", 2)
    monkeypatch.setattr(lamb, "SLOTS", 2)
    check("lamb_", [kind], shapes=((3,), (50_000,), (17_003,)), moment_dtype=moment_dtype, grad_scale=3.0)


@pytest.mark.parametrize("op", ["adamw_", "lamb_"])
@pytest.mark.parametrize("step", [1, 10, 1000, 123_456, 2**24 - 1])
def test_bias_corrections(op, step):
    def advance(update):
        update.steps[0].fill_(step - 1)

    check(op, [Kind(F32)], advance, shapes=((40,),), beta1=0.9, beta2=0.9999999)


@pytest.mark.parametrize("op", RULES)
def test_tensors_override_numbers(op):
    check(op, [Kind(F32)] * 2, lr=7.0, lrs=[0.25, 0.003])
    check(op, [Kind(F32)] * 2, weight_decay=7.0, weight_decays=[0.0, 0.3])


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("found_inf", [1.0, 2.0, 1e-30, math.inf])
def test_a_skipped_step_changes_nothing(op, found_inf):
    kinds = [Kind(F32, shadow=F16), SPLIT, STOCHASTIC]
    run = check(op, kinds, optional=True, found_inf=found_inf, sum_sq=math.nan, max_norm=1.0)
    before = Update(op, kinds, SHAPES)
    for kept, now in zip(before.tensors, run.tensors, strict=True):
        assert_same_bits(flat(now), flat(kept))


@pytest.mark.parametrize("found_inf", [0.0, -1.0, math.nan])
def test_a_step_that_is_taken(found_inf):
    assert check("adamw_", [Kind(F32)], found_inf=found_inf).count(0) == 1.0


@pytest.mark.parametrize("max_norm", [0.0, 1e-40, 1.0, 20.0, 1e300, math.inf])
@pytest.mark.parametrize("sum_sq", [0.0, 400.0, math.inf, math.nan])
def test_clip_factors(sum_sq, max_norm):
    check("sgd_", [Kind(F32)], shapes=((20,),), sum_sq=sum_sq, max_norm=max_norm)


@pytest.mark.parametrize("grad_scale", [2.0**-30, 3.0, 65536.0, 2.0**127])
def test_grad_scales(grad_scale):
    check("sgd_", [Kind(F32)], shapes=((20,),), grad_scale=grad_scale)


def shifted(tensors, offset):
    """Copies of dense tensors that begin ``offset`` elements after a 16-byte boundary."""
    moved = []
    for t in tensors:
        storage = torch.zeros(t.numel() + offset, dtype=t.dtype)
        moved.append(storage.as_strided(t.shape, t.stride(), offset).copy_(t))
    return moved


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("which", ["params", "grads"])
@pytest.mark.parametrize("offset", [1, 4])
def test_unaligned_tensors(op, which, offset):
    """Some aligned and some not, in one call."""

    def misalign(update):
        tensors = getattr(update, which)
        tensors[1:] = shifted(tensors[1:], offset)

    check(op, [SPLIT, Kind(F32, shadow=BF16), STOCHASTIC], misalign, shapes=((2055,), (1024,), (2055,)))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1023, 1024, 1025, 16383, 16384, 16385, 40000])
@pytest.mark.parametrize("kind", [SPLIT, STOCHASTIC], ids=str)
def test_sizes(n, kind):
    check("sgd_", [kind], shapes=((n,),))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**63 - 1])
@pytest.mark.parametrize(("index", "step"), [(0, 0), (2**31, 1), (2**32 - 1, 2**24 - 2)])
def test_random_bits_depend_on_seed_index_and_step(seed, index, step):
    def place(update):
        update.layout[:, 4] = index
        update.steps[0].fill_(step)

    run = check("sgd_", [Kind(F16, stochastic=True)], place, shapes=((1031,),), seed=seed)
    before = Update("sgd_", [Kind(F16, stochastic=True)], shapes=((1031,),))
    place(before)
    before.step(seed=seed ^ 1)
    assert not torch.equal(run.params[0], before.params[0])


@pytest.mark.parametrize("op", RULES)
def test_chunks_of_several_tensors_and_tables(op, monkeypatch):
    monkeypatch.setattr(_tables, "TENSORS_PER_TABLE", 2)
    check(op, [Kind(BF16, master=F32)], shapes=((17003,), (5,), (33000,), (), (16384,)))


def test_more_parameters_than_a_program_prepares(monkeypatch):
    monkeypatch.setattr(_update, "PREPARE_BLOCK", 8)
    check("adamw_", [Kind(F32)], shapes=((1,),) * 19)


@pytest.mark.parametrize("op", RULES)
def test_nothing_but_empty_parameters(op):
    assert check(op, [Kind(F32)], shapes=((0,), (2, 0))).count(1) == 2.0


def test_dense_strides_in_memory_order():
    def relayout(update):
        for tensors in (update.params, update.grads):
            tensors[:] = [t.to(memory_format=torch.channels_last) for t in tensors]

    check("adamw_", [Kind(F16, master=F32)], relayout, shapes=((2, 3, 4, 5), (4, 2, 3, 3)))


SPECIAL = [0.0, -0.0, 1e-45, 1e-38, 6e-8, 65504.0, 65519.0, 65520.0, 3.4e38, math.inf, -math.inf, math.nan]


def plant_all_pairs(update, special):
    """Every one of these weights meets every one of these gradients."""
    grid = torch.tensor(special).repeat(len(special), 1)
    for param, grad in zip(update.params, update.grads, strict=True):
        param.copy_(grid.reshape(-1))
        grad.copy_(grid.T.reshape(-1))


@pytest.mark.parametrize("op", [op for op in RULES if op != "lamb_"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_special_values(op, weight_decay):
    """Infinities, NaN and values that round to subnormals and to infinity reach the same elements."""
    kinds = [Kind(F32), Kind(F16), Kind(BF16), Kind(F32, shadow=F16, ema=True), SPLIT, Kind(F16, master=torch.int16)]
    kinds += [Kind(F16, stochastic=True), STOCHASTIC]
    with np.errstate(all="ignore"):
        options = {"flags": COUPLED_DECAY, "optional": True} if op == "adamw_" else {}
        options |= {"shapes": ((len(SPECIAL) ** 2,),), "grad_dtype": F32, "weight_decay": weight_decay}
        check(op, kinds, lambda update: plant_all_pairs(update, SPECIAL), **options)


@pytest.mark.parametrize("special", [SPECIAL[:4], SPECIAL[:6], SPECIAL[:8], SPECIAL[:9], SPECIAL], ids=len)
@pytest.mark.parametrize("flags", [0, ADAPT_ALL])
def test_lamb_special_values(special, flags):
    """One of them in the norm reaches every element, so the harmless ones come first. The rest of a NaN in a split
    master is nobody's promise."""
    kinds = [Kind(F32), Kind(F16), Kind(BF16), Kind(F32, shadow=F16, ema=True), Kind(F16, stochastic=True), STOCHASTIC]
    kinds += [SPLIT, Kind(F16, master=torch.int16)] if len(special) <= 4 else []
    shapes = ((len(special) ** 2,),)
    with np.errstate(all="ignore"):
        options = {"weight_decay": 0.0 if flags else 0.1, "flags": flags, "shapes": shapes, "grad_dtype": F32}
        check("lamb_", kinds, lambda update: plant_all_pairs(update, special), **options)


def test_a_second_step_reuses_the_tables_and_a_new_gradient_does_not(monkeypatch):
    monkeypatch.setattr(_tables, "_uploads", type(_tables._uploads)())
    update, launch = Update("adamw_", [Kind(F32)], SHAPES), REGISTRY["adamw_"].triton
    update.step(launch)
    tables = len(_tables._uploads)
    update.step(launch)
    assert len(_tables._uploads) == tables
    update.grads = [g.clone() for g in update.grads]
    update.step(launch)
    assert len(_tables._uploads) == tables + 1

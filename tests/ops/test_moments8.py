"""The update ops with moments in 8 bits and masters of 24 bits: every backend against the reference, bit for bit, what blocks of 32
elements owe each other, and bad calls. test_moments8_values.py has the values, tests/math/test_block8.py the format itself."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch

from amp_kernels._checks.lists import flat
from amp_kernels._raw._block8 import BLOCK, FIRST, NAN, SECOND
from amp_kernels._updates.op import RULES
from amp_kernels._updates.samples import Kind
from amp_kernels._updates.state import MAXIMIZE, STOCHASTIC, exponents_at

from ..helpers.bits import assert_same_bits
from ..helpers.updates import KINDS, Update
from .moments8 import BACKEND, COMPILED, I8, RULE, SPLIT24, U8, agrees, codes_and_exponents, moments8, step
from .update_rules import BF16, F16, F32

# ---- the same bits everywhere


@RULE
@COMPILED
@pytest.mark.parametrize("grad_dtype", [BF16, F32])
@pytest.mark.parametrize("optional", [False, True])
def test_every_way_to_keep_a_weight(rule, backend, grad_dtype, optional):
    kinds = [*KINDS, *SPLIT24]
    agrees(
        moments8(rule, kinds, grad_dtype=grad_dtype, optional=optional or not RULES[rule].declared.optional[1:]),
        backend,
        flags=[MAXIMIZE * (i % 2) for i in range(len(kinds))],
        lr=[1e-3 * (i + 1) for i in range(len(kinds))],
        grad_scale=3.0,
        sum_sq=50.0,
        max_norm=2.0,
        found_inf=0.0,
    )


@RULE
@pytest.mark.parametrize("optional", [False, True])
def test_every_instruction_set_of_the_cpu(every_cpu_isa, rule, optional):
    """Groups of elements that AVX2 and AVX-512 take in their plain form (csrc/update/cpu_plain8.h) beside others: gradients of 0, values
    far below a block's largest, and one that is infinite; and codes of a block that is NaN. Later steps start from such moments."""
    optional = optional or not RULES[rule].declared.optional[1:]
    update = moments8(rule, [Kind(F32), SPLIT24[0]], ((2100,), (330,)), grad_dtype=F32, optional=optional)
    for grad in update.grads:
        flat(grad)[130:160] = 0.0
        flat(grad)[200:240:7] *= 2.0 ** -torch.arange(10.0, 22.0, 2.0)
        flat(grad)[270] = math.inf
    last = max(k for k, (buffer, *_) in enumerate(update.moments) if buffer.numel())
    codes, exponents = codes_and_exponents(update, last, 0)
    codes[640:704] = 0x77
    exponents[20] = NAN
    with np.errstate(all="ignore"):
        for _ in range(3):
            agrees(update, "cpu", grad_scale=3.0, sum_sq=50.0, max_norm=2.0)


@RULE
@COMPILED
def test_blocks_of_all_dtypes_share_a_call(rule, backend):
    """Blocks with moments in 8 bits, bf16 and fp32, in turn, and several steps."""
    kinds = [Kind(F32), *SPLIT24, Kind(BF16, stochastic=True), Kind(F16)]
    updates = [
        Update(rule, [kind], ((40,), (1031,)), moment_dtype=dtype, seed=i)
        for i, (kind, dtype) in enumerate(zip(kinds, (F32, U8, BF16, U8, F32), strict=True))
    ]
    whole = updates[0]
    for i, other in enumerate(updates[1:], 1):
        whole.kinds += other.kinds
        for name in ("params", "grads", "steps", "masters", "shadows", "emas"):
            getattr(whole, name).extend(getattr(other, name))
        for mine, theirs in zip(whole.moments, other.moments, strict=True):
            mine += theirs
        rows = other.layout + torch.tensor([i, 0, 0, i, 100 * i, 0, 0])
        whole.layout = torch.cat([whole.layout, rows])
    for _ in range(3):
        agrees(whole, backend)


@RULE
@COMPILED
@pytest.mark.parametrize("shift", [1, 3])
def test_operands_that_begin_anywhere(rule, backend, shift):
    update = moments8(rule, [Kind(F32, ema=True), SPLIT24[0]], ((2100,), (600,)))
    update.grads = [torch.cat([g.new_zeros(shift), g])[shift:] for g in update.grads]
    agrees(update, backend)
    update = moments8(rule, [Kind(F32)], ((2100,), (600,)))
    update.moments = [[torch.cat([b.new_zeros(shift), b])[shift:] for b in buffers] for buffers in update.moments]
    agrees(update, backend)


@RULE
@COMPILED
@pytest.mark.parametrize("exponent", [-140, -70, -55, -35, 0, 35, 62])
def test_the_first_gradients_of_any_magnitude(rule, backend, exponent):
    """Roots and quotients of numbers that are not normal, and of 0; the second weight has an average."""
    kinds = [Kind(F32), Kind(F32, ema=True)]
    update = moments8(rule, kinds, shapes=[(4096,)], grad_dtype=F32, optional=rule != "adamw_")
    for grad in update.grads:
        grad.mul_(2.0**exponent)
        flat(grad)[::3] = 0.0
    for k, block in itertools.product(range(len(update.moments)), range(len(kinds))):
        codes, exponents = codes_and_exponents(update, k, block)
        codes.zero_()
        exponents.fill_(48)
    least = {"eps": 2.0**-57} if "eps" in update.declared.options else {}  # so small that it hides no root
    with np.errstate(all="ignore"):
        for options in ({}, least):
            agrees(copy.deepcopy(update), backend, **options)


@RULE
@COMPILED
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.0e38])
def test_gradients_that_are_not_finite(rule, backend, bad):
    update = moments8(rule, [Kind(F32), SPLIT24[0], SPLIT24[1]], ((257,), (70,)))
    for grad in update.grads:
        grad.view(-1)[[0, 33, 69]] = bad
    with np.errstate(all="ignore"):
        agrees(update, backend)
        agrees(update, backend)  # from blocks that are NaN


@RULE
@COMPILED
def test_any_codes_and_exponents(rule, backend):
    """Also those that no encoding makes: subnormal codes, zeros in any block, and codes of a block that is NaN."""
    update = moments8(rule, [Kind(F32), SPLIT24[0]], ((4096,), (70,)))
    generator = torch.Generator().manual_seed(0)
    for k, buffers in enumerate(update.moments):
        unsigned = update.declared.moments[k] in update.declared.unsigned
        for buffer in buffers:
            elements = buffer.numel() // (BLOCK + 1) * BLOCK
            buffer[:elements] = torch.randint(0, 256, (elements,), generator=generator, dtype=U8)
            least = (SECOND if unsigned else FIRST).least
            buffer[elements:] = torch.randint(least, 256, (buffer.numel() - elements,), generator=generator, dtype=U8)
    for grad in update.grads:
        grad *= 2.0 ** torch.randint(-60, 60, grad.shape, generator=generator)
    with np.errstate(all="ignore"):
        agrees(update, backend, lr=1e-30)


# ---- what a step leaves alone


@RULE
@BACKEND
@pytest.mark.parametrize("found_inf", [1.0, math.inf])
def test_a_skipped_step_keeps_codes_and_exponents(rule, backend, found_inf):
    update = moments8(rule, [*KINDS[:3], *SPLIT24])
    for buffers in update.moments:
        for buffer in buffers:
            buffer[1::7] = 0xA5  # not what an encoding of its own values would give
    before = copy.deepcopy(update)
    step(update, backend, found_inf=found_inf)
    for a, b in zip(update.tensors, before.tensors, strict=True):
        assert_same_bits(flat(a), flat(b), "")


@RULE
@BACKEND
def test_bytes_of_nobody_stay(rule, backend):
    update = moments8(rule, [Kind(F32)])
    taken = torch.zeros_like(update.moments[0][0], dtype=torch.bool)
    for i in range(len(update.params)):
        _, piece, *_ = update.place(i)
        taken[piece] = True
        exponents_at(taken.view(U8), piece.start, update.params[i].numel())[:] = 1
    for (buffer,) in update.moments:
        buffer[~taken] = 0x5A
    step(update, backend)
    for (buffer,) in update.moments:
        assert torch.all(buffer[~taken] == 0x5A)


@RULE
@BACKEND
def test_a_block_never_changes_its_neighbours(rule, backend):
    """Other values in one block of 32, and in another parameter, change no byte elsewhere; but LAMB's norms."""
    runs = []
    for changes in (False, True):
        update = moments8(rule, [Kind(F32)], ((320,), (64,)))
        if changes:
            update.grads[0][64:96] = 1e20
            update.grads[1][:] = math.nan
        runs.append(step(update, backend))
    others = [i for i in range(320) if not 64 <= i < 96]
    for k in range(len(runs[0].moments)):
        (a, scales_a), (b, scales_b) = (codes_and_exponents(run, k, 0) for run in runs)
        assert torch.equal(a[others], b[others])
        assert [j for j in range(10) if scales_a[j] != scales_b[j]] == [2]
    if rule != "lamb_":
        assert torch.equal(runs[0].params[0][others], runs[1].params[0][others])


# ---- calls that the compiled op refuses


def with_moment(change, k=0):
    return lambda update: update.moments[k].__setitem__(0, change(update.moments[k][0]))


BAD = {
    "size": (with_moment(lambda b: b[:-1].clone()), r"moments\[0\] is uint8 and has \d+ elements; .* multiple of 33"),
    "no exponents": (with_moment(lambda b: b[: 33 * 20].clone()), r"of moments\[0\] on, which has"),
    "offset": (lambda u: u.layout[1].copy_(torch.tensor([0, 112, 1, 0, 1, 0, 0])), r"params\[1\] begins at element 112 of moments\[0\]"),
    "index": (lambda u: u.layout[1].copy_(torch.tensor([0, 96, 1, 0, -1, 0, 0])), r"has index -1"),
    "master": (lambda u: u.masters.__setitem__(0, torch.zeros(4096, dtype=I8)), r"params\[0\] is float32 and its block has masters"),
}  # fmt: skip


@COMPILED
@pytest.mark.parametrize("case", BAD)
def test_bad_lists_raise_and_change_nothing(backend, case):
    spoil, message = BAD[case]
    update = moments8("lion_", [Kind(F32)], ((7, 5), (1031,)))
    spoil(update)
    before = copy.deepcopy(update.tensors)
    with pytest.raises(RuntimeError, match=message):
        step(update, backend)
    assert all(map(torch.equal, before, update.tensors))


@COMPILED
def test_a_block_has_all_moments_in_8_bits_or_none(backend):
    update = moments8("adamw_", [Kind(F32)], optional=False)
    update.moments[1] = [torch.zeros(8192)]
    with pytest.raises(RuntimeError, match=r"moments\[1\] is float32 and moments\[0\] uint8; accepted: uint8 for all"):
        step(update, backend)


@RULE
@pytest.mark.parametrize("count", [1, 3])
def test_same_bits_for_any_number_of_threads(rule, threads, count):
    threads(count)
    agrees(moments8(rule, [SPLIT24[0]], ((200_007,), (70_000,)), optional=False), "cpu", flags=STOCHASTIC)

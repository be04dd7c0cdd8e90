"""The update ops with moments in 8 bits and masters of 24 bits: every backend against the reference, bit for bit, a step against
float64, and what blocks of 32 elements owe each other. The format itself is tested in tests/math/test_block8.py."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch

import amp_kernels as ak
from amp_kernels import _host
from amp_kernels._checks.lists import flat
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw._block8 import BLOCK, FIRST, NAN, SECOND, encode
from amp_kernels._raw._stochastic import rounding_bits
from amp_kernels._updates.op import RULES
from amp_kernels._updates.samples import Kind
from amp_kernels._updates.state import MAXIMIZE, STOCHASTIC, exponents_at
from amp_kernels.testing.bits import assert_same_bits
from amp_kernels.testing.updates import KINDS, Update

from .targets import backends_on_cpu
from .update_rules import BF16, F16, F32

U8, I8 = torch.uint8, torch.int8
RULE = pytest.mark.parametrize("rule", RULES)
BACKEND = pytest.mark.parametrize("backend", backends_on_cpu(REGISTRY["adamw_"]))
COMPILED = pytest.mark.parametrize("backend", backends_on_cpu(REGISTRY["adamw_"])[1:])
SPLIT24 = [Kind(BF16, master=I8), Kind(F16, master=I8, ema=True)]
# Around the ends of a block, of a warp and of a unit; matrices are transposed.
SHAPES = ((7, 5), (0, 3), (), (31,), (32,), (33,), (64, 8), (256,), (257,), (1031,), (2100,))


def step(update: Update, backend: str, **call) -> Update:
    return update.step(ak.backend(backend)(REGISTRY[update.declared.name]), **call)


def agrees(update: Update, backend: str, **call) -> Update:
    """One step by the backend and one by the reference give the same bits, padding too. Returns the former."""
    wanted = step(copy.deepcopy(update), "reference", **call)
    step(update, backend, **call)
    for run in (update, wanted):  # the remainder of a weight that is NaN holds bits of its payload
        for i, param in enumerate(run.params):
            kind, piece, block, _ = run.place(i)
            if kind.master in (I8, torch.int16):
                run.masters[block][piece][flat(param).isnan()] = 0
    for i, (a, b) in enumerate(zip(update.tensors, wanted.tensors, strict=True)):
        assert_same_bits(flat(a), flat(b), f"tensor {i}")
    return update


def moments8(rule, kinds=None, shapes=SHAPES, **options) -> Update:
    return Update(rule, list(kinds or [Kind(F32)]), shapes, moment_dtype=U8, **options)


def codes_and_exponents(update: Update, k: int, i: int):
    _, piece, block, _ = update.place(i)
    buffer = update.moments[k][block]
    return buffer[piece], exponents_at(buffer, piece.start, update.params[i].numel())


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
    """Groups of 64 elements that AVX-512 takes in its plain form (csrc/update/cpu_plain8.h) beside others: gradients of 0, values
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
@pytest.mark.parametrize("kind", [Kind(F32), SPLIT24[0], Kind(BF16, stochastic=True)], ids=str)
def test_pieces_of_a_parameter_have_the_bits_of_the_whole(rule, backend, kind):
    """The upper half of an index is the block of 32 with which a piece begins, here beyond 2^32 elements too."""
    update = moments8(rule, [kind], ((2100,), (70,), (70,)), seed=3)
    update.layout[:, 4] = torch.tensor([5, 7 | 3 << 32, 7 | (2**31 - 7) << 32])
    agrees(update, backend, lr=0.1)


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


# ---- values


@RULE
@BACKEND
def test_codes_are_the_new_moment_rounded_to_a_neighbour(rule, backend):
    """Against the step with fp32 moments, which has bounds of its own: every code is the value below or above, in the block
    of the largest; weights have the bits of that step, as they are computed before the moments are rounded (but LAMB's)."""
    shapes = ((2100,), (70,))
    update = moments8(rule, [Kind(F32)], shapes)
    exact = Update(rule, [Kind(F32)], shapes)
    for i in range(2):
        _, piece, *_ = exact.place(i)
        flat(exact.params[i]).copy_(flat(update.params[i]))
        exact.grads[i] = update.grads[i]
        for k, (buffer,) in enumerate(exact.moments):
            buffer[piece] = update.moment(k, i)
    step(update, backend)
    step(exact, "cpu")
    for i in range(2):
        if rule != "lamb_":
            assert_same_bits(update.weight(i), exact.weight(i), "weight")
        for k, name in enumerate(update.declared.moments):
            code = SECOND if name in update.declared.unsigned else FIRST
            new = exact.moment(k, i)
            down, up = (encode(new, code, random) for random in (0, 0xFFFF))
            codes, exponents = codes_and_exponents(update, k, i)
            assert torch.equal(exponents, down[1])
            assert torch.all((codes == down[0]) | (codes == up[0]))
            assert 0.2 < (codes == up[0])[up[0] != down[0]].float().mean() < 0.8  # neither all up nor all down


@BACKEND
def test_random_bits_of_weights_and_moments_are_those_of_the_documented_counters(backend):
    """A single gradient decides everything: codes of both moments and weight and remainder, from Philox by hand."""
    n, seed, index, first = 96, 0x1234567 << 32 | 0x89ABCDEF, 77, 5
    update = moments8("adamw_", [SPLIT24[0]], ((n,),))
    update.layout[:, 4] = index | first << 32
    exact = Update("adamw_", [Kind(F32)], ((n,),), optional=False)
    flat(exact.params[0]).copy_(update.weight(0))
    exact.grads[0] = update.grads[0].float()
    for k in range(2):
        exact.moments[k][0][exact.place(0)[1]] = update.moment(k, 0)
    update.moments[2] = [torch.zeros(0, dtype=U8)]
    step(update, backend, seed=seed)
    step(exact, "cpu", seed=seed)
    now = int(update.steps[0][0])

    def bits(value):
        groups = range(4 * first, 4 * first + n // 8)
        drawn = (_host.philox4x32_10([g, 0, index, now], seed) for g in groups)
        words = np.array([[four[w ^ value] for w in range(4)] for four in drawn]).reshape(-1)
        return torch.from_numpy(np.stack([words & 0xFFFF, words >> 16], 1).reshape(-1).astype(np.int64))

    assert torch.equal(bits(2), rounding_bits(seed, torch.tensor(float(now)), index | first << 32, n, 2))
    for k, code in enumerate((FIRST, SECOND)):
        wanted = encode(exact.moment(k, 0), code, bits(1 + k))
        assert all(map(torch.equal, codes_and_exponents(update, k, 0), wanted))
    weights, remainders = (
        flat(update.params[0]).view(torch.int16).numpy(),
        update.masters[0][update.place(0)[1]].numpy(),
    )
    for i, random in enumerate(bits(0).tolist()):
        weight, remainder = _host.split_master24(exact.weight(0).numpy()[i : i + 1], "bfloat16", random & 0xFF)
        assert (weights.view(np.uint16)[i], remainders[i]) == (weight[0], remainder[0])


def test_a_constant_gradient_brings_the_second_moment_to_its_value_without_bias():
    """After gradients of 1, gradients of 1e-3: v decays by 1 % a step where a code is 12 %. Its mean over elements is that of exact
    arithmetic within five standard errors; to nearest it would stay where it was."""
    n, beta2, v = 4096, 0.99, 0.0
    update = moments8("adamw_", [Kind(F32)], ((n,),), optional=False, first=True)
    for t in range(600):
        g = 1.0 if t < 50 else 1e-3
        update.grads[0] = torch.full((n,), g)
        update.step(beta2=beta2, lr=0.0, weight_decay=0.0)
        v = beta2 * v + (1 - beta2) * g**2
    got = update.moment(1, 0).double()
    assert abs(got.mean() - v) < 5 * got.std() / math.sqrt(n)


@pytest.mark.parametrize("kind", SPLIT24, ids=str)
def test_updates_far_below_a_unit_of_24_bits_arrive(kind):
    """300 updates of a 2^-20th of the weight, whose unit is 2^-17 (bf16) or 2^-18: their mean arrives; to nearest, none would."""
    n, steps = 4096, 300
    lr = 2.0**-20
    start = moments8("sgd_", [kind], ((n,),), first=True)
    flat(start.params[0]).fill_(1.5)
    start.masters[0].zero_()
    for _ in range(steps):
        start.grads[0] = torch.full((n,), -1.0)
        start.step(lr=lr, momentum=0.0, weight_decay=0.0, seed=9)
    moved = start.weight(0).double() - 1.5
    error = moved.std() / math.sqrt(n)
    assert error > 0
    assert abs(moved.mean() - steps * lr) < 5 * error


def test_rounding_errors_of_both_moments_and_of_the_weight_are_not_correlated():
    """One stream for two of them would correlate them fully."""
    n = 1 << 15
    update = moments8("adamw_", [SPLIT24[0]], ((n,),), optional=False)
    flat(update.params[0]).fill_(1.0)
    update.masters[0].zero_()
    update.grads[0] = torch.full((n,), 0.3)
    for k, (code, value) in enumerate([(FIRST, 0.27), (SECOND, 0.11)]):
        codes, exponents = encode(torch.full((n,), value), code)
        mine = codes_and_exponents(update, k, 0)
        mine[0].copy_(codes), mine[1].copy_(exponents)
    update.step(lr=1e-4)
    errors = torch.stack([update.moment(0, 0), update.moment(1, 0), update.weight(0)]).double()
    correlation = torch.corrcoef(errors)
    assert not correlation.isnan().any()
    assert (correlation - torch.eye(3)).abs().max() < 5 / math.sqrt(n)


@BACKEND
def test_blocks_with_a_nan_say_so_and_recover_never(backend):
    update = moments8("adamw_", [Kind(F32)], ((96,),))
    update.grads[0][40] = math.nan
    step(update, backend)
    for k in range(3):
        assert (codes_and_exponents(update, k, 0)[1] == NAN).tolist() == [False, True, False]
        assert update.moment(k, 0).isnan().view(3, BLOCK).all(1).tolist() == [False, True, False]
        assert not codes_and_exponents(update, k, 0)[0][32:64].any()


# ---- calls that the compiled op refuses


def with_moment(change, k=0):
    return lambda update: update.moments[k].__setitem__(0, change(update.moments[k][0]))


BAD = {
    "size": (with_moment(lambda b: b[:-1].clone()), r"moments\[0\] is uint8 and has \d+ elements; .* multiple of 33"),
    "no exponents": (with_moment(lambda b: b[: 33 * 20].clone()), r"of moments\[0\] on, which has"),
    "offset": (
        lambda u: u.layout[1].copy_(torch.tensor([0, 112, 1, 0, 1, 0, 0])),
        r"params\[1\] begins at element 112 of moments\[0\]",
    ),
    "index": (lambda u: u.layout[1].copy_(torch.tensor([0, 96, 1, 0, -1, 0, 0])), r"has index -1"),
    "master": (
        lambda u: u.masters.__setitem__(0, torch.zeros(4096, dtype=I8)),
        r"params\[0\] is float32 and its block has masters",
    ),
}


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
@COMPILED
@pytest.mark.parametrize("threads", [1, 3])
def test_same_bits_for_any_number_of_threads(rule, backend, threads):
    if backend != "cpu":
        pytest.skip("the emulator has schedules of its own")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        agrees(moments8(rule, [SPLIT24[0]], ((200_007,), (70_000,)), optional=False), backend, flags=STOCHASTIC)
    finally:
        torch.set_num_threads(before)

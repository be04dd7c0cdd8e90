"""The values that a step leaves in moments of 8 bits and in masters of 24 bits: against the step with fp32 moments, against Philox by
hand, and over many steps against exact arithmetic."""

import math

import numpy as np
import pytest
import torch

from amp_kernels import _host
from amp_kernels._checks.lists import flat
from amp_kernels._raw._block8 import BLOCK, FIRST, NAN, SECOND, encode
from amp_kernels._raw._stochastic import rounding_bits
from amp_kernels._updates.samples import Kind

from ..helpers.bits import assert_same_bits
from ..helpers.updates import Update
from .moments8 import BACKEND, RULE, SPLIT24, U8, codes_and_exponents, moments8, step
from .update_rules import F32


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
    weights = flat(update.params[0]).view(torch.int16).numpy()
    remainders = update.masters[0][update.place(0)[1]].numpy()
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

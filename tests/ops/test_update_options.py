"""All update ops besides their formula: averages of the weights and stochastic rounding."""

import math

import numpy as np
import pytest
import torch

from amp_kernels import _host
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw._stochastic import philox4x32_10, round_stochastic, rounding_bits
from amp_kernels._updates.op import RULES
from amp_kernels._updates.samples import Kind

from ..helpers.updates import Update, flat
from .update_rules import BF16, EMA_DECAY, F16, F32, NAMES, codes

OPS = pytest.mark.parametrize("op", RULES)
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])
HALVES = pytest.mark.parametrize("dtype", [F16, BF16])
SEED = 0x1234567 << 32 | 0x89ABCDEF  # both words of the key


def of_backend(op: str, backend: str):
    return REGISTRY[op].reference if backend == "reference" else None


def stepped(op: str, backend: str = "cpu", *, kinds, change=None, seed=SEED, lr=0.1, **options) -> Update:
    update = Update(op, kinds, optional=op == "sgd_", **options)
    if change is not None:
        change(update)
    return update.step(of_backend(op, backend), seed=seed, lr=lr)


# ---- averages ----


@OPS
@BACKENDS
@pytest.mark.parametrize("kind", [Kind(F32, ema=True), Kind(BF16, master=F32, ema=True)], ids=str)
def test_average_of_a_kept_weight_bit_for_bit(op, backend, kind):
    """The average is the formula over the float32 weight, for kinds from which it can be read back."""
    before, after = Update(op, [kind]), stepped(op, backend, kinds=[kind])
    for i in range(len(after.params)):
        wanted = before.ema(i).numpy()
        _host.ema(wanted, after.weight(i).numpy(), EMA_DECAY)
        assert np.array_equal(wanted.view(np.uint32), after.ema(i).numpy().view(np.uint32))
        assert not torch.equal(after.ema(i), before.ema(i)) or not after.params[i].numel()


@OPS
@BACKENDS
@pytest.mark.parametrize("kind", [Kind(BF16), Kind(BF16, stochastic=True), Kind(F16, master=torch.int16)], ids=str)
def test_average_is_of_the_weight_before_it_is_rounded(op, backend, kind):
    """Averages of a 16-bit weight with no float32 master, or with one that is kept in fewer bits, have the bits of a
    run whose weights are float32."""
    averaged = Kind(kind.param, kind.master, stochastic=kind.stochastic, ema=True)
    half, full = Update(op, [averaged]), Update(op, [Kind(F32, ema=True)])
    for i, param in enumerate(half.params):
        full.params[i] = param.float()
        flat(full.params[i]).copy_(half.weight(i))
    full.grads = [g.float() for g in half.grads]
    for update in (half, full):
        update.step(of_backend(op, backend))
    assert torch.equal(half.emas[0], full.emas[0])


@OPS
def test_groups_have_their_own_decay(op):
    kinds = [Kind(F32, ema=True), Kind(F32, ema=True)]
    update, before = Update(op, kinds).step(ema_decay=[0.0, 0.5]), Update(op, kinds)
    for i in range(len(update.params)):
        weight, old = update.weight(i), before.ema(i)
        wanted = weight if update.place(i)[2] == 0 else (old + weight) / 2
        assert ((update.ema(i) - wanted).abs() <= 2.0**-22 * (old.abs() + weight.abs())).all()


# ---- stochastic rounding: the generator ----


@pytest.mark.parametrize("key", [0, SEED, 2**63 - 1])
def test_reference_generator_is_that_of_csrc_math(key):
    generator = np.random.default_rng(1)
    counters = np.concatenate([generator.integers(0, 2**32, (200, 4)), [[0] * 4, [2**32 - 1] * 4]])
    words = philox4x32_10(tuple(torch.from_numpy(counters[:, k]) for k in range(4)), key)
    wanted = [_host.philox4x32_10([int(c) for c in counter], key) for counter in counters]
    assert torch.stack(words, dim=1).tolist() == [list(w) for w in wanted]


@HALVES
def test_reference_rounds_as_csrc_math(dtype):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(20_003, generator=g) * torch.randn(20_003, generator=g).mul(6).exp()
    x[:8] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 65519.0, 65536.0, -3e38])
    ours = round_stochastic(x, dtype, rounding_bits(SEED, torch.tensor(9.0), 2**32 - 1, x.numel()))
    assert np.array_equal(codes(ours), _host.round_stochastic(x.numpy(), NAMES[dtype], SEED, 9, 2**32 - 1))


# ---- stochastic rounding: the ops ----


def unrounded(op: str, kind: Kind, shapes: tuple) -> list[torch.Tensor]:
    """The float32 weights that a step computes before it rounds them."""
    half, full = Update(op, [kind], shapes), Update(op, [Kind(F32)], shapes, optional=op == "sgd_")
    full.params, full.grads = [p.float() for p in half.params], [g.float() for g in half.grads]
    return [flat(p) for p in full.step(lr=0.1).params]


@OPS
@BACKENDS
@HALVES
def test_bits_are_those_of_seed_step_index_and_element(op, backend, dtype):
    """Against the formula alone: the float32 result of the step, rounded with the numbers of its key. Sizes with tails of
    every kind, one across several chunks."""
    kind, shapes = Kind(dtype, stochastic=True), ((7, 5), (0,), (), (1031,), (8,), (40_003,))
    after = stepped(op, backend, kinds=[kind], shapes=shapes)
    before = Update(op, [kind], shapes)
    for i, weight in enumerate(unrounded(op, kind, shapes)):
        step, index = int(before.count(i)) + 1, int(before.layout[i, 4])
        wanted = _host.round_stochastic(weight.numpy(), NAMES[dtype], SEED, step, index)
        # The reference may differ from the compiled formula in the last bit of the float32 weight.
        differing = int((codes(flat(after.params[i])) != wanted).sum())
        assert differing <= (0 if backend == "cpu" else weight.numel() // 1000)


@OPS
@BACKENDS
@pytest.mark.parametrize(
    "kind", [Kind(F32, shadow=BF16), Kind(BF16, master=F32), Kind(F16, master=torch.int16)], ids=str
)
def test_no_effect_on_weights_with_a_float32_form(op, backend, kind):
    flagged = Kind(kind.param, kind.master, kind.shadow, stochastic=True)
    plain, marked = stepped(op, backend, kinds=[kind]), stepped(op, backend, kinds=[flagged])
    torch.testing.assert_close([*plain.tensors], [*marked.tensors], rtol=0, atol=0, equal_nan=True)

"""csrc/update/rules/*.h and ema.h, bit for bit against the formula as written; tests/ops/test_updates.py has float64."""

import math

import numpy as np
import pytest
import torch

from amp_kernels import _host
from amp_kernels._updates.state import ADAPT_ALL, CAUTIOUS, COUPLED_DECAY, NESTEROV, NO_BIAS_CORRECTION

from ..ops.update_rules import formula

F = np.float32
N = 20_000


def fma(a, b, c):
    """a * b + c with one rounding: the product of two fp32 numbers is exact in a long double."""
    return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(F)


def data(seed: int, *, spread: float = 4.0) -> tuple[np.ndarray, ...]:
    """Weights, moments and gradients over many orders of magnitude, some of them zero."""
    r = np.random.default_rng(seed)
    p, m, g = (r.standard_normal(N) * 10.0 ** r.uniform(-spread, spread, N) for _ in range(3))
    v = np.square(r.standard_normal(N)) * 10.0 ** r.uniform(-2 * spread, 2 * spread, N)
    g[::97] = 0
    m[::101] = v[::101] = 0
    return tuple(a.astype(F) for a in (p, m, v, g))


def adamw_as_written(p, m, v, g, *, step, lr, beta1, beta2, eps, wd, coupled, inv_scale, clip, max_v=None):
    bc1, bc2 = 1 - beta1**step, 1 - beta2**step
    g = (g * F(inv_scale)) * F(clip)
    if coupled:
        g = fma(F(wd), p, g) if wd else g
    else:
        p = p * F(1 - lr * wd)
    m = fma(F(1 - beta1), g - m, m)
    v = fma(F(1 - beta2) * g, g, F(beta2) * v)
    largest = v if max_v is None else np.maximum(max_v, v)
    return fma(-F(lr / bc1), m / (np.sqrt(largest) / F(math.sqrt(bc2)) + F(eps)), p), m, v, largest


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_bit_for_bit(step, wd, coupled, amsgrad):
    p, m, v, g = data(step)
    max_v = data(500 + step)[2] if amsgrad else None
    options = {"step": step, "lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    options |= {"inv_scale": 2.0**-7, "clip": 0.3}
    expected = adamw_as_written(p, m, v, g, wd=wd, coupled=coupled, max_v=max_v, **options)
    moments = [m, v, max_v] if amsgrad else [m, v]
    formula("adamw_", p, moments, g, weight_decay=wd, flags=COUPLED_DECAY if coupled else 0, **options)
    for name, actual, wanted in zip("pmvx", (p, *moments), expected, strict=False):
        assert np.array_equal(actual.view(np.uint32), wanted.view(np.uint32)), name


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.25, False), (0.9, 0.0, True)]
)
@pytest.mark.parametrize("wd", [0.0, 1e-2])
@pytest.mark.parametrize("step", [1, 2])
def test_sgd_bit_for_bit(step, wd, momentum, dampening, nesterov):
    p, b, _, g = data(20 + step)
    e = (g * F(0.5)) * F(0.7)
    e = fma(F(wd), p, e) if wd else e
    if momentum:
        wanted_b = e if step == 1 else fma(F(momentum), b, F(1 - dampening) * e)
        e = fma(F(momentum), wanted_b, e) if nesterov else wanted_b
    wanted = fma(-F(0.01), e, p)
    options = {"lr": 0.01, "momentum": momentum, "dampening": dampening, "weight_decay": wd}
    options |= {"flags": NESTEROV if nesterov else 0, "inv_scale": 0.5, "clip": 0.7}
    formula("sgd_", p, [b] if momentum else [], g, step=step, **options)
    assert np.array_equal(p.view(np.uint32), wanted.view(np.uint32))
    if momentum:
        assert np.array_equal(b.view(np.uint32), wanted_b.view(np.uint32))


@pytest.mark.parametrize("wd", [0.0, 0.1])
def test_lion_bit_for_bit(wd):
    p, m, _, g = data(30)
    g[::97] = m[::97] = 0  # no direction at all: the weight only decays
    e = (g * F(0.5)) * F(-0.7)
    c = fma(F(0.9), m, F(1 - 0.9) * e)
    wanted = fma(-F(0.01), np.sign(c), p * F(1 - 0.01 * wd))
    wanted_m = fma(F(0.95), m, F(1 - 0.95) * e)
    options = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "weight_decay": wd, "inv_scale": 0.5, "clip": -0.7}
    before = p.copy()
    formula("lion_", p, [m], g, **options)
    assert np.array_equal(p.view(np.uint32), wanted.view(np.uint32))
    assert np.array_equal(m.view(np.uint32), wanted_m.view(np.uint32))
    assert np.array_equal(p[::97], before[::97] * F(1 - 0.01 * wd))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.95])
def test_muon_before_the_products_bit_for_bit(momentum, nesterov):
    """torch.lerp's two forms, each with one fma. The iterate's old values do not matter."""

    def lerp(a, b, weight):
        return fma(F(weight), b - a, a) if weight < 0.5 else fma(F(1 - weight), a - b, b)

    _, m, _, g = data(31)
    e = (g * F(0.5)) * F(-0.7)
    wanted_m = lerp(m, e, 1 - momentum)
    wanted = lerp(e, wanted_m, momentum) if nesterov else wanted_m
    iterate, options = np.full_like(g, np.nan), {"momentum": momentum, "inv_scale": 0.5, "clip": -0.7}
    formula("muon_", iterate, [m], g, flags=NESTEROV * nesterov, **options)
    assert np.array_equal(iterate.view(np.uint32), wanted.view(np.uint32))
    assert np.array_equal(m.view(np.uint32), wanted_m.view(np.uint32))
    if momentum == 0:
        assert np.array_equal(m, e)


@pytest.mark.parametrize("cautious", [False, True])
def test_muon_after_the_products_bit_for_bit(cautious):
    p, _, _, g = data(32)
    g[::97] = 0
    lr, ratio, wd = 0.01, 1.7, 0.1
    decays = g * p >= 0 if cautious else np.ones_like(p, dtype=bool)
    wanted = fma(F(-lr * ratio), g, np.where(decays, p * F(1 - lr * wd), p))
    options = {"lr": lr, "ratio": ratio, "weight_decay": wd}
    formula("muon_", p, [], g, flags=CAUTIOUS * cautious, **options)
    assert np.array_equal(p.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("bad", ["m", "g"])
def test_lion_shows_a_nan(bad):
    """torch.sign(NaN) is 0: the moment would stay NaN and the weight never move again, without a trace."""
    arrays = {name: np.full(1, x, dtype=F) for name, x in (("p", 1.0), ("m", 0.5), ("g", 2.0))}
    arrays[bad][:] = np.nan
    formula("lion_", arrays["p"], [arrays["m"]], arrays["g"], lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.0)
    assert np.isnan(arrays["p"][0])
    assert np.isnan(arrays["m"][0])


def lamb_as_written(p, m, v, g, *, step, lr, beta1, beta2, eps, wd, corrected, adapts, inv_scale, clip):
    bc1, bc2 = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
    g = (g * F(inv_scale)) * F(clip)
    m = fma(F(1 - beta1), g - m, m)
    v = fma(F(1 - beta2) * g, g, F(beta2) * v)
    u = m / (np.sqrt(v) / F(math.sqrt(bc2)) + F(eps)) * F(1 / bc1)
    u = fma(F(wd), p, u) if wd else u
    norms = [math.sqrt(math.fsum(np.square(x.astype(np.float64)))) for x in (p, u)]
    rate = F(lr * (norms[0] / norms[1]) if adapts else lr)
    return fma(-rate, u, p), m, v, rate


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(("wd", "adapt_all"), [(0.0, False), (0.0, True), (0.1, False), (0.1, True)])
@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_lamb_bit_for_bit(step, wd, adapt_all, corrected):
    """Sums of squares are exact here; the rate, rounded to fp32, cannot tell them from sums in double."""
    p, m, v, g = data(700 + step, spread=3.0)
    options = {"step": step, "lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "inv_scale": 2.0**-7, "clip": 0.3}
    adapts = adapt_all or wd != 0
    *expected, rate = lamb_as_written(p, m, v, g, wd=wd, corrected=corrected, adapts=adapts, **options)
    flags = (0 if corrected else NO_BIAS_CORRECTION) | (ADAPT_ALL if adapt_all else 0)
    got = formula("lamb_", p, [m, v], g, weight_decay=wd, flags=flags, **options)
    assert F(got) == rate
    assert (rate == F(3e-3)) == (not adapts)
    for name, actual, wanted in zip("pmv", (p, m, v), expected, strict=True):
        assert np.array_equal(actual.view(np.uint32), wanted.view(np.uint32)), name


def lamb_rate(p, u, adapt_all=True):
    """The rate for weights ``p`` that go in the direction ``u``: the gradient is the first moment, and there is no second."""
    p, u = np.array(p, dtype=F), np.array(u, dtype=F)
    options = {"lr": 0.5, "beta1": 0.0, "beta2": 1.0, "eps": 1.0, "weight_decay": 0.0}
    flags = NO_BIAS_CORRECTION | (ADAPT_ALL if adapt_all else 0)
    return formula("lamb_", p, [np.zeros_like(p), np.zeros_like(p)], u, flags=flags, **options)


def test_lamb_rates():
    huge, tiny = 1e38, 1e-38  # whose squares fp32 does not have
    assert lamb_rate([3.0, 4.0], [1e-20, 0.0]) == pytest.approx(0.5 * 5 / 1e-20, rel=1e-6)
    assert lamb_rate([huge, huge], [huge, 0.0]) == pytest.approx(0.5 * math.sqrt(2), rel=1e-6)
    assert lamb_rate([tiny, tiny], [tiny, 0.0]) == pytest.approx(0.5 * math.sqrt(2), rel=1e-6)
    assert lamb_rate([0.0, 0.0], [1.0, 0.0]) == 0.5
    assert lamb_rate([1.0, 0.0], [0.0, 0.0]) == 0.5
    assert lamb_rate([0.0, 0.0], [0.0, 0.0]) == 0.5
    assert lamb_rate([0.0, 0.0], [math.nan, 1.0]) == 0.5  # no weights: no ratio; the direction itself shows the NaN
    assert lamb_rate([3.0, 4.0], [1e-20, 0.0], adapt_all=False) == 0.5
    assert math.isnan(lamb_rate([math.nan, 1.0], [1.0, 1.0]))
    assert math.isnan(lamb_rate([1.0, 1.0], [math.nan, 1.0]))


def test_an_infinite_weight_does_not_reach_the_moments_without_coupled_decay():
    p, m, v, g = (np.full(1, x, dtype=F) for x in (np.inf, 0.0, 0.0, 1.0))
    formula("adamw_", p, [m, v], g, step=1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    assert np.isfinite(m[0])
    assert np.isfinite(v[0])


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999, 0.99999])
def test_ema_bit_for_bit_and_against_torch(decay):
    average, weight, _, _ = data(40)
    average[:100] = weight[:100]  # an average that equals the weight stays
    before = average.copy()
    wanted = fma(F(1 - decay), weight - average, average)
    in_torch = torch.lerp(torch.from_numpy(average).double(), torch.from_numpy(weight).double(), 1 - decay).numpy()
    _host.ema(average, weight, decay)
    assert np.array_equal(average.view(np.uint32), wanted.view(np.uint32))
    assert np.array_equal(average[:100], before[:100])
    assert np.all(np.abs(average - in_torch) <= 3 * 2.0**-24 * (np.abs(before) + np.abs(weight)))


def test_late_steps_have_no_bias_correction():
    """At step 2^24, the last one fp32 can count to, both corrections are 1."""
    p, m, v, g = (np.full(1, x, dtype=F) for x in (0.0, 1.0, 1.0, 1.0))
    formula("adamw_", p, [m, v], g, step=2.0**24, lr=0.5, beta1=0.9, beta2=0.999, eps=0.0, weight_decay=0.0)
    assert p[0] == -0.5


def test_clip_and_scale_formulas():
    assert _host.inverse_scale(3.0) == F(1 / 3)
    assert _host.inverse_scale(65536.0) == 2.0**-16
    assert _host.clip_factor(4.0, 1.0) == F(1) / (F(2) + F(1e-6))
    assert _host.clip_factor(0.0, 1.0) == 1.0
    assert _host.clip_factor(1.0, 5.0) == 1.0
    assert _host.clip_factor(math.inf, 1.0) == 0.0
    assert math.isnan(_host.clip_factor(math.nan, 1.0))
    g = torch.nn.Parameter(torch.zeros(4))
    g.grad = torch.tensor([3.0, 4.0, 12.0, 84.0])
    torch.nn.utils.clip_grad_norm_([g], 10.0)
    factor = _host.clip_factor(85.0**2, 10.0)
    np.testing.assert_allclose(g.grad.numpy(), np.array([3, 4, 12, 84], F) * F(factor), rtol=2.0**-22)


def test_arrays_must_fit():
    p, m, v, g = (np.zeros(3, dtype=F) for _ in range(4))
    for moments, grad in (([m, v[:2].copy()], g), ([m, v, v[:2].copy()], g), ([m, v], g[:2].copy())):
        with pytest.raises(ValueError, match="adamw_: arrays of 3 and 2 elements"):
            formula("adamw_", p, moments, grad)
    with pytest.raises(ValueError, match="lion_: 2 moments and 4 options"):
        formula("lion_", p, [m, v], g)
    with pytest.raises(ValueError, match="sgd_: 1 moments and 3 options"):
        _host.update("sgd_", p, [m], g, [0.0] * 3)
    with pytest.raises(ValueError, match="op is 'adam', which is no update op"):
        _host.update("adam", p, [m], g, [])
    with pytest.raises(ValueError, match="ema: arrays of 3 and 2 elements"):
        _host.ema(p, m[:2].copy(), 0.5)
    for arrays in ((p.astype(np.float64), [m, v]), (p, [m, v.astype(np.float64)])):
        with pytest.raises(TypeError):  # a converted copy would be updated instead of the caller's array
            formula("adamw_", *arrays, g)

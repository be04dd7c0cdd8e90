"""csrc/update/rules/*.h and ema.h, bit for bit against the formula as written; tests/ops/test_updates.py has float64."""

import math

import numpy as np
import pytest
import torch

from amp_kernels import _host
from amp_kernels._updates.state import ADAPT_ALL, NO_BIAS_CORRECTION

from ..ops.update_rules import formula

F = np.float32


@pytest.mark.parametrize("bad", ["m", "g"])
def test_lion_shows_a_nan(bad):
    """torch.sign(NaN) is 0: the moment would stay NaN and the weight never move again, without a trace."""
    arrays = {name: np.full(1, x, dtype=F) for name, x in (("p", 1.0), ("m", 0.5), ("g", 2.0))}
    arrays[bad][:] = np.nan
    formula("lion_", arrays["p"], [arrays["m"]], arrays["g"], lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.0)
    assert np.isnan(arrays["p"][0])
    assert np.isnan(arrays["m"][0])


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

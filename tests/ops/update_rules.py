"""The table of update rules: what a step of each must be in float64, and calls that show its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from amp_kernels import _host
from amp_kernels._checks.lists import flat
from amp_kernels._updates.op import RULES
from amp_kernels._updates.samples import Kind
from amp_kernels._updates.state import ADAPT_ALL, CAUTIOUS, COUPLED_DECAY, MAXIMIZE, NESTEROV, NO_BIAS_CORRECTION

from ..helpers.updates import Update

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAMES = {F16: "float16", BF16: "bfloat16"}
EMA_DECAY = 0.875  # Blocks.arguments' own
U = 2.0**-24

#: ``exact(p, moments, g, o, kept)``: what weight and moments must be, each with its bound, from their values before the
#: step, all float64. ``o``: options, flags and step; ``kept``: the moments as the op left them.
Exact = Callable[[Tensor, list[Tensor], Tensor, SimpleNamespace, list[Tensor]], list[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Rule:
    exact: Exact
    calls: Sequence[dict] = field(default_factory=list)  # arguments of Update and of its step, one for each option


def _cautious(direction, g, o):
    return torch.where(direction * g > 0, direction, 0) if o.flags & CAUTIOUS else direction


def _in_doubt(direction, g, error, o):
    """Elements whose sign of a cautious direction, or of the gradient with its decay, rounding may turn."""
    doubt = ((direction.abs() <= error) | (g.abs() <= error)) if o.flags & CAUTIOUS else torch.zeros_like(g)
    assert doubt.sum() <= 2
    return doubt


def _adamw(p, moments, g, o, kept):
    m, v, *largest = moments
    if o.flags & COUPLED_DECAY:
        g = g + o.weight_decay * p
    else:
        p = p * (1 - o.lr * o.weight_decay)
    size = m.abs() + g.abs()
    m, v = m + (1 - o.beta1) * (g - m), o.beta2 * v + (1 - o.beta2) * g * g
    largest = [torch.maximum(v_max, v) for v_max in largest]
    denominator = ((largest or [v])[0] / (1 - o.beta2**o.step)).sqrt() + o.eps
    length = o.lr / (1 - o.beta1**o.step) / denominator
    weight = p - length * _cautious(m, g, o)
    doubt = length * m.abs() * _in_doubt(m, g, 6 * U * size, o)
    bound = 3 * U * p.abs() + 6 * U * size * length + 12 * U * (length * m).abs() + doubt
    return [(weight, bound), (m, 6 * U * size), *((x, 7 * U * x) for x in (v, *largest))]


def _sgd(p, moments, g, o, kept):
    g = g + o.weight_decay * p
    size, doubt = g.abs() + p.abs(), 0.0
    for buffer in moments:
        size = size + buffer.abs()
        buffer = g if o.step == 1 else o.momentum * buffer + (1 - o.dampening) * g
        direction = g + o.momentum * buffer if o.flags & NESTEROV else buffer
        doubt = direction.abs() * _in_doubt(direction, g, 12 * U * size, o)
        moments, g = [(buffer, 6 * U * size)], _cautious(direction, g, o)
    weight = p - o.lr * g
    return [(weight, 2 * U * p.abs() + o.lr * (12 * U * size + doubt) + 2 * U * weight.abs()), *moments]


def _lion(p, moments, g, o, kept):
    (m,) = moments
    size = m.abs() + g.abs()
    c = o.beta1 * m + (1 - o.beta1) * g
    doubt = c.abs() <= 8 * U * size  # rounding may turn the sign
    assert doubt.sum() <= 2
    weight = p - o.lr * (_cautious(c, g, o).sign() + o.weight_decay * p)
    bound = 3 * U * p.abs() + U * o.lr + 2 * U * weight.abs() + 2 * o.lr * doubt
    return [(weight, bound), (o.beta2 * m + (1 - o.beta2) * g, 6 * U * size)]


def _lamb(p, moments, g, o, kept):
    """The weight must be that of float64 from the moments as they are stored, which both passes read."""
    m, v = moments
    wanted_m, wanted_v = o.beta1 * m + (1 - o.beta1) * g, o.beta2 * v + (1 - o.beta2) * g * g
    bounds = [(wanted_m, 6 * U * (m.abs() + g.abs())), (wanted_v, 8 * U * wanted_v + 2.0**-149)]
    m, v = kept
    corrected = not o.flags & NO_BIAS_CORRECTION
    correction1, correction2 = (1 - beta**o.step if corrected else 1.0 for beta in (o.beta1, o.beta2))
    adam = m / correction1 / ((v / correction2).sqrt() + o.eps)
    u = adam + o.weight_decay * p
    # Six roundings of Adam's direction, one of the sum; the norm of u is off by no more than that of its error.
    error = 8 * U * adam.abs() + 2 * U * (o.weight_decay * p).abs()
    rate, rate_error = o.lr, U * o.lr
    if (o.weight_decay or o.flags & ADAPT_ALL) and p.norm() and u.norm():
        rate = o.lr * (p.norm() / u.norm()).item()
        rate_error = rate * (2 * U + (error.norm() / u.norm()).item())
    weight = p - rate * u
    return [(weight, rate * error + 2 * rate_error * u.abs() + U * weight.abs()), *bounds]


def _muon(p, moments, g, o, kept):
    """Before the products: two interpolations of three roundings each. After them: the rate, the decay, their product with a
    weight and the sum are rounded."""
    for m in moments:  # one, or none
        size = m.abs() + g.abs()
        m = o.momentum * m + (1 - o.momentum) * g
        ahead = o.momentum * m + (1 - o.momentum) * g if o.flags & NESTEROV else m
        return [(ahead, 12 * U * size), (m, 6 * U * size)]
    decays = (g * p >= 0) if o.flags & CAUTIOUS else torch.ones_like(p)
    weight = p * (1 - o.lr * o.weight_decay * decays) - o.lr * o.ratio * g
    return [(weight, 2 * U * p.abs() + U * (o.lr * o.ratio * g).abs() + U * weight.abs())]


TABLE = {
    "adamw_": Rule(
        _adamw,
        [
            *({"flags": flags, "optional": amsgrad} for flags in (0, 1, 4, 5) for amsgrad in (False, True)),
            {"flags": CAUTIOUS | MAXIMIZE},
            {"flags": CAUTIOUS | COUPLED_DECAY},
            {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.3},
        ],
    ),
    "sgd_": Rule(
        _sgd,
        [
            {"momentum": 0.0, "optional": False},
            {"dampening": 0.3},
            {"flags": NESTEROV, "weight_decay": 0.25},
            {"flags": NESTEROV | MAXIMIZE},
            {"flags": CAUTIOUS, "momentum": 0.5},
            {"flags": CAUTIOUS | NESTEROV | MAXIMIZE, "weight_decay": 0.25},
        ],
    ),
    "muon_": Rule(
        _muon,
        [
            {},
            {"flags": NESTEROV | MAXIMIZE},
            {"momentum": 0.25, "flags": NESTEROV},
            {"optional": False, "ratio": 0.4},
            {"optional": False, "flags": CAUTIOUS | MAXIMIZE, "lr": 0.5, "weight_decay": 0.75},
        ],
    ),
    "lion_": Rule(
        _lion,
        [{"flags": MAXIMIZE}, {"flags": CAUTIOUS, "beta1": 0.7}, {"beta1": 0.6, "beta2": 0.75, "weight_decay": 0.25}],
    ),
    "lamb_": Rule(
        _lamb,
        [
            {"flags": flags, "weight_decay": decay}
            for flags in (0, MAXIMIZE, NO_BIAS_CORRECTION, ADAPT_ALL, MAXIMIZE | NO_BIAS_CORRECTION | ADAPT_ALL)
            for decay in (0.0, 0.1)
        ],
    ),
}


def formula(name: str, weight: np.ndarray, moments: list[np.ndarray], grad: np.ndarray, *, flags=0, step=1.0, **rest):
    """A step of the formula in place, a plain loop for any CPU, with options by name; of LAMB the length of the step."""
    values = {**RULES[name].declared.options, **{k: v for k, v in rest.items() if k in RULES[name].declared.options}}
    scalars = {k: v for k, v in rest.items() if k not in values}
    return _host.update(name, weight, moments, grad, list(values.values()), flags, step, **scalars)


def check_against_float64(update: Update, before: Update, *, scale: float = 1.0, clip: float = 1.0, **call) -> None:
    """``update`` is ``before`` after a step with the arguments ``call``, the same for every group."""
    o = SimpleNamespace(**{**update.declared.options, "flags": 0, **call})
    for i, grad in enumerate(before.grads):
        kind, _, block, _ = before.place(i)
        o.step = before.count(i) + 1
        assert update.count(i) == o.step
        assert torch.equal(update.grads[i], grad)  # never written
        there = [k for k, buffers in enumerate(before.moments) if buffers[block].numel()]
        p, moments = before.weight(i).double(), [before.moment(k, i).double() for k in there]
        g = flat(grad).double() / scale * clip * (-1 if o.flags & MAXIMIZE else 1)
        kept = [update.moment(k, i) for k in there]
        (weight, bound), *wanted = TABLE[update.declared.name].exact(p, moments, g, o, [m.double() for m in kept])
        assert_close(update.weight(i), weight, bound + store_error(kind, weight), "weight")
        for k, got, (value, error) in zip(there, kept, wanted, strict=True):
            stored = update.moments[k][block].dtype == BF16
            assert_close(got, value, error + (2.0**-8 * value.abs() if stored else 0), update.declared.moments[k])
        assert_visible(update, i)
        assert_averaged(update, before, i, weight, bound)


def codes(t: Tensor) -> np.ndarray:
    return t.contiguous().view(torch.int16).numpy().view(np.uint16)


def store_error(kind: Kind, value: Tensor) -> Tensor:
    """Error that storage in this way may add: half a unit in the last place (that of subnormal numbers
    included) of a 16-bit weight that is its own master, a whole one if the rounding is stochastic; a master split over
    fp16 ends at units of 2^-40."""
    units = 2.0 if kind.stochastic else 1.0
    if kind.master is None and kind.param == BF16:
        return units * (2.0**-8 * value.abs() + 2.0**-134)
    if kind.master is None and kind.param == F16:
        return units * (2.0**-11 * value.abs() + 2.0**-25)
    return torch.full_like(value, 2.0**-41)


def assert_close(actual: Tensor, expected: Tensor, bound: Tensor, what: str) -> None:
    error = (actual.double() - expected).abs()
    worst = int((error / bound).argmax()) if error.numel() else 0
    assert (error <= bound).all(), (
        f"{what}[{worst}] is {actual[worst]}, expected {expected[worst]}: {(error / bound)[worst]:.2f} bounds"
    )


def assert_visible(update: Update, i: int) -> None:
    """The model's weight (16-bit weight, shadow) is the fp32 weight, rounded by the rule of its kind."""
    kind, piece, block, _ = update.place(i)
    weight = update.weight(i)
    if kind.master == F32:
        assert torch.equal(flat(update.params[i]), weight.to(kind.param))
    if kind.master == torch.int16:
        assert np.array_equal(codes(flat(update.params[i])), _host.round_half_away(weight.numpy(), NAMES[kind.param]))
    if kind.shadow:
        assert torch.equal(update.shadows[block][piece], weight.to(kind.shadow))


def assert_averaged(update: Update, before: Update, i: int, weight: Tensor, bound: Tensor) -> None:
    """The average has gone 1 - EMA_DECAY of the way to the new weight, which is known to within ``bound`` and is not
    rounded to 16 bits before."""
    if update.place(i)[0].ema:
        old = before.ema(i).double()
        wanted = old + (1 - EMA_DECAY) * (weight - old)
        size = old.abs() + weight.abs()
        assert_close(update.ema(i), wanted, (1 - EMA_DECAY) * bound + 3 * 2.0**-24 * size, "ema")

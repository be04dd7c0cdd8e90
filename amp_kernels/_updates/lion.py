"""Lion over a list of parameters: unscale, clip, moment, master, 16-bit weight, all in one pass.

With ``g`` the effective gradient::

    c = beta1 * m + (1 - beta1) * g;  p = p * (1 - lr * weight_decay) - lr * sign(c)
    m = beta2 * m + (1 - beta2) * g

(Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023; the decay is decoupled). The sign of NaN is
NaN, so that a broken gradient does not look like zero. Flags: 1 (maximize), 8 (stochastic rounding), 64 (cautious: ``c``
counts as 0 where ``c * g <= 0``). Steps are counted, but not in the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from .._dispatch.library import Sample
from .op import define_update, usual_samples
from .state import CAUTIOUS, MAXIMIZE, STOCHASTIC, cautious_direction, fma, rounded


def _rule(p: Tensor, moments: list[Tensor], g: Tensor, o: SimpleNamespace) -> tuple[Tensor, ...]:
    (m,) = moments
    direction = fma(rounded(o.beta1), m, g * rounded(1 - o.beta1))
    taken = cautious_direction(direction, g, o.flags)
    sign = torch.where(taken.isnan(), taken, taken.sign())  # torch's sign of NaN is 0
    p = fma(rounded(-o.lr), sign, p * rounded(1 - o.lr * o.weight_decay))
    return p, fma(rounded(o.beta2), m, g * rounded(1 - o.beta2))


def _samples(call: Callable[..., Sample]) -> Iterator[Sample]:
    yield from usual_samples(call)
    yield call(330, [torch.float32, torch.bfloat16], flags=CAUTIOUS | MAXIMIZE)


lion_ = define_update(
    "lion_",
    _rule,
    moments=("exp_avg",),
    options={"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
    flags=MAXIMIZE | STOCHASTIC | CAUTIOUS,
    samples=_samples,
)

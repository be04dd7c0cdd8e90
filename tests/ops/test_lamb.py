"""lamb_ on the CPU: every rule of the trust ratio. The rest: test_updates.py."""

import math

import pytest
import torch

import amp_kernels as ak
from amp_kernels._updates.lamb import lamb_
from amp_kernels._updates.samples import Kind
from amp_kernels._updates.state import ADAPT_ALL

from ..helpers.bits import assert_same_bits
from ..helpers.updates import KINDS, Update, flat
from .update_rules import F32

LR, B1 = 1e-2, 0.9
DEFAULTS = {"lr": LR, "beta1": B1, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
BACKENDS = pytest.mark.parametrize("op", [None, lamb_.op.reference], ids=["cpu", "reference"])


def norm(x: torch.Tensor) -> float:
    return x.double().norm().item()


def one(weights, grads, *, op=None, **call) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of one tensor before and after a step with empty moments."""
    update = Update("lamb_", [Kind(F32)], shapes=((len(weights),),), first=True)
    update.params[0].copy_(torch.tensor(weights))
    update.grads[0].copy_(torch.tensor(grads))
    before = update.weight(0).clone()
    update.step(op, **{**DEFAULTS, **call})
    return before, update.weight(0)


@BACKENDS
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e5, 1e30])
def test_a_step_is_a_fraction_of_the_weights(op, scale):
    """Whatever the size of weights and gradients, and where fp32 has no squares of them."""
    before, after = one([scale * x for x in (1.0, -2.0, 2.0)], [1.0, -1.0, 3.0], op=op, eps=0.0, weight_decay=1e-40)
    assert norm(after.double() - before.double()) == pytest.approx(LR * norm(before), rel=1e-5)


@BACKENDS
@pytest.mark.parametrize("where", ["weight", "grad", "moment"])
def test_a_nan_shows_in_every_weight_of_its_tensor(op, where):
    """It is in a norm; another tensor has nothing to do with it."""
    update = Update("lamb_", [Kind(F32)], shapes=((3,), (5,)))
    target = {"weight": update.params[0], "grad": update.grads[0], "moment": update.moments[0][0][16:19]}[where]
    target[1] = math.nan
    update.step(op)
    assert update.weight(0).isnan().all()
    assert not update.weight(1).isnan().any()


@BACKENDS
def test_an_infinite_weight_does_not_reach_the_moments(op):
    update = Update("lamb_", [Kind(F32)], shapes=((3,),))
    update.params[0][1] = math.inf
    update.step(op, weight_decay=0.0)  # no ratio
    assert update.weight(0).isinf().tolist() == [False, True, False]
    assert update.moment(0, 0).isfinite().all()


def halves(update, between=lambda squares: None, backend="cpu", **call):
    """Both halves of a step; ``between``: what the ranks do with the sums."""
    squares = torch.zeros(len(update.params), 2, dtype=torch.float64)
    with ak.backend(backend):
        for second in (False, True):
            arguments = update.arguments(**call)._replace(squares=squares, second=second)
            if not second:
                arguments = arguments._replace(steps=[s.clone() for s in arguments.steps])
            lamb_.step(arguments)
            if not second:
                between(squares)
    return squares


@pytest.mark.parametrize("backend", ["reference", "cpu", "emulate"])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_two_halves_are_one_step(backend, found):
    call = {"grad_scale": 3.0, "sum_sq": 50.0, "max_norm": 2.0, "found_inf": found, "weight_decay": 0.1}
    whole, halved = (Update("lamb_", KINDS, ((0, 3), (7, 5), (), (1031,))) for _ in range(2))
    before = [flat(t).clone() for t in halved.tensors]
    squares = halves(halved, backend=backend, **call)
    whole.step(**call)
    for i, (got, wanted, old) in enumerate(zip(halved.tensors, whole.tensors, before, strict=True)):
        assert_same_bits(flat(got), flat(wanted), f"tensor {i}")
        assert found == 0.0 or old.isnan().any() or torch.equal(flat(got), old)
    weights = [old[: p.numel()].double().square().sum() for old, p in zip(before, halved.params, strict=False)]
    if found:
        assert not squares.any()
    else:
        assert torch.allclose(squares[:3, 0], torch.stack(weights[:3]), rtol=1e-14)  # of fp32 parameters


@pytest.mark.parametrize("backend", ["reference", "cpu", "emulate"])
def test_pieces_step_as_their_tensor(backend):
    """Two chunks of the CPU's kernel in pieces of one, none and the rest, whose sums are added up."""
    call = {**DEFAULTS, "flags": ADAPT_ALL}
    whole = Update("lamb_", [Kind(F32)], ((16_417,),))
    pieces = Update("lamb_", [Kind(F32)], ((16_384,), (0,), (33,)))
    for into, source in ((pieces.params, whole.params), (pieces.grads, whole.grads)):
        into[0].copy_(source[0][:16_384]), into[2].copy_(source[0][16_384:])
    for k in range(2):
        moments = whole.moments[k][0][16:16_433]
        pieces.moments[k][0][16:16_400], pieces.moments[k][0][16_400:16_433] = moments[:16_384], moments[16_384:]
    pieces.steps[0].copy_(whole.steps[0].expand(3))
    whole.step(**call)
    halves(pieces, lambda squares: squares.copy_(squares.sum(0).expand(3, 2)), backend, **call)
    assert torch.equal(torch.cat([pieces.weight(0), pieces.weight(2)]), whole.weight(0))


def test_halves_refuse_sums_that_do_not_fit():
    update = Update("lamb_", [Kind(F32)], ((3,), (5,)))
    for wrong in (
        torch.zeros(1, 2, dtype=torch.float64),
        torch.zeros(2, 2),
        torch.zeros(2, 4, dtype=torch.float64)[:, ::2],
        torch.zeros(5, dtype=torch.float64)[1:].view(2, 2),
    ):
        with pytest.raises(RuntimeError, match="lamb_half_: squares"):
            lamb_.half_op.overload(*update.arguments()._replace(squares=wrong, second=False))

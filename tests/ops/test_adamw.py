"""adamw_ on the CPU: what only AdamW has, the largest second moment and torch's steps. The rest: test_updates.py."""

import math

import pytest
import torch

from amp_kernels._updates.adamw import adamw_
from amp_kernels._updates.samples import Kind
from amp_kernels.testing.updates import Update

from .update_rules import F32

BACKENDS = pytest.mark.parametrize("op", [None, adamw_.op.reference], ids=["cpu", "reference"])


@BACKENDS
def test_the_maximum_keeps_a_nan(op):
    """torch.maximum: NaN if either is; a maximum that drops it would hide a broken moment for good."""
    update = Update("adamw_", [Kind(F32)], shapes=((4,),))
    update.moments[2][0][16:20] = torch.tensor([math.nan, 0.0, 1e30, 1e-30])
    update.grads[0][1] = math.nan
    update.step(op)
    assert update.moment(2, 0).isnan().tolist() == [True, True, False, False]
    assert update.moment(2, 0)[2] == 1e30
    assert update.weight(0).isnan().tolist() == [True, True, False, False]


def test_amsgrad_of_one_block_only():
    kinds = [Kind(F32), Kind(F32)]
    plain, ams = Update("adamw_", kinds, optional=False), Update("adamw_", kinds)
    ams.moments[2][0] = ams.moments[2][0][:0]
    plain.step()
    ams.step()
    for i in range(len(plain.params)):
        same = torch.equal(plain.weight(i), ams.weight(i))
        assert same == (plain.place(i)[2] == 0) or plain.params[i].numel() < 2


@pytest.mark.parametrize("fused", [False, True])
def test_follows_torch_over_many_steps(fused):
    """A parameter that misses gradients keeps its own step count: bias correction is per parameter, as in torch."""
    g = torch.Generator().manual_seed(8)
    weights = [torch.randn(500, generator=g), torch.randn(33, 3, generator=g)]
    theirs = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, fused=fused, foreach=False)
    ours = Update("adamw_", [Kind(F32)], shapes=((500,), (33, 3)), first=True, optional=False)
    layout = ours.layout.clone()
    for step in range(20):
        grads = [torch.randn(w.shape, generator=g) for w in weights]
        active = [0, 1] if step % 3 else [0]
        for i, t in enumerate(theirs):
            t.grad = grads[i] if i in active else None
        optimizer.step()
        ours.params, ours.grads, ours.layout = [weights[i] for i in active], [grads[i] for i in active], layout[active]
        ours.step(lr=1e-2, beta2=0.99, weight_decay=0.1)
    assert ours.steps[0].tolist() == [20.0, 13.0]
    for w, t in zip(weights, theirs, strict=True):
        torch.testing.assert_close(w, t.detach(), rtol=2e-6, atol=2e-6)

"""sgd_ on the CPU: the first step after an overflow, and torch's steps. The rest: test_updates.py."""

import torch

from amp_kernels._updates.samples import Kind
from amp_kernels.testing.updates import Update

from .update_rules import F32


def test_first_step_overflows():
    """torch's fused SGD allocates the buffer uninitialised, skips, and takes its content for history from then on."""
    update = Update("sgd_", [Kind(F32)], shapes=((100,),), first=True)
    update.moments[0][0].fill_(torch.nan)  # what uninitialised memory may hold
    start = update.params[0].clone()
    update.step(found_inf=1.0)
    assert torch.equal(update.params[0], start)
    assert update.count(0) == 0
    update.step(found_inf=0.0, weight_decay=0.0)
    assert update.count(0) == 1
    assert torch.equal(update.moment(0, 0), update.grads[0])
    torch.testing.assert_close(update.params[0], start - 1e-2 * update.grads[0])

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

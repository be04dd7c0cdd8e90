"""The Triton kernels of rotary_forward and rotary_backward in the interpreter; run by test_interpreted.py."""

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._triton import rotary as module
from amp_kernels.cli.check import check_backend

from ..helpers.generators import normal

FORWARD, BACKWARD = REGISTRY["rotary_forward"], REGISTRY["rotary_backward"]
F32 = torch.float32


@pytest.mark.parametrize("op", [FORWARD, BACKWARD], ids=lambda op: op.name)
def test_samples_of_the_op(op):
    assert check_backend(op, "triton", "cpu") > 0


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "rotary"), [(32, 32), (20, 12)])
def test_heads_in_several_blocks_and_tokens_in_strips(width, rotary, interleaved, monkeypatch):
    monkeypatch.setattr(module, "_ELEMENTS", 128)
    q = normal(2, 7, 9, 2 * width)[..., :width]
    k = normal(2, 9, 7, width, seed=1).transpose(1, 2)[:, :, :5]
    grads = normal(2, 9, 7, width, seed=2).transpose(1, 2), normal(2, 7, 5, width, seed=3)
    cos, sin = normal(2, 7, rotary, seed=4), normal(2, 7, rotary, seed=5)
    weights = normal(width, seed=6), normal(width, seed=7)
    q[0, 1] *= 2.0**100  # its squares overflow
    options = {"eps": 1e-3, "interleaved": interleaved, "out_dtype": F32}
    for op, operands in (
        (FORWARD, (q[1:], k[1:], cos[1:], sin[1:])),
        (FORWARD, (q, k, cos, sin, *weights)),
        (BACKWARD, (*grads, cos, sin)),
        (BACKWARD, (*grads, cos, sin, q, k, *weights)),
    ):
        for got, want in zip(op.triton(*operands, **options), op.reference(*operands, **options), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)

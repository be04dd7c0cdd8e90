"""Optimizers with moments in 8 bits and masters of 24, steps of them, and all that a step may write."""

import pytest
import torch

from ..helpers.generators import normal
from .optimizers import bf16, f16, f32, make, params_of

SHAPES = [(64, 64), (33,), (4, 32, 40), (64, 96)]
KINDS = {
    "fp32": (f32, "fp32"),
    "bf16 split24": (bf16, "split24"),
    "fp16 split24": (f16, "split24"),
    "none": (bf16, "none"),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
EIGHT = {"state_dtype": "8bit", "seed": 5}


def weights(dtype=f32, shapes=SHAPES):
    """The last matrix is transposed in memory."""
    params = [torch.nn.Parameter(normal(*shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]
    params[-1].data = params[-1].data.t().contiguous().t()
    return params


def optimizer_of(name, kind, options, params=None, **more):
    dtype, master = KINDS[kind]
    return make(name, weights(dtype) if params is None else params, master_weights=master, **EIGHT, **options, **more)


def step(optimizer, number, scale=1.0):
    for i, p in enumerate(params_of(optimizer)):
        p.grad = torch.empty_like(p).copy_(normal(*p.shape, seed=100 * number + i) * scale)
    optimizer.step()


def train(optimizer, first, last):
    for number in range(first, last):
        step(optimizer, number)
    return params_of(optimizer)


def bits(optimizer, counts=True):
    """All that a step may write: parameters and buffers; with or without the counts of steps."""
    params = params_of(optimizer)
    places = [optimizer._store.places[id(p)] for p in params if id(p) in optimizer._store.places]
    blocks = dict.fromkeys(place.block for place in places)
    buffers = (buffer for block in blocks for buffer in block.tensors()[0 if counts else 1 :])
    return [t.detach().clone() for t in (*params, *buffers)]


def assert_same_tensors(one, other):
    assert len(one) == len(other)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))

"""A gradient of zeros that has no memory (torch._efficientzerotensor) does in every backward what ordinary zeros do."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY

from ..helpers.generators import normal
from .composites import samples

BACKENDS = ("cpu", "emulate", "reference")
DIFFERENTIABLE = [op for op in REGISTRY.values() if op.composite]


def tensors_of(value) -> list[torch.Tensor]:
    return [t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, torch.Tensor)]


def gradients(function, inputs, zeros) -> list[torch.Tensor | None]:
    results = [t for t in tensors_of(function()) if t.requires_grad]
    return torch.autograd.grad(results, inputs, [zeros(t) for t in results], allow_unused=True)


def ordinary(t):
    return torch.zeros_like(t)


def without_memory(t):
    return torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)


def check(function, inputs) -> None:
    got, want = (gradients(function, inputs, zeros) for zeros in (without_memory, ordinary))
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_every_op(op, backend):
    checked = 0
    for args, kwargs in samples(op, "cpu"):
        inputs = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
        if inputs:
            with ak.backend(backend):
                check(lambda args=args, kwargs=kwargs: op(*args, **kwargs), inputs)
            checked += 1
    assert checked


TARGET = torch.tensor([0, 2, 4])
PUBLIC = {
    "linear": lambda x: ak.linear(x, x),
    "matmul": lambda x: ak.matmul(x, x.t()),
    "layer_norm": lambda x: ak.layer_norm(x, (5,)),
    "rms_norm": lambda x: ak.rms_norm(x, (5,)),
    "cross_entropy": lambda x: ak.cross_entropy(x, TARGET),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PUBLIC)
def test_functions_with_nodes_in_cpp(name, dtype):
    x = normal(3, 5, dtype=dtype, grad=True)
    check(lambda: PUBLIC[name](x), [x])


@pytest.mark.parametrize("backend", ["cpu", "emulate"])
def test_zeros_without_memory_are_not_written_to(backend):
    zeros = torch._efficientzerotensor(3)
    message = r"unscale_: grads is torch\._efficientzerotensor; accepted: tensors with memory"
    with ak.backend(backend), pytest.raises(RuntimeError, match=message):
        REGISTRY["unscale_"]([torch.ones(3), zeros], None, torch.ones(()))

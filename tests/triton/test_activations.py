"""The Triton kernels of activations, compiled for GPUs that are not there."""

import pytest
import torch

from amp_kernels._checks.activations import ACTIVATIONS
from amp_kernels._triton import activation_backward, activation_forward

from . import aot

ARCHS = (80, 90, 100, 120)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
def test_activation_backward_is_memory_bound_code(arch, activation):
    """Inner tiles load and store 16 bytes at a time, for any number of elements; a gated one for whole groups of 16."""
    gated = activation == "swiglu"
    z = torch.empty(255, 1056 if gated else 513, dtype=torch.bfloat16)
    grad = torch.empty(255, 528, dtype=torch.bfloat16) if gated else z
    with aot.compiling_for(arch) as kernels:
        activation_backward.activation_backward(grad, z, activation=activation)
    copies = 2 if gated else 1  # such a row ends with a whole group, so its masks are as fine
    assert aot.count(r"ld\.global\.v4\.b32", kernels[0]) == copies * (2 + gated)
    assert aot.count(r"st\.global\.v4\.b32", kernels[0]) == copies * (1 + gated)
    assert aot.count(r"\.f64", kernels[0]) == 0
    assert aot.usage(kernels[0]).stack == 0
    assert aot.usage(kernels[0]).registers <= 128, "two blocks of 256 threads must fit an SM"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in ("none", "swiglu")])
def test_activation_backward_with_sums_is_memory_bound_code(arch, activation):
    """A thread of 128 takes 32 elements at a time."""
    z = torch.empty(255, 528, dtype=torch.bfloat16)
    with aot.compiling_for(arch) as kernels:
        activation_backward.activation_backward(z, z, activation=activation, bias_grad=True)
    assert aot.count(r"ld\.global\.v4\.b32", kernels[0]) == 2 * 4
    assert aot.count(r"st\.global\.v4\.b32", kernels[0]) == 4
    assert aot.count(r"\.f64", kernels[0]) == 0
    assert aot.usage(kernels[0]).stack == 0
    assert aot.usage(kernels[0]).registers <= 168, "three blocks of 128 threads must fit an SM"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_activation_forward_is_memory_bound_code(arch, activation):
    gated = activation == "swiglu"
    z = torch.empty(255, 1056 if gated else 513, dtype=torch.bfloat16)
    with aot.compiling_for(arch) as kernels:
        activation_forward.activation_forward(z, activation=activation)
    copies = 2 if gated else 1
    assert aot.count(r"ld\.global\.v4\.b32", kernels[0]) == copies * (1 + gated)
    assert aot.count(r"st\.global\.v4\.b32", kernels[0]) == copies
    assert aot.count(r"\.f64", kernels[0]) == 0
    assert aot.usage(kernels[0]).stack == 0
    assert aot.usage(kernels[0]).registers <= 128

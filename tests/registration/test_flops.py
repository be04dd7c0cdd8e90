"""torch.utils.flop_counter counts the package's products as torch's own; importing the package does not import it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import amp_kernels as ak

from ..helpers import generators
from ..helpers.processes import python

normal = functools.partial(generators.normal, dtype=torch.bfloat16, grad=True)


def flops(function, *tensors):
    with FlopCounterMode(display=False) as counter:
        out = function(*tensors)
        if out.requires_grad:
            out.float().sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("grad", [False, True])
def test_as_many_as_torch_counts(grad):
    x, w, b = normal(5, 7, grad=grad), normal(4, 7, grad=grad), normal(4, grad=grad)
    assert flops(ak.linear, x, w, b) == flops(F.linear, x, w, b) == (3 if grad else 1) * 2 * 5 * 7 * 4
    a, c = normal(3, 5, 7, grad=grad), normal(3, 7, 2, grad=grad)
    assert flops(ak.matmul, a, c) == flops(torch.matmul, a, c) == (3 if grad else 1) * 2 * 3 * 5 * 7 * 2
    assert flops(lambda p, q: ak.baddbmm(torch.ones(2), p, q), a, c) == flops(torch.matmul, a, c)


def test_a_fused_activation_and_mlp():
    x, w1, w2 = normal(5, 8), normal(12, 8), normal(3, 6)
    expected = flops(lambda: F.linear(F.glu(F.linear(x, w1)), w2))
    assert flops(lambda: ak.mlp(x, w1, None, w2, activation="swiglu")) == expected
    assert flops(lambda: ak.linear(x, w1, activation="gelu")) == 3 * 2 * 5 * 8 * 12


def test_accumulation_into_main_grad():
    module = ak.nn.Linear(7, 4, bias=False, dtype=torch.bfloat16)
    with ak.nn.accumulate_fp32(module):
        assert flops(module, normal(5, 7)) == 3 * 2 * 5 * 7 * 4


def test_a_counter_made_before_the_package_was_imported():
    script = (
        "import torch; from torch.utils.flop_counter import FlopCounterMode as Counter\n"
        "counter = Counter(display=False)\n"
        "import amp_kernels as ak\n"
        "x = torch.ones(2, 3).half()\n"
        "with counter: ak.matmul(x, x.t())\n"
        "print(counter.get_total_flops())"
    )
    assert python("-c", script).stdout == "24\n"


def test_importing_the_package_does_not_import_the_counter():
    script = "import sys, amp_kernels; print('torch.utils.flop_counter' in sys.modules, 'triton' in sys.modules)"
    assert python("-c", script).stdout == "False False\n"

"""GroupedLinear: its parameters, its forward, gradients in main_grad, and optimizers on weights of three dimensions."""

import copy
import math

import pytest
import torch

import amp_kernels as ak
from amp_kernels.nn import GroupedLinear, accumulate_fp32

from ..helpers.generators import normal


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


def layer(**options):
    torch.manual_seed(0)
    return GroupedLinear(3, 12, 8, **options)


def test_parameters():
    module = GroupedLinear(5, 400, 60, bias=True, dtype=torch.float64)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {"weight": (5, 60, 400), "bias": (5, 60)}
    for parameter in module.parameters():  # uniform within 1 / sqrt(400)
        assert parameter.dtype == torch.float64
        assert 0.045 < parameter.abs().max() <= 0.05
        assert abs(parameter.std() * math.sqrt(3) / 0.05 - 1) < 0.1
    assert layer().bias is None
    assert str(layer(activation="silu")) == (
        "GroupedLinear(num_groups=3, in_features=12, out_features=8, bias=False, activation='silu')"
    )
    assert GroupedLinear(2, 0, 3).weight.shape == (2, 3, 0)


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_each_group_is_a_linear_layer(activation, bias):
    module, x = layer(bias=bias, activation=activation), normal(10, 12, grad=True)
    for autocast in (False, True):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = module(x, ends(4, 4, 9))
            out.float().square().sum().backward()
            grads = [p.grad for p in module.parameters()]
            module.zero_grad()
            for g, rows in enumerate((slice(0, 4), slice(4, 4), slice(4, 9))):
                expected = ak.linear(x[rows], module.weight[g], module.bias[g] if bias else None, activation=activation)
                torch.testing.assert_close(out[rows], expected, rtol=1e-2 if autocast else 1e-5, atol=1e-4)
                expected.float().square().sum().backward()
        assert not out[9:].any()
        for grad, parameter in zip(grads, module.parameters(), strict=True):
            torch.testing.assert_close(
                grad, parameter.grad, rtol=3e-2 if autocast else 1e-5, atol=1e-2 if autocast else 1e-5
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_main_grad(dtype, op_calls):
    """Fresh memory is NaN: an empty group's gradient is written with zeros at first, and not touched later."""
    module = layer(dtype=dtype, bias=True)
    plain, total = copy.deepcopy(module), 0
    with accumulate_fp32(module):
        module.weight.main_grad.fill_(math.nan)
        for i, offs in enumerate((ends(2, 2, 6), ends(0, 0, 5), ends(6, 6, 6))):
            x, grad = normal(6, 12, dtype=dtype, seed=i), normal(6, 8, dtype=torch.bfloat16, seed=10 + i)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                module(x, offs).backward(grad)
                plain.zero_grad()
                plain(x, offs).backward(grad)
            total = total + plain.weight.grad.float()
            assert module.weight.grad.data_ptr() == module.weight.main_grad.data_ptr()
            assert module.weight.grad.dtype == module.bias.grad.dtype == torch.float32
            torch.testing.assert_close(
                module.weight.grad, total, rtol=1e-6 if dtype == torch.float32 else 2e-2, atol=1e-2
            )
            if i == 0:
                assert not module.weight.grad[1].any()
                module.weight.main_grad[1].fill_(-0.0)
            if i == 1:
                assert module.weight.grad[1].signbit().all()
        overwrites = [kwargs.get("overwrite", False) for _, kwargs in op_calls["grouped_gemm_accumulate_"]]
    assert overwrites == [True, False, False]


def test_a_weight_of_grouped_mm_itself_accumulates(op_calls):
    """``b`` as it is laid out, ``[G, K, N]``."""
    module = GroupedLinear(3, 8, 12, dtype=torch.bfloat16)
    x = normal(6, 12, dtype=torch.bfloat16)
    with accumulate_fp32(module):
        for _ in range(2):
            ak.grouped_mm(x, module.weight, offs=ends(2, 2, 6)).sum().backward()
        expected = torch.stack([x[:2].float().sum(0), torch.zeros(12), x[2:].float().sum(0)])[:, :, None].expand(
            3, 12, 8
        )
        torch.testing.assert_close(module.weight.grad, 2 * expected, rtol=1e-5, atol=1e-5)
    assert len(op_calls["grouped_gemm_accumulate_"]) == 2


def test_muon_takes_each_group_by_itself():
    """The step of a stack is that of its matrices."""
    stack = torch.nn.Parameter(normal(3, 8, 12))
    alone = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    stack.grad = normal(3, 8, 12, seed=1)
    stack.grad[1] = 0  # no token went there
    for matrix, grad in zip(alone, stack.grad, strict=True):
        matrix.grad = grad.clone()
    for parameters in ([stack], alone):
        ak.optim.Muon(parameters, lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(stack.detach(), torch.stack([matrix.detach() for matrix in alone]))
    assert torch.equal(stack[1], normal(3, 8, 12)[1])


def test_lamb_has_one_trust_ratio_for_the_stack():
    weight, grad = normal(3, 8, 12), normal(3, 8, 12, seed=1)
    updates = []
    for shape in ((3, 8, 12), (24, 12)):
        parameter = torch.nn.Parameter(weight.view(shape).clone())
        parameter.grad = grad.view(shape).clone()
        ak.optim.LAMB([parameter], lr=0.1).step()
        updates.append(parameter.detach().view(-1))
    assert torch.equal(*updates)


def test_bad_input():
    with pytest.raises(ValueError, match="GroupedLinear: activation is 'tanh'; accepted"):
        GroupedLinear(2, 3, 4, activation="tanh")
    with pytest.raises(ValueError, match="GroupedLinear: out_features is 5; accepted with activation='swiglu'"):
        GroupedLinear(2, 3, 5, activation="swiglu")
    with pytest.raises(ValueError, match=r"a has shape \[6, 11\] and b \[3, 8, 12\]; accepted"):
        layer()(torch.ones(6, 11), ends(1, 2, 3))
    with pytest.raises(ValueError, match=r"offs has shape \[2\]; accepted: \[3\]"):
        layer()(torch.ones(6, 12), ends(1, 2))
    with pytest.raises(ValueError, match=r"accepted: \[T, in_features\] and \[G, out_features, in_features\]"):
        layer()(torch.ones(3, 6, 12), ends(1, 2, 3))
    with pytest.raises(ValueError, match="offs is None; accepted with these dimensions: int32"):
        layer()(torch.ones(6, 12), None)

"""Experts like those of Hugging Face's model files, which are not installed here (tests/examples/test_model_families.py takes its own)."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak
from amp_kernels.nn import accumulate_fp32, convert, experts, revert

from ..helpers.generators import normal
from ..helpers.poison import poisoned_allocations


class Experts(torch.nn.Module):
    """Mixtral's: a loop over the experts that have tokens."""

    act = torch.nn.SiLU

    def __init__(self, groups=4, width=16, inner=24, dtype=torch.float32):
        super().__init__()
        self.num_experts = groups
        self.gate_up_proj = torch.nn.Parameter(normal(groups, 2 * inner, width, dtype=dtype, scale=0.2))
        self.down_proj = torch.nn.Parameter(normal(groups, width, inner, dtype=dtype, seed=1, scale=0.2))
        self.act_fn = self.act()

    def gate(self, z):
        gate, up = z.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        total = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert == self.num_experts:
                continue
            token, place = torch.where(top_k_index == expert)
            hidden = self.gate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
            out = F.linear(hidden, self.down_proj[expert]) * top_k_weights[token, place, None]
            total.index_add_(0, token, out.to(total.dtype))
        return total


class Gelu(Experts):
    act = torch.nn.GELU


class ValuesFirst(Experts):
    def gate(self, z):
        up, gate = z.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Limited(Experts):
    def gate(self, z):
        return super().gate(z).clamp(max=0.1)


class WithBias(Experts):
    def __init__(self):
        super().__init__()
        self.down_proj_bias = torch.nn.Parameter(torch.zeros(4, 16))


def routes(tokens=40, groups=4, dtype=torch.float32, seed=5):
    """Two experts for each token, never number 1."""
    scores = normal(tokens, groups, seed=seed)
    scores[:, 1] = -math.inf
    weights, index = scores.softmax(1).topk(2)
    return index, weights.to(dtype)


def run(module, x, index, weights):
    out = module(x, index, weights)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, weights, *module.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_and_gradients_are_those_of_the_loop(dtype):
    module = Experts(dtype=dtype)
    x, (index, weights) = normal(40, 16, dtype=dtype, grad=True), routes(dtype=dtype)
    weights.requires_grad_()
    loop = run(module, x, index, weights)
    assert experts.is_converted(convert(module))
    torch.testing.assert_close([*run(module, x, index, weights)], [*loop], rtol=1e-4, atol=1e-5)
    assert "amp_kernels.grouped_mm in place of " in str(module)
    assert type(revert(module)) is Experts


def test_autocast_and_16_bit_parameters_on_poisoned_memory():
    wide, (index, weights) = normal(40, 16, grad=True), routes()
    weights.requires_grad_()
    expected = run(Experts(), wide, index, weights)
    for dtype in (torch.float32, torch.bfloat16):
        module, x = convert(Experts(dtype=dtype)), wide.detach().to(dtype).requires_grad_()
        with poisoned_allocations(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            found = run(module, x, index, weights)
        assert found[0].dtype == dtype
        for one, other in zip(found, expected, strict=True):
            assert ((one.double() - other.double()).norm() / other.double().norm()).item() < 2e-2
        assert not found[3][1].any()  # nobody went to expert 1
        assert not found[4][1].any()


def test_second_derivatives():
    module, x, (index, weights) = (
        convert(Experts(dtype=torch.float64)),
        normal(6, 16).double(),
        routes(6, dtype=torch.float64),
    )
    assert torch.autograd.gradgradcheck(lambda x: module(x, index, weights), x.requires_grad_())


def test_tokens_of_other_ranks_and_no_tokens():
    """Expert parallelism gives the id past the last one to tokens of other ranks."""
    module, x, (index, weights) = Experts(), normal(40, 16, grad=True), routes()
    index[::3, 0] = 4
    expected = module(x, index, weights)
    torch.testing.assert_close(convert(module)(x, index, weights), expected, rtol=1e-4, atol=1e-5)
    out = module(x[:0], index[:0], weights[:0])
    out.sum().backward()
    assert out.shape == (0, 16)
    assert not module.gate_up_proj.grad.any()


@pytest.mark.parametrize("kind", [Gelu, ValuesFirst, Limited, WithBias])
def test_others_stay(kind):
    module = convert(kind())
    assert type(module) is kind


def test_a_hook_on_the_activation_takes_the_own_forward():
    module, x, (index, weights) = Experts(), normal(40, 16), routes()
    expected = module(x, index, weights)
    convert(module)
    seen = []
    module.act_fn.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(module(x, index, weights), expected)
    assert len(seen) == 3


def test_copies_and_pickles():
    module, x, (index, weights) = convert(Experts()), normal(40, 16), routes()
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(other(x, index, weights), module(x, index, weights))


def test_accumulate_fp32(op_calls):
    module = convert(Experts(dtype=torch.bfloat16))
    x, (index, weights) = normal(40, 16, dtype=torch.bfloat16), routes(dtype=torch.bfloat16)
    with accumulate_fp32(module):
        for _ in range(2):
            module(x, index, weights).sum().backward()
        once = [p.grad / 2 for p in module.parameters()]
        assert all(p.grad.data_ptr() == p.main_grad.data_ptr() for p in module.parameters())
    assert len(op_calls["grouped_gemm_accumulate_"]) == 4
    module.zero_grad()
    module(x, index, weights).sum().backward()
    for one, p in zip(once, module.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad.float(), rtol=2e-2, atol=1e-2)


def test_compiles_without_a_graph_break():
    module, x, (index, weights) = convert(Experts()), normal(40, 16), routes()
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x, index, weights)
        assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x, index, weights), expected)


def test_batch_invariant():
    module, x, (index, weights) = convert(Experts(dtype=torch.bfloat16)), normal(40, 16, dtype=torch.bfloat16), routes()
    with ak.batch_invariant():
        whole = module(x, index, weights)
        for rows in (slice(0, 1), slice(7, 20)):
            assert torch.equal(module(x[rows], index[rows], weights[rows]), whole[rows])

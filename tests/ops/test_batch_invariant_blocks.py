"""batch_invariant(k_blocks=n): sums over features that come out the same on 1, 2, 4 or 8 ranks of tensor parallelism."""

import functools

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.batch_invariant import is_batch_invariant
from amp_kernels.distributed import tree_sum

from ..helpers import generators
from ..helpers.backends import use

normal = functools.partial(generators.normal, dtype=torch.bfloat16)
F32 = torch.float32
BACKENDS = ["cpu", "reference"]


def parts(x, w, ranks, blocks):
    """Each rank's part of ``x @ w^T`` over its share of the features."""
    with ak.batch_invariant(k_blocks=blocks // ranks):
        return [ak.matmul(a, b.t(), out_dtype=F32) for a, b in zip(x.chunk(ranks, 1), w.chunk(ranks, 1), strict=True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("features", [64, 72, 8 * 37])
def test_any_number_of_ranks(backend, features):
    x, w = normal(5, features), normal(12, features, seed=1)
    with use(backend):
        with ak.batch_invariant(k_blocks=8):
            whole = ak.matmul(x, w.t(), out_dtype=F32)
            rounded = ak.linear(x, w)
        for ranks in (1, 2, 4, 8):
            assert torch.equal(tree_sum(parts(x, w, ranks, 8)), whole)
    assert torch.equal(rounded, whole.bfloat16())
    torch.testing.assert_close(whole.double(), x.double() @ w.double().t(), rtol=1e-4, atol=1e-3)


def test_the_order_is_that_of_a_tree():
    """Not a chain over the blocks: 2^24 and small numbers tell them apart."""
    x = torch.tensor([[2.0**12, 1.0, 1.0, 1.0]]).bfloat16()
    w = torch.tensor([[2.0**12, 1.0, 1.0, 1.0]]).bfloat16()
    with ak.batch_invariant(k_blocks=4):
        tree = ak.matmul(x, w.t(), out_dtype=F32).item()
    assert tree == 2.0**24 + 2  # (2^24 + 1) is 2^24, then + (1 + 1)
    with ak.batch_invariant():
        assert ak.matmul(x, w.t(), out_dtype=F32).item() == 2.0**24


@pytest.mark.parametrize("blocks", [2, 8])
def test_bias_activation_and_one_rounding_follow(blocks):
    x, w, bias = normal(7, 64), normal(16, 64, seed=1), normal(16, seed=2)
    sums = tree_sum(parts(x, w, blocks, blocks)) + bias.float()
    with ak.batch_invariant(k_blocks=blocks):
        assert torch.equal(ak.linear(x, w, bias), sums.bfloat16())
        for name in ("relu", "gelu", "gelu_tanh", "silu", "swiglu"):
            got = ak.linear(x, w, bias, activation=name)
            assert torch.equal(got, ak._raw.activation_forward.op(sums, activation=name).bfloat16())
        residual = normal(7, 16, seed=3)
        plain = tree_sum(parts(x, w, blocks, blocks))
        assert torch.equal(ak.addmm(residual, x, w.t()), (plain + residual.float()).bfloat16())
        halved = ak.addmm(residual, x, w.t(), alpha=0.5, beta=2.0)
        assert torch.equal(halved, (0.5 * plain + 2 * residual.float()).bfloat16())


def test_backward_follows_forward():
    """The gradient of the input is a sum over the output's features; those of weights are sums over rows and are not cut."""
    x, w = normal(7, 64).requires_grad_(), normal(32, 64, seed=1).requires_grad_()
    grad = normal(7, 32, seed=2)
    with ak.batch_invariant(k_blocks=4):
        out = ak.linear(x, w)
    out.backward(grad)
    assert torch.equal(x.grad, tree_sum(parts(grad, w.detach().t(), 4, 4)).bfloat16())
    with ak.batch_invariant():
        assert torch.equal(w.grad, ak.matmul(grad.t(), x.detach()))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_rows_in_blocks(activation):
    x, w1, w2 = normal(9, 32), normal(64, 32, seed=1), normal(16, 32 if activation == "swiglu" else 64, seed=2)
    results = []
    for rows in (slice(0, 9), slice(4, 5)):
        part = x[rows].clone().requires_grad_()
        with ak.batch_invariant(k_blocks=4):
            out = ak.mlp(part, w1, None, w2, activation=activation)
        out.sum().backward()
        results.append((out, part.grad))
    assert all(torch.equal(a[4:5], b) for a, b in zip(*results, strict=True))


def test_the_head_in_blocks():
    x, w, target = normal(9, 32), normal(64, 32, seed=1), torch.arange(9)
    with ak.batch_invariant(k_blocks=4):
        fused = ak.linear_cross_entropy(x, w, target, reduction="none", chunk_size=4)
        assert torch.equal(fused, ak.cross_entropy(ak.linear(x, w), target, reduction="none"))
    with ak.batch_invariant(k_blocks=1):
        assert not torch.equal(ak.matmul(x, w.t(), out_dtype=F32), tree_sum(parts(x, w, 4, 4)))


def test_blocks_of_a_compiled_function():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.kwargs["batch_invariant"] for node in graph.graph.nodes if "linear" in str(node.target)])
        return graph

    w, x = normal(16, 64, seed=1), normal(5, 64)
    compiled = torch.compile(lambda x: ak.linear(x, w), fullgraph=True, backend=backend)
    for blocks in (0, 1, 2, 4, 8, 2, 1, 0):
        with ak.batch_invariant(blocks > 0, k_blocks=blocks or 1):
            assert torch.equal(compiled(x), ak.linear(x, w))
    assert graphs == [[0], [1], [2], [4], [8]]


@pytest.mark.parametrize("blocks", [0, -2, 3, 12, True, 2.0, "2", None])
def test_k_blocks_is_a_power_of_two(blocks):
    error, accepted = (ValueError, "a power of two") if type(blocks) is int else (TypeError, "an int")
    with pytest.raises(error, match=f"k_blocks is .*; accepted: {accepted}"), ak.batch_invariant(k_blocks=blocks):
        pass


def test_sums_that_cannot_be_cut_are_refused_before_anything_runs(op_calls):
    x, w = normal(3, 12), normal(6, 12, seed=1)
    refused = {
        "linear: in_features is 12": lambda: ak.linear(x, w),
        "linear: out_features is 6": lambda: ak.linear(normal(3, 16).requires_grad_(), normal(6, 16)),
        "matmul: K is 12": lambda: ak.matmul(x, w.t()),
        "matmul: N is 6": lambda: ak.matmul(normal(3, 16).requires_grad_(), normal(16, 6)),
        "addmm: K is 12": lambda: ak.addmm(torch.ones(6), x, w.t()),
        "mlp: hidden_features is 6": lambda: ak.mlp(normal(3, 16), normal(6, 16), None, normal(8, 6)),
        "mlp: out_features is 6": lambda: ak.mlp(normal(3, 16).requires_grad_(), normal(8, 16), None, normal(6, 8)),
        "linear_cross_entropy: in_features is 12": lambda: ak.linear_cross_entropy(x, w, torch.arange(3)),
        "linear_cross_entropy: classes is 6": lambda: ak.linear_cross_entropy(
            normal(3, 16).requires_grad_(), normal(6, 16), torch.arange(3)
        ),
    }
    for message, call in refused.items():
        with ak.batch_invariant(k_blocks=8), pytest.raises(ValueError, match=f"{message}; accepted .*a multiple of 8"):
            call()
    with ak.batch_invariant(k_blocks=8), ak.override_matmul(cpu=True), pytest.raises(ValueError, match="K is 12"):
        x @ w.t()
    assert not op_calls["gemm"]
    with ak.batch_invariant(k_blocks=8):
        ak.linear(x.float(), w.float())  # torch's


def test_blocks_nest():
    x, w = normal(3, 64), normal(8, 64, seed=1)
    with ak.batch_invariant(k_blocks=4):
        four = ak.matmul(x, w.t(), out_dtype=F32)
        with ak.batch_invariant():
            one = ak.matmul(x, w.t(), out_dtype=F32)
        with ak.batch_invariant(False, k_blocks=4):
            assert not is_batch_invariant()
        assert torch.equal(ak.matmul(x, w.t(), out_dtype=F32), four)
    assert not torch.equal(one, four)
    with pytest.raises(KeyError), ak.batch_invariant():
        raise KeyError
    assert not is_batch_invariant()


def test_tree_sum():
    values = [
        torch.tensor([2.0**24, 1.0]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 3.0]),
        torch.tensor([1.0, 4.0]),
    ]
    assert tree_sum(values).tolist() == [2.0**24 + 2, 10.0]
    one = tree_sum(values[:1])
    assert torch.equal(one, values[0])
    assert one.data_ptr() != values[0].data_ptr()
    with pytest.raises(ValueError, match="there are 3 summands; accepted: a power of two"):
        tree_sum(values[:3])
    with pytest.raises(ValueError, match="there are 0 summands"):
        tree_sum([])
    with pytest.raises(TypeError, match=r"summands\[1\]"):
        tree_sum([values[0], values[1].bfloat16()])
    with pytest.raises(ValueError, match=r"summands\[1\] has shape \[1\]; accepted: \[2\]"):
        tree_sum([values[0], values[1][:1]])

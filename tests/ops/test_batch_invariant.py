"""batch_invariant: rows come out with the same bits alone and in company, through every public function."""

import functools

import pytest
import torch

import amp_kernels as ak
from amp_kernels.testing import generators

normal = functools.partial(generators.normal, dtype=torch.bfloat16)
W1, W2, W3 = normal(48, 333, seed=1), normal(20, 48, seed=2), normal(20, 24, seed=3)
FUNCTIONS = {
    "linear": lambda x: ak.linear(x, W1, activation="gelu"),
    "matmul": lambda x: ak.matmul(x, W1.t(), out_dtype=torch.float32),
    "mlp": lambda x: ak.mlp(x, W1, None, W2),
    "gated mlp": lambda x: ak.mlp(x, W1, None, W3, activation="swiglu"),
    "addmm": lambda x: ak.addmm(torch.ones(48), x, W1.t()),
    "autocast": lambda x: _under_autocast(x),
}


def _under_autocast(x):
    with torch.autocast("cpu", torch.float16):
        return ak.linear(x.float(), W1.float())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_and_their_gradients(name):
    function, x = FUNCTIONS[name], normal(37, 333)
    with ak.batch_invariant():
        whole = x.clone().requires_grad_()
        out = function(whole)
    out.sum().backward()  # outside: backward follows its forward
    for first, count in ((0, 1), (36, 1), (5, 3), (2, 35)):
        with ak.batch_invariant():
            part = x[first : first + count].clone().requires_grad_()
            some = function(part)
            with torch.no_grad():
                assert torch.equal(function(x[first : first + count]), some)
        some.sum().backward()
        assert torch.equal(some, out[first : first + count])
        assert torch.equal(part.grad, whole.grad[first : first + count])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_gemm_is_told(name, op_calls):
    """Forward and the gradients of rows; a weight gradient is a sum over them and is not."""
    for enabled in (True, False):
        op_calls.clear()
        with ak.batch_invariant(enabled):
            out = FUNCTIONS[name](normal(7, 333).requires_grad_())
        out.sum().backward()
        told = [k.get("batch_invariant", False) for _, k in (*op_calls["gemm"], *op_calls["gemm_dact"])]
        assert told == [enabled] * (4 if "mlp" in name else 2)


def test_blocks_nest_switch_off_and_end_with_an_exception():
    from amp_kernels._dispatch.batch_invariant import is_batch_invariant

    assert not is_batch_invariant()
    with ak.batch_invariant():
        with ak.batch_invariant(False):
            assert not is_batch_invariant()
        assert is_batch_invariant()
    with pytest.raises(KeyError), ak.batch_invariant():
        raise KeyError
    assert not is_batch_invariant()


def test_a_compiled_function_is_compiled_once_for_each_setting():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.kwargs for node in graph.graph.nodes if "linear" in str(node.target)])
        return graph

    compiled = torch.compile(lambda x: ak.linear(x, W1), fullgraph=True, backend=backend)
    x = normal(5, 333)
    for _ in range(2):
        compiled(x)
        with ak.batch_invariant():
            assert torch.equal(compiled(x), ak.linear(x, W1))
    assert [kwargs["batch_invariant"] for (kwargs,) in graphs] == [False, True]

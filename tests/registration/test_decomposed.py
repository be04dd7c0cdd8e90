"""Compilers see torch's own operations in place of norms and activations, and this package's products and losses as ops."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY

from ..helpers.generators import normal

X, STREAM = (normal(6, 16, seed=i) for i in range(2))
WEIGHT = torch.ones(16)
CALLS = {
    "layer_norm": lambda x: ak.layer_norm(x, 16, WEIGHT, WEIGHT),
    "layer_norm residual": lambda x: sum(ak.layer_norm(x, 16, WEIGHT, residual=STREAM)),
    "rms_norm residual": lambda x: sum(ak.rms_norm(x, 16, WEIGHT, residual=STREAM)),
    "rotary": lambda x: sum(ak.rotary(x[None, None], x[None, None], X, X, q_weight=WEIGHT, k_weight=WEIGHT)),
    "gelu": ak.gelu,
    "swiglu": ak.swiglu,
    "linear gelu": lambda x: ak.linear(x, torch.ones(4, 16), activation="gelu"),
    "mlp": lambda x: ak.mlp(x, torch.ones(4, 16), None, torch.ones(4, 4)),
    "loss": lambda x: ak.linear_cross_entropy(x, torch.ones(4, 16), torch.zeros(6, dtype=torch.int64)),
}
OPS = {
    "linear gelu": {"gemm", "activation_backward"},
    "mlp": {"gemm", "gemm_dact"},
    "loss": {"gemm", "cross_entropy_rows_"},
}


def traced(function, x):
    """The package's ops in the programs that torch.compile makes of ``function`` and of its backward."""
    names = set()

    def note(graph, _):
        # An op that writes is an argument.
        called = (op for node in graph.graph.nodes for op in (node.target, *node.args[:1]))
        ops = {op for op in called if isinstance(op, torch._ops.OpOverload) and op.namespace == "amp_kernels"}
        names.update(op._opname for op in ops)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    result = torch.compile(function, backend=aot_autograd(fw_compiler=note), fullgraph=True)(x)
    result.float().sum().backward()
    return names


@pytest.mark.parametrize("name", CALLS)
def test_a_program_has_these_ops(name):
    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            return CALLS[name](x)

    assert traced(call, X.clone().requires_grad_()) == OPS.get(name, set())


@pytest.mark.parametrize("name", ["gemm", "gemm_dact", "gemm_accumulate_"])
def test_a_product_leaves_the_layout_of_its_operands_to_the_compiler(name):
    """Otherwise Inductor casts an operand of two products twice, each time in a kernel of its own."""
    assert torch.Tag.flexible_layout in REGISTRY[name].overload.tags
    for (a, b, *rest), kwargs in REGISTRY[name].samples("cpu"):
        if name == "gemm_accumulate_":
            continue
        for result in REGISTRY[name](a.mT.contiguous().mT, b.mT.contiguous().mT, *rest, **kwargs):
            assert result is None or result.is_contiguous()  # as without the tag, whatever the layout is

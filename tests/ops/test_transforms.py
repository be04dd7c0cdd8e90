"""torch.func transforms and forward-mode AD over matmul and linear give what they give over torch's own ops."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY

from ..helpers.generators import normal
from ..helpers.ops import Ops


def assert_close(ours, stock):
    """Equal up to a few roundings to 16 bits: the stock route rounds where ours does not."""
    torch.testing.assert_close(ours.float(), stock.float(), rtol=0.03, atol=0.03)


@pytest.fixture(params=["own dtype", "autocast"])
def setting(request):
    """(dtype of the tensors, context): 16-bit tensors as they are, or fp32 ones under autocast."""
    if request.param == "own dtype":
        return torch.bfloat16, torch.autocast("cpu", enabled=False)
    return torch.float32, torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_forward_mode(setting, requires_grad):
    """A dropped tangent counts as zero, so a wrong derivative would pass unnoticed."""
    dtype, context = setting
    x, tangent = normal(3, 8).to(dtype), normal(3, 8, seed=1).to(dtype)
    weight = normal(4, 8, seed=2).to(dtype).requires_grad_(requires_grad)

    def ours(x):
        return ak.matmul(ak.linear(x, weight, activation="silu"), weight)

    def stock(x):
        return F.silu(F.linear(x, weight)) @ weight

    with context:
        expected = torch.func.jvp(stock, (x,), (tangent,))[1]
        assert_close(torch.func.jvp(ours, (x,), (tangent,))[1], expected)
        with forward_ad.dual_level():
            assert_close(forward_ad.unpack_dual(ours(forward_ad.make_dual(x, tangent))).tangent, expected)


def test_per_sample_gradients(setting):
    dtype, context = setting
    x = normal(5, 8).to(dtype)
    parameters = {"weight": normal(4, 8, seed=1).to(dtype), "bias": normal(4, seed=2).to(dtype)}

    def loss(linear):
        return lambda p, row: linear(row, p["weight"], p["bias"]).float().square().sum()

    with context:
        ours, stock = (
            torch.vmap(torch.func.grad(loss(linear)), in_dims=(None, 0))(parameters, x)
            for linear in (ak.linear, F.linear)
        )
    for name, parameter in parameters.items():
        assert ours[name].shape == (5, *parameter.shape)
        assert ours[name].dtype == dtype
        assert_close(ours[name], stock[name])


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_matmul_keeps_its_output_dtype(out_dtype):
    """fp32 out of 16-bit operands stays unrounded: 1 + 2^-12 is a sum that bf16 does not hold."""
    a = torch.tensor([[1.0, 2.0**-12]], dtype=torch.bfloat16)
    b = torch.ones(2, 1, dtype=torch.bfloat16)
    out, tangent = torch.func.jvp(lambda a: ak.matmul(a, b, out_dtype=out_dtype), (a,), (a,))
    expected = torch.tensor([[1 + 2.0**-12]]).to(out_dtype or torch.bfloat16)
    assert torch.equal(out, expected)
    assert torch.equal(tangent, expected)


WEIGHTS = [normal(*shape, seed=i) for i, shape in enumerate(((4, 8), (6, 4), (8, 4)))]
BATCHED = {
    "linear": lambda x, w: ak.linear(x, w[0], activation="gelu"),
    "mlp": lambda x, w: ak.mlp(x, w[0], None, w[1]),
    "matmul": lambda x, w: ak.matmul(x, w[2]),
    "baddbmm": lambda x, w: ak.baddbmm(x[:, :4].expand(2, 3, 4), x.expand(2, 3, 8), w[2].expand(2, 8, 4)),
}


@pytest.mark.parametrize("name", BATCHED)
def test_vmap_makes_one_call_of_a_batch(setting, name):
    """Not one for each element; with the weights in the batch as well, and within another vmap."""
    dtype, context = setting
    function, x = BATCHED[name], normal(5, 3, 8).to(dtype)
    weights = [w.to(dtype) for w in WEIGHTS]
    products = 2 if name == "mlp" else 1
    with context:
        expected = torch.stack([function(row, weights) for row in x])
        with Ops() as ops:
            out = torch.vmap(lambda x: function(x, weights))(x)
        assert ops.count("aten::mm", "addmm", "aten::bmm", "baddbmm", "aten::linear") == products
        assert out.dtype == expected.dtype
        assert_close(out, expected)
        many = [torch.stack([w, -w]) for w in weights]
        nested = torch.vmap(lambda w: torch.vmap(lambda x: function(x, w))(x))(many)
        assert_close(nested[0], expected)
        assert_close(nested[1], torch.stack([function(row, [-w for w in weights]) for row in x]))


IN_THEIR_OWN_DTYPE = {
    "gelu": ak.gelu,
    "silu": ak.silu,
    "swiglu": ak.swiglu,
    "layer_norm": lambda x: ak.layer_norm(x, 8),
    "rms_norm": lambda x: ak.rms_norm(x, 8),
    "rotary": lambda x: ak.rotary(x[None, None], x[None, None], x, x, q_weight=x[0], k_weight=x[1])[0][0, 0],
    "embedding": lambda x: ak.embedding((x[:, 0] > 0).long(), WEIGHTS[0]),
    "embedding of a table": lambda x: ak.embedding(torch.tensor([[2, 0, 1]]), x, padding_idx=1),
}


@pytest.fixture
def no_loop():
    """vmap of an op that has no rule for batches is an error, not a loop over them."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


@pytest.mark.parametrize("name", IN_THEIR_OWN_DTYPE)
def test_vmap_without_a_loop(setting, name, no_loop):
    dtype, context = setting
    function, x = IN_THEIR_OWN_DTYPE[name], normal(5, 3, 8).to(dtype)

    def of(row):
        torch.manual_seed(0)
        return function(row)

    def derivative(row):
        return torch.func.grad(lambda row: of(row).float().square().sum())(row)

    with context:
        for f in (of, derivative):
            torch.manual_seed(0)
            found = torch.vmap(f, randomness="same")(x)
            assert_close(found, torch.stack([f(row) for row in x]))
            assert found.dtype == f(x[0]).dtype


def test_every_composite_op_has_a_rule_for_batches():
    for op in REGISTRY.values():
        key = "FuncTorchBatched"
        assert not op.composite or torch._C._dispatch_has_kernel_for_dispatch_key(f"amp_kernels::{op.name}", key)

"""Linear layers of this package whose weights are spread over several ranks, against torch's. Small integers, of which every sum is
exact in 16 bits: so bits must be equal, whatever the order of the sums and wherever a summand was rounded."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import amp_kernels as ak
from bench.training.collectives import CountSent

from ..helpers.ranks import on_ranks
from .worlds import everyone, grid, whole

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def integers(*shape, dtype=BF16, seed=0):
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(dtype):
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6)).to(dtype)
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.copy_(integers(*param.shape, seed=i))
    return model


def placed(tensor, *placements, mesh=None):
    return distribute_tensor(tensor.clone(), mesh or everyone(), placements, src_data_rank=None)


COLUMNS_AND_ROWS = {"0": ColwiseParallel(), "2": RowwiseParallel()}
#: Plans, and where the rows of what comes in lie; where there is none, a function places the model.
PLANS = {
    "fully_shard": (lambda model: fully_shard(model, mesh=everyone()), Replicate()),
    "both": (lambda model: fully_shard(parallelize_module(model, grid()["tp"], COLUMNS_AND_ROWS), mesh=grid()["dp"]), Replicate()),
    "columns and rows": (COLUMNS_AND_ROWS, Replicate()),
    "of a sequence": ({"0": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel(output_layouts=Shard(1))}, Shard(1)),
    "DTensors between": ({"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}, Replicate()),
}  # fmt: skip


def place(model, plan):
    return plan(model) if callable(plan) else parallelize_module(model, everyone(), plan)


def step(model, rows, autocast):
    """Output and gradients, where they lie, and what was communicated."""
    x = placed(integers(2, 4, 8, dtype=next(model.parameters()).dtype, seed=9), rows).to_local().requires_grad_()
    with CountSent() as sent:
        with torch.autocast("cpu", BF16, enabled=autocast):
            y = model(x)
        (y * integers(*y.shape, seed=10)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [y.detach(), x.grad, *map(whole, grads)], [g.placements for g in grads], sent.bytes, sent.calls


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("world", "dtype", "autocast", "before"),
    [
        (2, BF16, False, True),
        (4, F16, False, False),
        (2, F32, True, False),
        (4, F32, True, True),
        (2, F32, False, True),
    ],
)
@on_ranks("world")
def test_a_converted_model_is_torchs_bit_for_bit(plan, dtype, autocast, before):
    plan, rows = PLANS[plan]
    ours = place(ak.convert(make(dtype)) if before else make(dtype), plan)
    ak.convert(ours)
    assert type(ours[0]) is type(ours[2]) is ak.nn.Linear
    mine, expected = step(ours, rows, autocast), step(place(make(dtype), plan), rows, autocast)
    assert all(map(torch.equal, mine[0], expected[0]))
    assert mine[1:] == expected[1:]  # placements of gradients, bytes and calls of collectives


@on_ranks(4)
def test_wherever_x_and_the_weight_lie():
    """All ways to place x and a weight on two dimensions of a mesh, with uneven pieces."""
    tensors = integers(3, 5, 7), integers(9, 7, seed=1), integers(9, seed=2)
    probe = integers(3, 5, 9, seed=3)
    plain = [t.clone().requires_grad_() for t in tensors]
    expected = F.linear(*plain)
    (expected * probe).sum().backward()
    expected = [expected.detach(), *(p.grad for p in plain)]
    wrong, of_x, of_weight = [], (Replicate(), Shard(0), Shard(1), Shard(2)), (Replicate(), Shard(0), Shard(1))
    probe = placed(probe, Replicate(), Replicate(), mesh=grid())
    for at_x, at in itertools.product(itertools.product(of_x, repeat=2), itertools.product(of_weight, repeat=2)):
        of_bias = [Replicate() if p == Shard(1) else p for p in at]
        mine = [placed(t, *p, mesh=grid()).requires_grad_() for t, p in zip(tensors, (at_x, at, of_bias), strict=True)]
        y = ak.linear(*mine)
        (y * probe).sum().backward()
        found = [y.detach(), *(m.grad for m in mine)]
        if not all(torch.equal(whole(f), e) for f, e in zip(found, expected, strict=True)):
            wrong.append((at_x, at))
    assert not wrong, wrong


@on_ranks(2)
def test_activations():
    """Results and gradients of a layer by columns and of an mlp in 16 bits. A rank's columns are those of the whole layer. Summands,
    of which each is rounded: the result of an mlp, the gradient of x. Each half of a gate is rounded before the activation."""
    generator = torch.Generator().manual_seed(0)
    x, w1, b1, w2 = (torch.randn(s, generator=generator).to(BF16) for s in ((3, 8), (12, 8), (12,), (5, 6)))
    for name in ("relu", "gelu", "silu", "swiglu"):
        down = w2 if name == "swiglu" else torch.cat((w2, w2), 1)
        plain = [t.clone().requires_grad_() for t in (x, w1, b1, down)]
        mine = [
            placed(t, p).requires_grad_()
            for t, p in zip((x, w1, b1, down), (Replicate(), Shard(0), Shard(0), Shard(1)), strict=True)
        ]
        for what in ("linear", "mlp"):
            pairs = []
            for t, w, b, d in (mine, plain):
                y = ak.linear(t, w, b, activation=name) if what == "linear" else ak.mlp(t, w, b, d, activation=name)
                grads = torch.autograd.grad(y.float().sum(), (t, w, b) if what == "linear" else (t, w, b, d))
                pairs.append([y.detach(), *grads])
            errors = [((whole(a) - e).abs().max() / e.abs().max()).item() for a, e in zip(*pairs, strict=True)]
            assert max(errors) <= 4 * 2.0**-8, (what, name)
            assert errors[0] == 0.0 or what == "mlp" or name == "swiglu", (what, name)


@on_ranks(2)
def test_refusals_and_calls_left_to_torch():
    x, weight = placed(integers(4, 8), Replicate()), placed(integers(6, 8), Shard(0))
    with pytest.raises(
        TypeError, match=r"linear: a tensor of shape \[4, 8\] is plain among DTensors; accepted: DTensors"
    ):
        ak.linear(integers(4, 8), weight)
    with pytest.raises(ValueError, match=r"linear: DTensors are on .* and on .*; accepted: one mesh"):
        ak.linear(x, placed(integers(6, 8), Shard(0), Replicate(), mesh=grid()))
    with pytest.raises(TypeError, match=r"linear_cross_entropy: .* is a DTensor.*vocab_parallel_cross_entropy"):
        ak.linear_cross_entropy(x, weight, torch.zeros(4, dtype=torch.int64))
    model = parallelize_module(ak.convert(make(BF16)), everyone(), COLUMNS_AND_ROWS)
    with pytest.raises(TypeError, match=r"accumulate_fp32: 0\.weight has type .*DTensor; accepted: plain parameters"):
        ak.nn.accumulate_fp32(model)
    assert torch.equal(whole(ak.matmul(x, weight.t())), integers(4, 8) @ integers(6, 8).t())

"""Kernels of rows and elements store whole sectors of 32 bytes in memory that they did not read: what a warp stores with one instruction.
L2 may evict a sector that is half written, and then reads memory to complete it. All shapes are whole vectors of whole warps."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY

from ..helpers.emulator import launches
from ..helpers.generators import normal

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
PAIRS = [(f32, f32), (bf16, f32), (f32, bf16), (bf16, bf16), (f16, f32)]


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    monkeypatch.setenv("AMP_KERNELS_EMULATE_SECTORS", "1")


def halves(op: str, *args, **options) -> dict[str, int]:
    """Half sectors that each kernel of the op stored."""
    with ak.backend("emulate"), torch.no_grad():
        REGISTRY[op](*args, **options)
    assert launches()
    return {launch.name: launch.half_sectors for launch in launches() if launch.half_sectors}


@pytest.mark.parametrize(("source", "to"), PAIRS, ids=str)
def test_casts(source, to):
    tensors = [normal(8192, dtype=source), normal(4096, dtype=source)]
    assert not halves("cast_", [torch.empty_like(t, dtype=to) for t in tensors], tensors)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", [f16, bf16, f32])
def test_activations(dtype, activation):
    z = normal(4, 1024, dtype=dtype)
    assert not halves("activation_forward", z, activation=activation)
    for wide in {dtype, f32}:
        grad = normal(4, 512 if activation == "swiglu" else 1024, dtype=wide)
        for bias_grad in (False, True):
            assert not halves("activation_backward", grad, z, activation=activation, bias_grad=bias_grad)


@pytest.mark.parametrize("columns", [256, 768, 2048, 8192, 12_288, 20_480])
@pytest.mark.parametrize(("x", "y"), PAIRS, ids=str)
def test_norms(x, y, columns):
    values, weight, added = normal(2, columns, dtype=x), normal(columns, dtype=f32), normal(2, columns, dtype=y)
    options = {"eps": 1e-5, "centred": True, "out_dtype": y}
    assert not halves("norm_forward", values, weight, weight, **options)
    assert not halves("norm_forward", values, weight, weight, added, **options)
    statistics = torch.zeros(2), torch.ones(2)
    parameters = 2 if columns < 1000 else 0  # sums of more columns take more threads than the emulator has stacks
    assert not halves("norm_backward", added, values, *statistics, weight, added, parameters=parameters, branch_dtype=y)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "rotary"), [(128, 128), (64, 32)])
@pytest.mark.parametrize(("x", "y"), PAIRS, ids=str)
def test_rotary_embedding(x, y, width, rotary, interleaved):
    q, k, weight = normal(1, 2, 4, width, dtype=x), normal(1, 2, 2, width, dtype=x), normal(width)
    grads, angle = (normal(*t.shape, dtype=y) for t in (q, k)), normal(2, rotary)
    options = {"eps": 1e-5, "interleaved": interleaved}
    assert not halves("rotary_forward", q, k, angle, angle, weight, weight, out_dtype=y, **options)
    assert not halves("rotary_backward", *grads, angle, angle, q, k, weight, weight, out_dtype=x, **options)


@pytest.mark.parametrize("classes", [256, 1024, 8192, 12_288])
@pytest.mark.parametrize("dtype", [f16, bf16, f32])
def test_losses(dtype, classes):
    logits = normal(2, classes, dtype=dtype)
    arguments = (torch.tensor([3, 200]), None, torch.ones(2), torch.zeros(2))
    assert not halves("cross_entropy_rows_", logits, *arguments, torch.empty_like(logits))

"""Every op that is no product, as PTX on its samples: the bits of the emulator and of the CPU backend."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY

from .preloaded import machine, set_chip

machine()
STEP = [op for _, op in sorted(REGISTRY.items()) if not op.composite and op.family != "gemm"]
# Sums over a row, or over the uses of one: on the CPU in another order.
OWN_ORDER = {"norm_forward", "norm_backward", "cross_entropy_rows_", "embedding_accumulate_"}
OWN_ORDER |= {"softmax_rows", "softmax_rows_backward"}


def tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def call(op, args, kwargs):
    """What a call returns, or what it was given, if it returns nothing."""
    with torch.no_grad():
        result = op(*args, **kwargs)
    return [args, tuple(kwargs.values())] if result is None else [result]


def same_bits(got, want, what):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def compare(op):
    """Pairs of a result as PTX and by the emulator, and where the order of sums is the same, on the CPU; over the op's samples."""
    samples = zip(op.samples("cuda"), op.samples("cpu"), op.samples("cpu"), strict=True)
    for (args, kwargs), (cpu_args, cpu_kwargs), (emulated_args, emulated_kwargs) in samples:
        with ak.backend("cuda"):
            executed = [t.cpu() for t in tensors(call(op, args, kwargs))]
        with ak.backend("emulate"):
            yield from zip(executed, tensors(call(op, emulated_args, emulated_kwargs)), strict=True)
        if op.name not in OWN_ORDER:
            with ak.backend("cpu"):
                yield from zip(executed, tensors(call(op, cpu_args, cpu_kwargs)), strict=True)


@pytest.mark.parametrize("op", STEP, ids=lambda op: op.name)
@pytest.mark.parametrize("capability", [80, 90, pytest.param(120, marks=pytest.mark.exhaustive)])
def test_same_bits(op, capability, seeds):
    for seed in seeds:
        it = set_chip(capability, 2)  # the emulator's number of SMs, which decides how a list is shared out
        it.seed = seed
        before = len(it.launched)
        for got, want in compare(op):
            same_bits(got, want, f"{op.name}, sm_{capability}, seed {seed}")
        assert len(it.launched) > before, "nothing was executed"


def test_every_op_of_the_package_is_here_or_a_product():
    assert {op.name for op in STEP} | {
        op.name for op in REGISTRY.values() if op.family == "gemm" or op.composite
    } == set(REGISTRY)
    assert {op.name for op in STEP} >= OWN_ORDER

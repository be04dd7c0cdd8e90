"""Grouped products as PTX under many schedules: none hangs, races or changes a result, with empty groups first, last and in between, on
fewer and more SMs than tiles."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels._raw.grouped_gemm import grouped_gemm_accumulate_op, grouped_gemm_op

from ..helpers.generators import integers
from .preloaded import machine, set_chip

machine()
ENDS = [(0, 0, 0), (0, 65, 65), (3, 3, 70), (1, 2, 66)]
T = 70


def operands(*shapes):
    generator = torch.Generator().manual_seed(0)
    return (integers(*shape, limit=2, dtype=torch.bfloat16, generator=generator) for shape in shapes)


def rows(offs, device):
    a, b = operands((T, 72), (3, 72, 16))
    return grouped_gemm_op(a.to(device), b.to(device), offs.to(device), activation="relu", preact=True)


def sums(offs, device):
    a, b = operands((8, T), (T, 16))
    c = torch.ones(3, 8, 16, device=device)
    grouped_gemm_accumulate_op(c, a.to(device), b.to(device), offs.to(device))
    return (c,)


@pytest.mark.parametrize("product", [rows, sums])
@pytest.mark.parametrize("found", ENDS)
@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_no_schedule_hangs(product, found, count):
    offs = torch.tensor(found, dtype=torch.int32)
    with ak.backend("cpu"):
        want = product(offs, "cpu")
    for seed in range(count):
        it = set_chip(90, 1 + seed % 4)
        it.seed = seed
        for got, expected in zip(product(offs, "cuda"), want, strict=True):
            assert torch.equal(got.cpu(), expected)

"""Updates with moments in 8 bits, and one step of them by a backend: for the tests of test_moments8.py and test_moments8_values.py."""

import copy

import pytest
import torch

import amp_kernels as ak
from amp_kernels._checks.lists import flat
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._updates.op import RULES
from amp_kernels._updates.samples import Kind
from amp_kernels._updates.state import exponents_at

from ..helpers.bits import assert_same_bits
from ..helpers.updates import Update
from .targets import backends_on_cpu
from .update_rules import BF16, F16, F32

U8, I8 = torch.uint8, torch.int8
RULE = pytest.mark.parametrize("rule", RULES)
BACKEND = pytest.mark.parametrize("backend", backends_on_cpu(REGISTRY["adamw_"]))
COMPILED = pytest.mark.parametrize("backend", backends_on_cpu(REGISTRY["adamw_"])[1:])
SPLIT24 = [Kind(BF16, master=I8), Kind(F16, master=I8, ema=True)]
# Around the ends of a block, of a warp and of a unit; matrices are transposed.
SHAPES = ((7, 5), (0, 3), (), (31,), (32,), (33,), (64, 8), (256,), (257,), (1031,), (2100,))


def step(update: Update, backend: str, **call) -> Update:
    return update.step(ak.backend(backend)(REGISTRY[update.declared.name]), **call)


def agrees(update: Update, backend: str, **call) -> Update:
    """One step by the backend and one by the reference give the same bits, padding too. Returns the former."""
    wanted = step(copy.deepcopy(update), "reference", **call)
    step(update, backend, **call)
    for run in (update, wanted):  # the remainder of a weight that is NaN holds bits of its payload
        for i, param in enumerate(run.params):
            kind, piece, block, _ = run.place(i)
            if kind.master in (I8, torch.int16):
                run.masters[block][piece][flat(param).isnan()] = 0
    for i, (a, b) in enumerate(zip(update.tensors, wanted.tensors, strict=True)):
        assert_same_bits(flat(a), flat(b), f"tensor {i}")
    return update


def moments8(rule, kinds=None, shapes=SHAPES, **options) -> Update:
    return Update(rule, list(kinds or [Kind(F32)]), shapes, moment_dtype=U8, **options)


def codes_and_exponents(update: Update, k: int, i: int):
    _, piece, block, _ = update.place(i)
    buffer = update.moments[k][block]
    return buffer[piece], exponents_at(buffer, piece.start, update.params[i].numel())

"""grouped_mm names the argument, its value and what is accepted."""

import re

import pytest
import torch

import amp_kernels as ak

from .groups import ends

SMALL = ends(2, 2, 5)
A, B = torch.ones(6, 4, dtype=torch.bfloat16), torch.ones(3, 4, 5, dtype=torch.bfloat16)
MISTAKES = [
    ({"offs": None}, ValueError, "a has shape [6, 4] and b [3, 4, 5] and offs is None; accepted with these dimensions: int32"),
    ({"offs": SMALL.long()}, TypeError, "offs has dtype int64; accepted: int32"),
    ({"offs": SMALL[:2]}, ValueError, "offs has shape [2]; accepted: [3], one end per group"),
    ({"offs": SMALL[None]}, ValueError, "offs has shape [1, 3]; accepted: [3]"),
    ({"a": A.t(), "b": A, "offs": SMALL[None]}, ValueError, "offs has shape [1, 3]; accepted: [G]"),
    ({"offs": ends(2, 1, 6)}, ValueError, "offs[1] is 1; accepted: ends in ascending order within [0, 6], here from 2 on"),
    ({"offs": ends(2, 3, 7)}, ValueError, "offs[2] is 7; accepted: ends in ascending order within [0, 6]"),
    ({"offs": ends(-1, 3, 6)}, ValueError, "offs[0] is -1"),
    ({"a": A.float(), "b": B.float(), "offs": ends(0, 7, 7)}, ValueError, "offs[1] is 7"),
    ({"a": A.t(), "b": A, "offs": ends(7)}, ValueError, "within [0, 6]"),
    ({"a": B.mT, "b": A.t(), "offs": ends(1, 2, 7)}, ValueError, "within [0, 6]"),
    ({"a": B.mT, "offs": SMALL}, ValueError, "and offs is given; accepted with these dimensions: None"),
    ({"a": A[0]}, ValueError, "a has shape [4] and b [3, 4, 5]; accepted: two or three dimensions each"),
    ({"a": A[:, 1:]}, ValueError, "a has shape [6, 3] and b [3, 4, 5]; accepted: as many columns of a as rows of b"),
    ({"a": B.mT[:2], "offs": None}, ValueError, "accepted: the same first dimension"),
    ({"a": A.half()}, TypeError, "a is float16, b is bfloat16"),
    ({"a": A.long()}, TypeError, "a has dtype int64"),
    ({"bias": torch.ones(3, 4)}, ValueError, "bias has shape [3, 4]; accepted: [3, 5], a row per group, or [5]"),
    ({"bias": torch.ones(5).half()}, TypeError, "bias has dtype float16; accepted: bfloat16, float32"),
    ({"a": A.t(), "b": A, "bias": torch.ones(4)}, ValueError, "accepted with bias or activation: [T, K] and [G, K, N]"),
    ({"a": A.t(), "b": A, "activation": "relu"}, ValueError, "accepted with bias or activation"),
    ({"activation": "tanh"}, ValueError, "activation is 'tanh'; accepted: None, 'none'"),
    ({"activation": "swiglu"}, ValueError, "b has shape [3, 4, 5]; accepted with activation='swiglu'"),
    ({"out_dtype": torch.float64}, TypeError, "out_dtype is torch.float64; accepted: None, float16, bfloat16, float32"),
    ({"a": A.float(), "b": B.float(), "out_dtype": torch.bfloat16}, TypeError, "out_dtype is torch.bfloat16; accepted: None, float32"),
    ({"offs": SMALL.to("meta")}, ValueError, "offs is on meta, but a is on cpu"),
    ({"offs": [2, 2, 5]}, TypeError, "offs has type list; accepted: a tensor or None"),
    ({"b": None}, TypeError, "b has type NoneType; accepted: a tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "text"), MISTAKES, ids=[text for _, _, text in MISTAKES])
def test_a_mistake_is_named(arguments, error, text):
    given = {"a": A, "b": B, "offs": SMALL} | arguments
    with pytest.raises(error, match=f"^grouped_mm: .*{re.escape(text)}"):
        ak.grouped_mm(given.pop("a"), given.pop("b"), **given)

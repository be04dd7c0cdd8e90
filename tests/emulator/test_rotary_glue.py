"""The host code of the rotary embedding on the emulator: strides, angles of a batch, weights, and calls that it refuses."""

import re

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY

from .both import assert_same_on_both, bf16, f32


def heads(*shape, seed=0):
    """[batch, heads, tokens, width] as a projection leaves it, seen as [batch, tokens, heads, width] or with gaps."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("leading", [(), (1,), (2,)])
def test_rotary_embedding_of_views(leading, interleaved):
    """Without a norm, whose sums have another order."""
    q, k = heads(2, 5, 3, 40)[..., :32], heads(2, 2, 5, 32, seed=1).transpose(1, 2).bfloat16().float()
    cos, sin = heads(*leading, 5, 48, seed=2)[..., :24], heads(*leading, 5, 24, seed=3)
    options = {"eps": 1e-6, "interleaved": interleaved}
    for operands in ((q, k), (q[1:], k[1:]), (q.half(), k.half()[..., ::1]), (q.mT.contiguous().mT, k)):
        angles = (
            cos[-len(operands[0]) :] if leading == (2,) else cos,
            sin[-len(operands[0]) :] if leading == (2,) else sin,
        )
        for out in (bf16, f32):
            assert_same_on_both(
                lambda operands=operands, angles=angles, out=out: [
                    REGISTRY[name](*operands, *angles, out_dtype=out, **options)
                    for name in ("rotary_forward", "rotary_backward")
                ]
            )


@pytest.mark.parametrize("tokens", [0, 9])
def test_rotary_embedding_behind_norms(tokens):
    q, k = heads(2, tokens, 3, 40)[..., :32], heads(2, tokens, 2, 32, seed=1)
    grads, angles = (heads(*t.shape, seed=2 + i) for i, t in enumerate((q, k))), [heads(tokens, 32, seed=4)] * 2
    weights, options = (
        [heads(32, seed=5), heads(64, seed=6)[::2]],
        {"eps": 1e-2, "interleaved": False, "out_dtype": f32},
    )
    forward, backward = (q, k, *angles, *weights), (*grads, *angles, q, k, *weights)
    for name, operands in (("rotary_forward", forward), ("rotary_backward", backward)):
        with torch.no_grad():
            found, want = REGISTRY[name].emulated(*operands, **options), REGISTRY[name].overload(*operands, **options)
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def rotary_problem():
    q, k, cos, sin = (heads(*shape) for shape in ((2, 3, 4, 8), (2, 3, 1, 8), (3, 8), (3, 8)))
    return {"q": q, "k": k, "cos": cos, "sin": sin, "q_weight": torch.ones(8), "k_weight": torch.ones(8)}


ROTARY_MISTAKES = {
    "q: dimensions": ({"q": torch.ones(2, 3, 8)}, "q must have shape (batch, tokens, heads, width); got (2, 3, 8)"),
    "q: width": ({"q": torch.ones(2, 3, 4, 7)}, "the width of q must be even and from 2 to 256; got 7"),
    "k: tokens": ({"k": torch.ones(2, 2, 1, 8)}, "q and k must agree in dtype, batch, tokens and width"),
    "k: dtype": ({"k": torch.ones(2, 3, 1, 8).half()}, "q and k must agree in dtype"),
    "cos: dimensions": (
        {"cos": torch.ones(8)},
        "cos must have shape (tokens, rotary) or (batch, tokens, rotary); got (8)",
    ),
    "cos: batch": ({"cos": torch.ones(3, 3, 8)}, "cos must have shape (tokens, rotary) or (batch, tokens, rotary)"),
    "cos: tokens": ({"cos": torch.ones(2, 8)}, "cos must have 3 tokens and an even rotary width up to 8; got (2, 8)"),
    "sin: shape": ({"sin": torch.ones(3, 4)}, "sin must have the shape and dtype of cos"),
    "one weight": ({"k_weight": None}, "q_weight and k_weight must be given together"),
    "weight: shape": ({"k_weight": torch.ones(4)}, "k_weight must have shape (8) and the dtype of q_weight; got (4)"),
}


@pytest.mark.parametrize("case", ROTARY_MISTAKES)
def test_rotary_embedding_refuses(case):
    """The op itself, past the checks of the public function."""
    wrong, message = ROTARY_MISTAKES[case]
    options = {"eps": 1e-6, "interleaved": False, "out_dtype": f32}
    with pytest.raises(RuntimeError, match=re.escape("rotary_forward: ") + ".*" + re.escape(message)), torch.no_grad():
        REGISTRY["rotary_forward"].emulated(**(rotary_problem() | wrong), **options)


def test_the_gradient_of_a_norm_takes_heads_and_weights_together():
    given = rotary_problem()
    call = [given[name] for name in ("q", "k", "cos", "sin")], {"eps": 1e-6, "interleaved": False, "out_dtype": f32}
    for more in ({"q": given["q"], "k": given["k"]}, {"q_weight": given["q_weight"], "k_weight": given["k_weight"]}):
        with (
            pytest.raises(RuntimeError, match="q and k must be given with the weights, and only then"),
            torch.no_grad(),
        ):
            REGISTRY["rotary_backward"].emulated(*call[0], **more, **call[1])

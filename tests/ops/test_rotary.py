"""Rotary embedding and QK-norm against float64 within the bounds of their arithmetic, in any layout."""

import functools
import math
import re

import pytest
import torch

import amp_kernels as ak
from amp_kernels._raw.rotary import backward_op, forward_op

from ..helpers.bounds import TINY, UNIT_ROUNDOFF, assert_within
from ..helpers.generators import normal
from ..helpers.poison import embed, poisoned_allocations
from .targets import device_for
from .tensors import gradient_penalty, leaves

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
F32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-3
U = UNIT_ROUNDOFF[F32]
device = device_for(forward_op)
STYLES = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
NORMED = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])


def pairs(rotary, interleaved):
    first = torch.arange(0, rotary, 2) if interleaved else torch.arange(rotary // 2)
    return first, first + (1 if interleaved else rotary // 2)


def turn(x, cos, sin, interleaved):
    """Pair by pair."""
    first, second = pairs(cos.shape[-1], interleaved)
    y = x.clone()
    y[..., first] = x[..., first] * cos[..., first] - x[..., second] * sin[..., first]
    y[..., second] = x[..., second] * cos[..., second] + x[..., first] * sin[..., second]
    return y


def normalize(x):
    """Heads over their root mean square, its reciprocal, and the relative error of a kernel's (see ``norm_forward_bound``)."""
    rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x * rstd, rstd, ((x.shape[-1] / 16 + 20) / 2 + 3) * U * 1.01


def rounded(value, error, dtype):
    u = UNIT_ROUNDOFF[dtype]
    return u * value.abs() + (1 + u) * error + TINY[dtype]


def turn_error(x, error, cos, sin, interleaved):
    """The error of the turn: that of ``x``, and the roundings of both products (a kernel rounds one) and of their sum."""
    first, second = pairs(cos.shape[-1], interleaved)
    single = x.abs() * U + error
    total = error.clone()
    total[..., first] = cos[..., first].abs() * single[..., first] + sin[..., first].abs() * single[..., second]
    total[..., second] = cos[..., second].abs() * single[..., second] + sin[..., second].abs() * single[..., first]
    return (total + U * turn(x, cos, sin, interleaved).abs()) * 1.01


def forward_bound(x, cos, sin, weight, interleaved, out_dtype):
    x, error = x.double(), torch.zeros_like(x, dtype=torch.float64)
    if weight is not None:
        n, _, relative = normalize(x)
        x = n * weight.double()
        error = x.abs() * (relative + 2 * U)
    y = turn(x, cos, sin, interleaved)
    return y, rounded(y, turn_error(x, error, cos, sin, interleaved), out_dtype)


def transposed_angles(cos, sin, interleaved):
    """Those of the gradient: each element meets the sine of the other one, with the other sign."""
    first, second = pairs(cos.shape[-1], interleaved)
    other = sin.clone()
    other[..., first], other[..., second] = -sin[..., second], -sin[..., first]
    return cos, other


def backward_bound(grad, x, cos, sin, weight, interleaved):
    """Gradient of ``x`` and its bound, and those of the weight."""
    cos, sin = transposed_angles(cos, sin, interleaved)
    g = turn(grad.double(), cos, sin, interleaved)
    error = turn_error(grad.double(), torch.zeros_like(g), cos, sin, interleaved)
    if weight is None:
        return g, rounded(g, error, x.dtype), None, None
    n, rstd, relative = normalize(x.double())
    n_error = n.abs() * (relative + U)
    rows = n.numel() // n.shape[-1]
    of_weight = (g * n).flatten(0, -2).sum(0)
    weight_error = (n.abs() * error + g.abs() * n_error + (rows + 4) * U * (g * n).abs()).flatten(0, -2).sum(0)
    error = weight.double().abs() * error + U * (g * weight.double()).abs()
    g = g * weight.double()
    mean = (g * n).mean(-1, keepdim=True)
    k = n.shape[-1] / 16 + 20
    mean_error = (g.abs() * n_error + n.abs() * error + k * U * (g * n).abs()).mean(-1, keepdim=True)
    dx = rstd * (g - n * mean)
    inner = error + n.abs() * mean_error + mean.abs() * n_error + 2 * U * (g.abs() + (n * mean).abs())
    error = (rstd * inner + dx.abs() * (relative + U)) * 1.01
    return dx, rounded(dx, error, x.dtype), of_weight, weight_error * 1.01


def check(q, k, cos, sin, q_weight=None, k_weight=None, interleaved=False, run=ak.rotary):
    """Results and gradients, on tensors as they are laid out."""
    fresh = [None if t is None else t.detach().requires_grad_() for t in (q, k, q_weight, k_weight)]
    with poisoned_allocations():
        options = {"q_weight": fresh[2], "k_weight": fresh[3], "eps": EPS, "interleaved": interleaved}
        results = run(fresh[0], fresh[1], cos, sin, **options)
        grads = [normal(*t.shape, dtype=t.dtype, device=q.device, seed=9 + i) for i, t in enumerate(results)]
        wanted = [t for t in fresh if t is not None]
        found = torch.autograd.grad(results, wanted, grads)
    angles = [t.double().unsqueeze(-3) for t in (cos, sin)]
    for i, (x, weight) in enumerate(((q, q_weight), (k, k_weight))):
        of = "qk"[i]
        assert results[i].dtype == q.dtype
        assert_within(results[i].detach(), *forward_bound(x, *angles, weight, interleaved, q.dtype), of)
        dx, bound, of_weight, weight_bound = backward_bound(grads[i], x, *angles, weight, interleaved)
        assert found[i].dtype == x.dtype
        assert_within(found[i], dx, bound, f"gradient of {of}")
        if weight is not None:
            assert found[2 + i].dtype == weight.dtype
            assert_within(
                found[2 + i], of_weight, rounded(of_weight, weight_bound, weight.dtype), f"gradient of {of}_weight"
            )


def problem(batch, q_heads, k_heads, tokens, width, rotary, dtype, device="cpu", normed=False, angles=None, leading=()):
    angles, new = angles or dtype, functools.partial(normal, device=device)
    q = new(batch, q_heads, tokens, width, dtype=dtype)
    k = new(batch, k_heads, tokens, width, dtype=dtype, seed=1)
    cos, sin = (new(*leading, tokens, rotary, dtype=angles, seed=2 + i) for i in range(2))
    weights = [new(width, dtype=angles, seed=4 + i) for i in range(2)] if normed else []
    return q, k, cos, sin, *weights


SHAPES = [
    (2, 3, 1, 5, 16, 16),
    (1, 5, 2, 9, 128, 128),
    (1, 2, 2, 3, 80, 32),
    (2, 1, 1, 3, 10, 6),
    (1, 2, 1, 2, 256, 256),
    (1, 3, 1, 2, 2, 2),
    (1, 2, 1, 3, 24, 8),
    (1, 1, 1, 2, 250, 130),
]


@NORMED
@STYLES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_the_bound(device, shape, dtype, interleaved, normed):
    check(*problem(*shape, dtype, device, normed), interleaved=interleaved)


@pytest.mark.parametrize("leading", [(), (1,), (2,)], ids=["shared", "one batch", "of each batch"])
def test_angles_of_another_dtype_for_each_batch(device, leading):
    check(*problem(2, 3, 2, 5, 32, 32, torch.float16, device, True, angles=F32, leading=leading))
    check(*problem(2, 3, 2, 5, 32, 32, F32, device, True, angles=BF16, leading=leading))


def placed(x, way):
    """``x``, [batch, heads, tokens, width], elsewhere in memory."""
    if way == "projected":  # as a projection leaves it
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if way == "beside others":  # as a part of one projection for queries, keys and values
        return torch.cat([x, x, x], dim=-1).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]]
    if way == "rows apart":  # by half of 16 bytes
        return embed(x, pad=4)[0]
    if way == "unaligned":
        return embed(x, offset=1)[0]
    if way == "gaps between columns":
        return embed(x, step=2)[0]
    if way == "transposed":
        return embed(x, transposed=True)[0]
    return x[:, :1].expand_as(x)


@NORMED
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    "way", ["projected", "beside others", "rows apart", "unaligned", "gaps between columns", "transposed", "expanded"]
)
def test_any_layout(device, way, dtype, normed):
    q, k, *rest = problem(2, 4, 2, 5, 32, 16, dtype, device, normed)
    check(placed(q, way), k, *rest)
    check(q, placed(k, way), *rest)


def test_heads_of_a_token_lie_side_by_side(device):
    q, k, cos, sin = problem(2, 3, 1, 5, 16, 16, BF16, device)
    for result in ak.rotary(q, k, cos, sin):
        assert result.transpose(1, 2).is_contiguous()


def test_columns_that_do_not_turn_are_copied(device):
    """Infinity stays infinity, which a product with a sine of 0 would not leave."""
    q, k, cos, sin = problem(1, 2, 1, 3, 32, 16, BF16, device)
    q[..., 16::4], k[..., 17] = math.inf, -math.inf
    for x, y in zip((q, k), ak.rotary(q, k, cos, sin), strict=True):
        assert torch.equal(y[..., 16:], x[..., 16:])
        assert y[..., :16].isfinite().all()


def test_heads_whose_squares_overflow(device):
    q, k, cos, sin, *weights = problem(1, 4, 1, 3, 64, 64, F32, device, True)
    huge = q.clone()
    huge[:, 1] *= 2.0**100
    options = {"q_weight": weights[0], "k_weight": weights[1], "eps": 0.0}
    want, got = ak.rotary(q, k, cos, sin, **options)[0], ak.rotary(huge, k, cos, sin, **options)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[:, 0], want[:, 0])


@NORMED
def test_a_head_has_the_same_bits_alone(device, normed):
    q, k, cos, sin, *weights = problem(3, 5, 2, 7, 64, 64, BF16, device, normed)
    options = dict(zip(("q_weight", "k_weight"), weights, strict=False))
    whole = ak.rotary(q, k, cos, sin, **options)
    part = ak.rotary(q[1:2, 1:2, 2:4].clone(), k[1:2, :1, 2:4].clone(), cos[2:4], sin[2:4], **options)
    assert torch.equal(part[0], whole[0][1:2, 1:2, 2:4])
    assert torch.equal(part[1], whole[1][1:2, :1, 2:4])


def test_sums_over_rows_have_one_order(device):
    """Also over more tokens than a GPU's threads hold at a time."""
    arguments = problem(2, 2, 1, 150, 32, 32, F32, device, True)
    grads = [normal(*t.shape, device=device) for t in arguments[:2]]
    swapped = [t.transpose(1, 2) for t in (*grads, *arguments[:2])]
    call = (*swapped[:2], *arguments[2:4], *swapped[2:], *arguments[4:])
    options = {"eps": EPS, "interleaved": False, "out_dtype": F32}
    first, second = (backward_op(*call, **options)[2] for _ in range(2))
    assert torch.equal(first, second)
    check(*arguments)


def test_micro_batches_give_the_bits_of_the_batch(device):
    q, k, cos, sin, *weights = problem(2, 2, 1, 64, 16, 16, F32, device, True)
    grads = [normal(*t.shape, device=device, seed=7 + i) for i, t in enumerate((q, k))]

    def gradients(*parts):
        norms = torch.nn.ModuleList(ak.nn.RMSNorm(16, device=device) for _ in weights)
        leaves = [norm.weight for norm in norms]
        ak.nn.accumulate_fp32(norms)
        with ak.batch_invariant():
            for part in parts:
                results = ak.rotary(q[part], k[part], cos, sin, q_weight=leaves[0], k_weight=leaves[1], eps=EPS)
                torch.autograd.backward(results, [g[part] for g in grads])
        return [leaf.main_grad for leaf in leaves]

    whole, parts = gradients(slice(None)), gradients(slice(0, 1), slice(1, 2))
    assert all(map(torch.equal, whole, parts))
    with ak.batch_invariant():
        check(q, k, cos, sin, *weights)


@NORMED
def test_double_backward(device, normed):
    q, k, cos, sin, *weights = problem(1, 2, 1, 3, 8, 4, F32, device, normed)

    def ours(q, k, *weights):
        results = ak.rotary(
            q, k, cos.to(q.dtype), sin.to(q.dtype), **dict(zip(("q_weight", "k_weight"), weights, strict=False))
        )
        return torch.cat([result.flatten() for result in results])

    got, want = (gradient_penalty(ours, leaves((q, k, *weights), dtype)) for dtype in (F32, torch.float64))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@STYLES
@NORMED
def test_float64_runs_torchs_own_operations(interleaved, normed):
    arguments = [t.requires_grad_() for t in problem(1, 2, 1, 3, 8, 4, torch.float64, normed=normed)]

    def function(q, k, cos, sin, q_weight=None, k_weight=None):
        return ak.rotary(q, k, cos, sin, q_weight=q_weight, k_weight=k_weight, interleaved=interleaved)

    assert torch.autograd.gradcheck(function, arguments)
    want = turn(arguments[0], arguments[2], arguments[3], interleaved)
    if not normed:
        torch.testing.assert_close(function(*arguments)[0], want)


def test_angles_that_learn_get_their_gradients(device):
    q, k, cos, sin = problem(1, 2, 1, 3, 8, 8, F32, device)
    learned = [cos.clone().requires_grad_(), sin.clone().requires_grad_()]
    results = ak.rotary(q, k, *learned)
    found = torch.autograd.grad([r.sum() for r in results], learned)
    want = q.sum((0, 1)) + k.sum((0, 1))
    torch.testing.assert_close(found[0], want)


def test_one_result_alone_has_gradients(device):
    q, k, cos, sin, *weights = problem(1, 2, 1, 3, 16, 16, BF16, device, True)
    q, k = q.requires_grad_(), k.requires_grad_()
    out = ak.rotary(q, k, cos, sin, q_weight=weights[0], k_weight=weights[1])
    of_q, of_k = torch.autograd.grad(out[1].sum(), (q, k), allow_unused=True)
    assert of_q is None or not of_q.any()
    assert of_k.any()


def test_autocast_decides_the_dtype():
    q, k, cos, sin, *weights = problem(1, 2, 1, 3, 16, 16, F32, normed=True)
    leaves = [t.requires_grad_() for t in (q, k, *weights)]
    options = {"q_weight": weights[0], "k_weight": weights[1]}
    with torch.autocast("cpu", BF16):
        results = ak.rotary(q, k, cos, sin, **options)
    wide = ak.rotary(q, k, cos, sin, **options)
    for got, want in zip(results, wide, strict=True):
        assert torch.equal(got, want.bfloat16())
    grads = torch.autograd.grad([r.float().sum() for r in results], leaves)
    assert all(g.dtype == F32 for g in grads)


def test_nothing():
    for shape in ((0, 2, 1, 3), (2, 2, 1, 0), (1, 0, 1, 3)):
        q, k, *rest = problem(*shape, 8, 8, BF16, normed=True)
        q, k = q.requires_grad_(), k.requires_grad_()
        results = ak.rotary(q, k, *rest[:2], q_weight=rest[2], k_weight=rest[3])
        assert [r.shape for r in results] == [q.shape, k.shape]
        sum(r.sum() for r in results).backward()
        assert q.grad.shape == q.shape


Q, K, COS, SIN, Q_WEIGHT, K_WEIGHT = problem(2, 2, 1, 3, 8, 8, BF16, normed=True)
MISTAKES = {
    "three dimensions": ({"q": Q[0]}, ValueError, r"q has shape \[2, 3, 8\]; accepted: \[batch, heads, tokens, width\]"),
    "odd width": ({"q": Q[..., :7]}, ValueError, "an even width from 2 to 256"),
    "too wide": ({"q": Q.repeat(1, 1, 1, 40)}, ValueError, "an even width from 2 to 256"),
    "other tokens": ({"k": K[:, :, :2]}, ValueError, r"k has shape \[2, 1, 2, 8\]; accepted: that of q"),
    "other batch": ({"k": K[:1]}, ValueError, "accepted: that of q"),
    "dtype of k": ({"k": K.float()}, TypeError, "k has dtype torch.float32; accepted: that of q, torch.bfloat16"),
    "integers": ({"cos": COS.long()}, TypeError, "cos has dtype int64"),
    "tokens of cos": ({"cos": COS[:2]}, ValueError, r"cos has shape \[2, 8\]; accepted: \[3, rotary\]"),
    "batch of cos": ({"cos": COS.repeat(3, 1, 1)}, ValueError, r"\[1 or 2, 3, rotary\]"),
    "cos too wide": ({"cos": COS.repeat(1, 2)}, ValueError, "even rotary width up to 8"),
    "cos odd": ({"cos": COS[:, :3], "sin": SIN[:, :3]}, ValueError, "even rotary width up to 8"),
    "sin unlike cos": ({"sin": SIN[:, :4]}, ValueError, "the same for cos and sin"),
    "dtype of sin": ({"sin": SIN.float()}, TypeError, "sin has dtype torch.float32; accepted: that of cos"),
    "one weight": ({"q_weight": None}, ValueError, "q_weight is None and k_weight is not; accepted: both or none"),
    "shape of a weight": ({"k_weight": K_WEIGHT[:4]}, ValueError, r"k_weight has shape \[4\]; accepted: \[8\]"),
    "dtype of a weight": ({"k_weight": K_WEIGHT.float()}, TypeError, "k_weight has dtype float32; accepted: bfloat16"),
    "no tensor": ({"sin": None}, TypeError, "sin has type NoneType; accepted: a tensor"),
    "another device": ({"sin": SIN.to("meta")}, ValueError, "sin is on meta, but q is on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_messages(case):
    wrong, error, message = MISTAKES[case]
    right = {"q": Q, "k": K, "cos": COS, "sin": SIN, "q_weight": Q_WEIGHT, "k_weight": K_WEIGHT}
    with pytest.raises(error, match=message):
        ak.rotary(**(right | wrong))


RAW = {
    "q": Q.transpose(1, 2),
    "k": K.transpose(1, 2),
    "cos": COS,
    "sin": SIN,
    "q_weight": Q_WEIGHT,
    "k_weight": K_WEIGHT,
}
RAW_MISTAKES = [
    ({"q": RAW["q"][0]}, "q must have shape (batch, tokens, heads, width); got (3, 2, 8)"),
    ({"q": RAW["q"][..., :7]}, "the width of q must be even and from 2 to 256; got 7"),
    ({"k": RAW["k"][:, :2]}, "q and k must agree in dtype, batch, tokens and width"),
    ({"k": RAW["k"].half()}, "q and k must agree in dtype"),
    ({"cos": COS[0]}, "cos must have shape (tokens, rotary) or (batch, tokens, rotary); got (8)"),
    ({"cos": COS.expand(3, 3, 8)}, "cos must have shape (tokens, rotary) or (batch, tokens, rotary)"),
    ({"cos": COS[:2]}, "cos must have 3 tokens and an even rotary width up to 8; got (2, 8)"),
    ({"sin": SIN[:, :4]}, "sin must have the shape and dtype of cos"),
    ({"k_weight": None}, "q_weight and k_weight must be given together"),
    ({"k_weight": K_WEIGHT[:4]}, "k_weight must have shape (8) and the dtype of q_weight; got (4)"),
]


@pytest.mark.parametrize("overload", [forward_op.overload, forward_op.emulated], ids=["cpu", "emulate"])
@pytest.mark.parametrize(("wrong", "message"), RAW_MISTAKES, ids=[message for _, message in RAW_MISTAKES])
def test_the_raw_op_guards_memory(overload, wrong, message):
    with torch.no_grad(), pytest.raises(RuntimeError, match="rotary_forward: .*" + re.escape(message)):
        overload(**(RAW | wrong), eps=EPS, interleaved=False, out_dtype=F32)


@pytest.mark.parametrize("overload", [backward_op.overload, backward_op.emulated], ids=["cpu", "emulate"])
def test_the_gradient_of_a_norm_takes_heads_and_weights_together(overload):
    grads = [RAW[name] for name in ("q", "k", "cos", "sin")]
    for names in (("q", "k"), ("q_weight", "k_weight")):
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match="q and k must be given with the weights, and only then"),
        ):
            overload(*grads, **{name: RAW[name] for name in names}, eps=EPS, interleaved=False, out_dtype=F32)

"""``amp_kernels::rotary_forward`` and ``amp_kernels::rotary_backward`` in Triton: a program takes the heads of a token, some at a time.

The limit is memory: one read and one write of each head. A head is three tiles: the first elements of its pairs, the second ones, and
the columns that do not turn. For the gradient of a norm a program takes a strip of tokens and keeps the gradients of the weights in
registers; strips are added in order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._raw.rotary import backward_op, forward_op
from ._norm import INFINITY, SMALLER, deviation, load_row
from ._tables import on, programs

PROGRAMS_PER_SM = 4
MOST_TOKENS = 1024  # that a lane adds one after the other; more tokens take more programs
_ELEMENTS = 2048  # of the heads that a program has at a time


@triton.jit
def _places(half, PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Columns of the first and second elements of pairs, and columns that do not turn."""
    pair = tl.arange(0, PAIRS)
    first = 2 * pair if INTERLEAVED else pair
    return first, first + (1 if INTERLEAVED else half), 2 * half + tl.arange(0, REST)


@triton.jit
def _angles(cos, sin, at, first, second, inside, TRANSPOSED: tl.constexpr):
    """Cosines and signed sines of first and second elements."""
    cos_first, cos_second = load_row(cos, at + first, inside), load_row(cos, at + second, inside)
    sin_first, sin_second = load_row(sin, at + first, inside), load_row(sin, at + second, inside)
    if TRANSPOSED:
        return cos_first, cos_second, sin_second, -sin_first
    return cos_first, cos_second, -sin_first, sin_second


@triton.jit
def _load(x, at, there, first, second, rest, half, width):
    """The tiles of heads at the elements ``at``."""
    turns = there & (second < 2 * half)[None, :]
    a = load_row(x, at + first[None, :], turns)
    b = load_row(x, at + second[None, :], turns)
    c = load_row(x, at + rest[None, :], there & (rest < width)[None, :])
    return a, b, c


@triton.jit
def _store(out, at, there, first, second, rest, half, width, a, b, c):
    turns = there & (second < 2 * half)[None, :]
    dtype = out.dtype.element_ty
    tl.store(out + at + first[None, :], a.to(dtype), mask=turns)
    tl.store(out + at + second[None, :], b.to(dtype), mask=turns)
    tl.store(out + at + rest[None, :], c.to(dtype), mask=there & (rest < width)[None, :])


@triton.jit
def _turn(a, b, cos_a, cos_b, sin_a, sin_b):
    first = tl.fma(b, tl.broadcast_to(sin_a[None, :], b.shape), a * cos_a[None, :])
    second = tl.fma(a, tl.broadcast_to(sin_b[None, :], a.shape), b * cos_b[None, :])
    return first, second


@triton.jit
def _sum(a, b, c):
    """Over a head."""
    return tl.sum(a, 1) + tl.sum(b, 1) + tl.sum(c, 1)


@triton.jit
def _deviation(a, b, c, width, eps):
    """1 / root mean square of each head, ``[heads, 1]``."""
    count = tl.cast(width, tl.float32)
    square = tl.div_rn(_sum(a * a, b * b, c * c), count)
    rstd = deviation(square, eps, 1.0)
    lost = (square != square) | (square == INFINITY)
    if tl.max(lost.to(tl.int32), 0) > 0:
        a, b, c = a * SMALLER, b * SMALLER, c * SMALLER
        rstd = tl.where(lost, deviation(tl.div_rn(_sum(a * a, b * b, c * c), count), eps, SMALLER), rstd)
    return rstd[:, None]


@triton.jit
def _weight(weight, first, second, rest, half, width):
    turns = second < 2 * half
    a, b = load_row(weight, first, turns), load_row(weight, second, turns)
    return a[None, :], b[None, :], load_row(weight, rest, rest < width)[None, :]


@triton.jit
def _turn_side(
    x, stride, out, row, heads, weight, first, second, rest, half, width, eps, cos_a, cos_b, sin_a, sin_b, HEADS: tl.constexpr
):  # fmt: skip
    """The heads of one token, the first of which ``x`` points to."""
    for begin in range(0, heads, HEADS):
        head = (begin + tl.arange(0, HEADS))[:, None]
        a, b, c = _load(x, head * stride, head < heads, first, second, rest, half, width)
        if weight is not None:
            wa, wb, wc = _weight(weight, first, second, rest, half, width)
            rstd = _deviation(a, b, c, width, eps)
            a, b, c = a * rstd * wa, b * rstd * wb, c * rstd * wc
        a, b = _turn(a, b, cos_a, cos_b, sin_a, sin_b)
        _store(out, (row * heads + head) * width, head < heads, first, second, rest, half, width, a, b, c)


@triton.jit
def rotary_turn_kernel(
    q, q_batch, q_token, q_head,
    k, k_batch, k_token, k_head,
    cos, sin, q_weight, k_weight, q_out, k_out,
    tokens, angle_batch, q_heads, k_heads, half, width, eps,
    TRANSPOSED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    eps = tl.cast(eps, tl.float32)
    first, second, rest = _places(half, PAIRS, REST, INTERLEAVED)
    at = batch * angle_batch + token * 2 * half
    cos_a, cos_b, sin_a, sin_b = _angles(cos, sin, at, first, second, second < 2 * half, TRANSPOSED)
    _turn_side(
        q + batch * q_batch + token * q_token, q_head, q_out, row, q_heads, q_weight,
        first, second, rest, half, width, eps, cos_a, cos_b, sin_a, sin_b, HEADS,
    )  # fmt: skip
    _turn_side(
        k + batch * k_batch + token * k_token, k_head, k_out, row, k_heads, k_weight,
        first, second, rest, half, width, eps, cos_a, cos_b, sin_a, sin_b, HEADS,
    )  # fmt: skip


@triton.jit
def _gradient_side(
    grad, grad_stride, x, x_stride, out, row, heads, weight,
    first, second, rest, half, width, eps, cos_a, cos_b, sin_a, sin_b, of_a, of_b, of_c, HEADS: tl.constexpr,
):  # fmt: skip
    """The gradients of the heads of one token. Returns those of the weight with this token's added."""
    wa, wb, wc = _weight(weight, first, second, rest, half, width)
    for begin in range(0, heads, HEADS):
        head = (begin + tl.arange(0, HEADS))[:, None]
        ga, gb, gc = _load(grad, head * grad_stride, head < heads, first, second, rest, half, width)
        ga, gb = _turn(ga, gb, cos_a, cos_b, sin_a, sin_b)
        a, b, c = _load(x, head * x_stride, head < heads, first, second, rest, half, width)
        rstd = _deviation(a, b, c, width, eps)
        a, b, c = a * rstd, b * rstd, c * rstd
        of_a += tl.sum(ga * a, 0)
        of_b += tl.sum(gb * b, 0)
        of_c += tl.sum(gc * c, 0)
        ga, gb, gc = ga * wa, gb * wb, gc * wc
        mean = tl.div_rn(_sum(ga * a, gb * b, gc * c), tl.cast(width, tl.float32))[:, None]
        ga, gb, gc = (ga - a * mean) * rstd, (gb - b * mean) * rstd, (gc - c * mean) * rstd
        _store(out, (row * heads + head) * width, head < heads, first, second, rest, half, width, ga, gb, gc)
    return of_a, of_b, of_c


@triton.jit
def _store_sums(slot, first, second, rest, half, width, a, b, c):
    tl.store(slot + first, a, mask=second < 2 * half)
    tl.store(slot + second, b, mask=second < 2 * half)
    tl.store(slot + rest, c, mask=rest < width)


@triton.jit
def rotary_gradient_kernel(
    grad_q, grad_q_batch, grad_q_token, grad_q_head,
    grad_k, grad_k_batch, grad_k_token, grad_k_head,
    q, q_batch, q_token, q_head,
    k, k_batch, k_token, k_head,
    cos, sin, q_weight, k_weight, q_out, k_out, slots,
    rows, strip, tokens, angle_batch, q_heads, k_heads, half, width, eps,
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    eps = tl.cast(eps, tl.float32)
    first, second, rest = _places(half, PAIRS, REST, INTERLEAVED)
    of_qa, of_qb, of_qc = tl.zeros([PAIRS], tl.float32), tl.zeros([PAIRS], tl.float32), tl.zeros([REST], tl.float32)
    of_ka, of_kb, of_kc = tl.zeros([PAIRS], tl.float32), tl.zeros([PAIRS], tl.float32), tl.zeros([REST], tl.float32)
    for row in range(program * strip, tl.minimum(program * strip + strip, rows)):
        batch, token = row // tokens, row % tokens
        at = batch * angle_batch + token * 2 * half
        cos_a, cos_b, sin_a, sin_b = _angles(cos, sin, at, first, second, second < 2 * half, True)
        of_qa, of_qb, of_qc = _gradient_side(
            grad_q + batch * grad_q_batch + token * grad_q_token, grad_q_head,
            q + batch * q_batch + token * q_token, q_head, q_out, row, q_heads, q_weight,
            first, second, rest, half, width, eps, cos_a, cos_b, sin_a, sin_b, of_qa, of_qb, of_qc, HEADS,
        )  # fmt: skip
        of_ka, of_kb, of_kc = _gradient_side(
            grad_k + batch * grad_k_batch + token * grad_k_token, grad_k_head,
            k + batch * k_batch + token * k_token, k_head, k_out, row, k_heads, k_weight,
            first, second, rest, half, width, eps, cos_a, cos_b, sin_a, sin_b, of_ka, of_kb, of_kc, HEADS,
        )  # fmt: skip
    slot = slots + program * 2 * width
    _store_sums(slot, first, second, rest, half, width, of_qa, of_qb, of_qc)
    _store_sums(slot + width, first, second, rest, half, width, of_ka, of_kb, of_kc)


def _dense_columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _scalars(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> tuple[int, ...]:
    """Tokens, the stride of batches in cosines, heads of queries and keys, pairs that turn, width."""
    shared = cos.ndim == 2 or cos.shape[0] == 1
    return (
        q.shape[1],
        0 if shared else cos.shape[1] * cos.shape[2],
        q.shape[2],
        k.shape[2],
        cos.shape[-1] // 2,
        q.shape[3],
    )


def _blocks(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> dict[str, int]:
    width, rotary = q.shape[3], cos.shape[-1]
    pairs, rest = triton.next_power_of_2(rotary // 2), triton.next_power_of_2(max(1, width - rotary))
    heads = triton.next_power_of_2(max(1, q.shape[2], k.shape[2]))
    held = triton.next_power_of_2(2 * pairs + rest - 1)  # without columns that do not turn, their tile is one of 0
    return {"PAIRS": pairs, "REST": rest, "HEADS": max(1, min(heads, _ELEMENTS // held))}


def _turn_heads(q, k, cos, sin, q_weight, k_weight, eps, out_dtype, **flags) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = (torch.empty(x.shape, dtype=out_dtype, device=x.device) for x in (q, k))
    rows = q.shape[0] * q.shape[1]
    if rows:
        q, k = _dense_columns(q), _dense_columns(k)
        weights = (w if w is None else w.contiguous() for w in (q_weight, k_weight))
        with on(q.device):
            rotary_turn_kernel[(rows,)](
                q,
                *q.stride()[:3],
                k,
                *k.stride()[:3],
                cos.contiguous(),
                sin.contiguous(),
                *weights,
                q_out,
                k_out,
                *_scalars(q, k, cos),
                eps,
                **flags,
                **_blocks(q, k, cos),
                num_warps=4,
                enable_fp_fusion=False,
            )
    return q_out, k_out


@forward_op.bound
def rotary_forward(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _turn_heads(*call[:6], call.eps, call.out_dtype, TRANSPOSED=False, INTERLEAVED=call.interleaved)


@backward_op.bound
def rotary_backward(call: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if call.q_weight is None:
        flags = {"TRANSPOSED": True, "INTERLEAVED": call.interleaved}
        results = _turn_heads(*call[:4], None, None, call.eps, call.out_dtype, **flags)
        return *results, call.cos.new_empty((0, call.grad_q.shape[3]), dtype=torch.float32)
    strips = programs(call.q.device, PROGRAMS_PER_SM)
    return _gradients(call, max(strips, triton.cdiv(call.q.shape[0] * call.q.shape[1], MOST_TOKENS)))


def _gradients(call: Any, strips: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Behind a norm, in at most ``strips`` strips of tokens."""
    q_out, k_out = (torch.empty(x.shape, dtype=call.out_dtype, device=x.device) for x in (call.q, call.k))
    rows, width = call.q.shape[0] * call.q.shape[1], call.q.shape[3]
    if rows == 0:
        return q_out, k_out, torch.zeros((2, width), dtype=torch.float32, device=q_out.device)
    strip = triton.cdiv(rows, strips)
    strips = triton.cdiv(rows, strip)
    slots = torch.empty((strips, 2, width), dtype=torch.float32, device=q_out.device)
    heads = [_dense_columns(x) for x in (call.grad_q, call.grad_k, call.q, call.k)]
    with on(q_out.device):
        rotary_gradient_kernel[(strips,)](
            *(argument for x in heads for argument in (x, *x.stride()[:3])),
            call.cos.contiguous(),
            call.sin.contiguous(),
            call.q_weight.contiguous(),
            call.k_weight.contiguous(),
            q_out,
            k_out,
            slots,
            rows,
            strip,
            *_scalars(call.q, call.k, call.cos),
            call.eps,
            INTERLEAVED=call.interleaved,
            **_blocks(call.q, call.k, call.cos),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return q_out, k_out, slots.sum(0)

"""Cross-entropy of rows of logits and its gradient in Triton, one program a row: csrc/loss/formula.h has the
formulas.

A program walks over its row in blocks. Each lane keeps the largest logit it has seen and the sum of exponentials relative
to it (Milakov and Gimelshein, arXiv:1805.02867); the lanes join at the end, and a second walk, which finds the row in L2,
writes the gradient. Smoothing and probabilities take one more walk in between. Values of an ignored row are
replaced without being used.

Rows of odd length begin at any address. Blocks are counted from the 16-byte boundary at or in front of the row, which
``tl.multiple_of`` tells, and only a block that leaves the row has a mask: under one, every access would be scalar.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2E)


@triton.jit
def _boundary(row, phase, ALIGNED: tl.constexpr):
    """The address ``phase`` elements in front of ``row``. The hint is lost on the sum of a pointer and an offset, so the
    sum is made of integers."""
    element: tl.constexpr = row.dtype.element_ty
    address = row.to(tl.int64) - phase * (element.primitive_bitwidth // 8)
    at = address.to(tl.pointer_type(element))
    return tl.multiple_of(at, 16) if ALIGNED else at


@triton.jit
def _block(at, first, phase, end, BLOCK: tl.constexpr):
    """A block of the row in fp32; -inf outside of it."""
    lanes = first + tl.arange(0, BLOCK)
    if (first >= phase) & (first + BLOCK <= end):
        x = tl.load(at + lanes)
    else:
        x = tl.load(at + lanes, mask=(lanes >= phase) & (lanes < end), other=-float("inf"))
    return x.to(tl.float32)


@triton.jit
def _coefficients(column, classes, soft, weight, own, shared, SOFT: tl.constexpr, WEIGHTED: tl.constexpr):
    """The target's share of each class, without the target class's own part; 0 outside of the row."""
    inside = (column >= 0) & (column < classes)
    c = tl.where(inside, shared, 0.0)
    if SOFT:
        c += own * tl.load(soft + column, mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        c *= tl.load(weight + column, mask=inside, other=0.0)
    return c


@triton.jit
def cross_entropy_rows_kernel(
    logits,
    target,
    weight,
    factor,
    loss,
    grad,
    classes,
    logits_stride,
    target_stride,
    factor_stride,
    grad_stride,
    ignore_index,
    own,
    shared,
    z_loss,
    SOFT: tl.constexpr,  # the target holds probabilities
    SPREAD: tl.constexpr,  # more than one class has a coefficient
    WEIGHTED: tl.constexpr,
    GRAD: tl.constexpr,
    WIDE_GRAD: tl.constexpr,  # rows of the gradient have the offsets of the logits from 16-byte boundaries
    BLOCK: tl.constexpr,
):
    element: tl.constexpr = logits.dtype.element_ty
    size: tl.constexpr = element.primitive_bitwidth // 8
    index = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    row = logits + index * logits_stride
    phase = (row.to(tl.int64) % 16 // size).to(tl.int32)
    base = _boundary(row, phase, True)
    end = phase + classes

    soft = target + index * target_stride
    if SOFT:
        replaced = False
        fill = 0.0
        column_of_target = -1
    else:
        wide = tl.load(soft)
        ignored = wide == ignore_index
        replaced = ignored | (wide < 0) | (wide >= classes)
        fill = tl.where(ignored, 0.0, float("nan"))
        column_of_target = tl.where(replaced, 0, wide).to(tl.int32)
        # Before the walks: where the gradient takes the place of the logits they will overwrite it.
        target_logit = tl.load(row + column_of_target).to(tl.float32)
        u = tl.load(weight + column_of_target) if WEIGHTED else own * 0.0 + 1.0

    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, end, BLOCK):
        x = _block(base, first, phase, end, BLOCK)
        top = tl.where(x > largest, x, largest)
        relative = tl.where(top == -float("inf"), 0.0, top)  # a lane that has seen nothing but -inf keeps the sum 0
        total = total * _exp(largest - relative) + _exp(x - relative)
        largest = top
    m = tl.max(largest, axis=0)
    sum_exp = tl.sum(total * _exp(largest - m), axis=0)
    log_sum = tl.log2(sum_exp) * _LN2

    c_sum = sum_exp * 0.0
    moved = c_sum
    if SPREAD:
        c_lanes = tl.zeros([BLOCK], tl.float32)
        moved_lanes = tl.zeros([BLOCK], tl.float32)
        for first in range(0, end, BLOCK):
            x = _block(base, first, phase, end, BLOCK)
            column = first - phase + lanes
            c = _coefficients(column, classes, soft, weight, own, shared, SOFT, WEIGHTED)
            c_lanes += c
            moved_lanes += tl.where((column >= 0) & (column < classes), c * (x - m), 0.0)
        c_sum = tl.sum(c_lanes, axis=0)
        moved = tl.sum(moved_lanes, axis=0)
    scaled = tl.where(z_loss != 0.0, z_loss * (m + log_sum), 0.0)
    own_part = 0.0
    if not SOFT:
        own_part = own * u
        c_sum += own_part
        moved += own_part * (target_logit - m)
        scaled *= u
    value = c_sum * log_sum - moved + tl.where(z_loss != 0.0, scaled * (m + log_sum), 0.0)
    tl.store(loss + index, tl.where(replaced, fill, value))

    if GRAD:
        f = tl.load(factor + index * factor_stride)
        slope = f * ((c_sum + 2.0 * scaled) / sum_exp)
        out = _boundary(grad + index * grad_stride, phase, WIDE_GRAD)
        for first in range(0, end, BLOCK):
            x = _block(base, first, phase, end, BLOCK)
            column = first - phase + lanes
            g = slope * _exp(x - m)
            if SPREAD:
                g -= f * _coefficients(column, classes, soft, weight, own, shared, SOFT, WEIGHTED)
            if not SOFT:
                g -= tl.where(column == column_of_target, f * own_part, 0.0)
            g = tl.where(replaced, fill, g).to(element)
            if (first >= phase) & (first + BLOCK <= end):
                tl.store(out + first + lanes, g)
            else:
                tl.store(out + first + lanes, g, mask=(column >= 0) & (column < classes))


def cross_entropy_rows_(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    factor: torch.Tensor | None,
    loss: torch.Tensor,
    grad: torch.Tensor | None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> None:
    """The op for tensors that Triton can reach; see ``amp_kernels/_raw/cross_entropy_rows.py``."""
    rows, classes = logits.shape
    if rows == 0:
        return
    size = logits.element_size()
    wide = grad is not None and (grad.data_ptr() - logits.data_ptr()) % 16 == 0
    wide = wide and (grad.stride(0) - logits.stride(0)) * size % 16 == 0
    soft = target.dtype != torch.int64
    with torch.cuda.device(logits.device if logits.is_cuda else -1):
        cross_entropy_rows_kernel[(rows,)](
            logits,
            target,
            weight,
            factor,
            loss,
            grad,
            classes,
            logits.stride(0),
            target.stride(0),
            0 if factor is None else factor.stride(0),
            0 if grad is None else grad.stride(0),
            ignore_index,
            1.0 - label_smoothing,
            label_smoothing / classes,
            z_loss,
            SOFT=soft,
            SPREAD=soft or label_smoothing != 0.0,
            WEIGHTED=weight is not None,
            GRAD=grad is not None,
            WIDE_GRAD=wide,
            BLOCK=min(BLOCK, max(128, triton.next_power_of_2(classes))),
            num_warps=8 if classes > 1024 else 1,
        )

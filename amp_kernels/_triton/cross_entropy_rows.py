"""Cross-entropy of rows of logits and its gradient in Triton, one program a row: csrc/loss/formula.h has the
formulas.

A program walks over its row in blocks. Each lane keeps the largest logit it has seen and the sum of exponentials relative
to it (Milakov and Gimelshein, arXiv:1805.02867); the lanes join at the end, and a second walk, which finds the row in L2,
writes the gradient. It is the only one if the row's statistics are known. Smoothing and probabilities take one more walk in
between. Values of an ignored row are replaced without being used.

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
def _block(at, first, phase, end, temperature, TEMPERED: tl.constexpr, BLOCK: tl.constexpr):
    """A block of the row in fp32, divided by its temperature; -inf outside of it."""
    lanes = first + tl.arange(0, BLOCK)
    if (first >= phase) & (first + BLOCK <= end):
        x = tl.load(at + lanes)
    else:
        x = tl.load(at + lanes, mask=(lanes >= phase) & (lanes < end), other=-float("inf"))
    x = x.to(tl.float32)
    return tl.div_rn(x, temperature) if TEMPERED else x


@triton.jit
def _finite(above):
    """Where the exponential is 0 already, so that no 0 meets -inf."""
    return tl.maximum(above, -128.0)


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
    temperature,
    known,
    entropy_factor,
    statistics,
    temperature_stride,
    known_stride,
    entropy_stride,
    statistics_stride,
    ignore_index,
    own,
    shared,
    z_loss,
    SOFT: tl.constexpr,  # the target holds probabilities
    SPREAD: tl.constexpr,  # more than one class has a coefficient
    WEIGHTED: tl.constexpr,
    GRAD: tl.constexpr,
    TEMPERED: tl.constexpr,
    KNOWN: tl.constexpr,  # statistics are read, else STATISTICS of them are written
    BENT: tl.constexpr,  # the gradient of the entropy is added
    STATISTICS: tl.constexpr,
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

    t = tl.load(temperature + index * temperature_stride) if TEMPERED else 1.0
    soft = target + index * target_stride
    if SOFT:
        replaced = False
        fill = 0.0
        column_of_target = -1
    else:
        wide = tl.load(soft)
        ignored = wide == ignore_index
        outside = (wide < 0) | (wide >= classes)
        replaced = ignored if KNOWN else ignored | outside
        fill = tl.where(ignored, 0.0, float("nan"))
        column_of_target = tl.where(ignored | outside, -1 if KNOWN else 0, wide).to(tl.int32)
        # Before the walks: where the gradient takes the place of the logits they will overwrite it.
        target_logit = tl.load(row + tl.maximum(column_of_target, 0)).to(tl.float32)
        if TEMPERED:
            target_logit = tl.div_rn(target_logit, t)
        u = tl.load(weight + column_of_target) if WEIGHTED else own * 0.0 + 1.0

    moment = 0.0
    if KNOWN:
        m = tl.load(known + index)
        sum_exp = tl.load(known + known_stride + index)
        if BENT:
            moment = tl.load(known + 2 * known_stride + index)
    else:
        largest = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        moments = tl.zeros([BLOCK], tl.float32)
        for first in range(0, end, BLOCK):
            x = _block(base, first, phase, end, t, TEMPERED, BLOCK)
            top = tl.where(x > largest, x, largest)
            relative = tl.where(top == -float("inf"), 0.0, top)  # a lane that has seen nothing but -inf keeps the sum 0
            shrunk = _exp(largest - relative)
            e = _exp(x - relative)
            if STATISTICS == 3:
                moments = (moments + _finite(largest - relative) * total) * shrunk + e * _finite(x - relative)
            total = total * shrunk + e
            largest = top
        m = tl.max(largest, axis=0)
        shrunk = _exp(largest - m)
        sum_exp = tl.sum(total * shrunk, axis=0)
        if STATISTICS == 3:
            moment = tl.sum((moments + _finite(largest - m) * total) * shrunk, axis=0)
    log_sum = tl.log2(sum_exp) * _LN2

    c_sum = sum_exp * 0.0
    moved = c_sum
    if SPREAD:
        c_lanes = tl.zeros([BLOCK], tl.float32)
        moved_lanes = tl.zeros([BLOCK], tl.float32)
        for first in range(0, end, BLOCK):
            x = _block(base, first, phase, end, t, TEMPERED, BLOCK)
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
    if not KNOWN:
        tl.store(loss + index, tl.where(replaced, fill, value))
    if STATISTICS > 0:
        tl.store(statistics + index, tl.where(replaced, fill, m))
        tl.store(statistics + statistics_stride + index, tl.where(replaced, fill + 1.0, sum_exp))
    if STATISTICS == 3:
        tl.store(statistics + 2 * statistics_stride + index, tl.where(replaced, fill, moment))

    if GRAD:
        f = tl.load(factor + index * factor_stride)
        if KNOWN:
            own_part = own
            slope = f / sum_exp
        else:
            slope = f * ((c_sum + 2.0 * scaled) / sum_exp)
        bend = 0.0
        if BENT:
            bend = -tl.load(entropy_factor + index * entropy_stride) / sum_exp
            slope -= bend * (moment / sum_exp)
        out = _boundary(grad + index * grad_stride, phase, WIDE_GRAD)
        for first in range(0, end, BLOCK):
            x = _block(base, first, phase, end, t, TEMPERED, BLOCK)
            column = first - phase + lanes
            g = (slope + bend * _finite(x - m)) * _exp(x - m) if BENT else slope * _exp(x - m)
            if SPREAD:
                g -= f * _coefficients(column, classes, soft, weight, own, shared, SOFT, WEIGHTED)
            if not SOFT:
                g -= tl.where(column == column_of_target, f * own_part, 0.0)
            g = tl.where(replaced, fill, g).to(grad.dtype.element_ty)
            if (first >= phase) & (first + BLOCK <= end):
                tl.store(out + first + lanes, g)
            else:
                tl.store(out + first + lanes, g, mask=(column >= 0) & (column < classes))


def cross_entropy_rows_(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    factor: torch.Tensor | None,
    loss: torch.Tensor | None,
    grad: torch.Tensor | None,
    *,
    temperature: torch.Tensor | None = None,
    known: torch.Tensor | None = None,
    entropy_factor: torch.Tensor | None = None,
    statistics: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> None:
    """The op for tensors that Triton can reach; see ``amp_kernels/_raw/cross_entropy_rows.py``."""
    rows, classes = logits.shape
    if rows == 0:
        return
    size = logits.element_size()
    wide = grad is not None and grad.dtype == logits.dtype and (grad.data_ptr() - logits.data_ptr()) % 16 == 0
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
            temperature,
            known,
            entropy_factor,
            statistics,
            *(0 if x is None else x.stride(0) for x in (temperature, known, entropy_factor, statistics)),
            ignore_index,
            1.0 - label_smoothing,
            label_smoothing / classes,
            z_loss,
            SOFT=soft,
            SPREAD=soft or label_smoothing != 0.0,
            WEIGHTED=weight is not None,
            GRAD=grad is not None,
            TEMPERED=temperature is not None,
            KNOWN=known is not None,
            BENT=entropy_factor is not None,
            STATISTICS=0 if statistics is None else len(statistics),
            WIDE_GRAD=wide,
            BLOCK=min(BLOCK, max(128, triton.next_power_of_2(classes))),
            num_warps=8 if classes > 1024 else 1,
        )

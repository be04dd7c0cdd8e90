"""The last layer of a classifier or language model by chunks of rows, shared by the losses that never hold the logits of all rows.

A chunk's logits are computed, a kernel reads them, and the gradients of input, weight and bias are formed from their gradient: three
products and one chunk of logits are all there is. The weight's gradient is summed over chunks in fp32 (by ``gemm_accumulate_``,
inside the product), so its error does not grow with their number, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import _functional as F
from .._checks.lists import HALF_DTYPES, check_count
from .._checks.operands import check_bias, readable_bias
from .._raw.column_sums import column_sums
from .._raw.gemm import gemm_accumulate_op
from .._raw.unit_sums import UNIT
from . import _loss, _main_grad
from ._autograd import needs_gradient
from ._products import check_blocks, gemm, gemm_options
from .linear import check_shadow

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Head:
    """The layer on rows of the working dtype, 16 bits or fp32; its logits are of that dtype or fp32. Within ``batch_invariant`` sums over
    features are in so many blocks, and sums over rows continue from a ``main_grad`` in an order that no split changes."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk: int,
        batch_invariant: int,
        logits_dtype: torch.dtype | None = None,
    ):
        self.x, self.weight, self.chunk, self.batch_invariant = x, weight, chunk, batch_invariant
        self.logits_dtype = logits_dtype
        self.half = x.dtype in HALF_DTYPES
        self.bias = readable_bias(bias, x.dtype) if self.half else bias

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows, and their logits."""
        for begin in range(0, self.x.shape[0], self.chunk):
            rows = slice(begin, begin + self.chunk)
            if self.half:
                options = gemm_options(self.x, self.logits_dtype, batch_invariant=self.batch_invariant)
                yield rows, gemm(self.x[rows], self.weight.t(), self.bias, **options)[0]
            else:
                yield rows, F.linear(self.x[rows], self.weight, self.bias)

    def gradients(
        self,
        ctx: torch.autograd.function.FunctionCtx,
        ignored: Tensor | None,
        x_dtype: torch.dtype,
        make: Callable[[slice, Tensor, Tensor], None],
    ) -> Gradients:
        """The gradients of input (in ``x_dtype``), weight and bias, those that ``ctx``, whose first inputs they are, needs. The last two
        are fp32, or within ``batch_invariant`` what autograd still has to add.

        ``make(rows, logits, dz)`` writes the gradient of a chunk's logits to ``dz``, of the working dtype; it may be the logits. Rows
        that are ``ignored`` have one of zero; in the gradient of the weight that would meet whatever the input holds, NaN included."""
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = torch.empty(self.x.shape, dtype=x_dtype, device=self.x.device) if needs_x else None
        dw = self._sums(ctx, 1, self.weight.shape) if needs_weight else None
        db = self._sums(ctx, 2, self.weight.shape[:1]) if needs_bias else None
        narrow = None
        for rows, logits in self.chunks():
            dz = logits
            if logits.dtype != self.x.dtype:
                narrow = torch.empty_like(logits, dtype=self.x.dtype) if narrow is None else narrow
                dz = narrow[: logits.shape[0]]
            make(rows, logits, dz)
            del logits
            if dx is not None:
                dx[rows] = self._input_gradient(dz, x_dtype)
            if dw is not None:
                x = self.x[rows]
                dw.add_product(dz, x if ignored is None else x.masked_fill(ignored[rows, None], 0))
            if db is not None:
                db.add_rows(dz)
            del dz  # before the next chunk's logits are made
        _, weight_dtype, bias_dtype = ctx.dtypes
        return dx, dw and dw.gradient(weight_dtype), db and db.gradient(bias_dtype)

    def _sums(self, ctx, position: int, shape: torch.Size) -> _main_grad.Total | _Sums:
        if self.batch_invariant:
            return _main_grad.Total(ctx, position, shape, self.x.device)
        return _Sums(shape, self.x.device)

    def _input_gradient(self, dz: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.half:
            return dz @ self.weight
        return gemm(dz, self.weight, **gemm_options(dz, dtype, batch_invariant=self.batch_invariant))[0]


class _Sums:
    """The fp32 gradient of a parameter, to which chunks add in any order; as :class:`_main_grad.Total`, but that it stays fp32 and
    away from ``main_grad``, for a factor that comes last."""

    def __init__(self, shape: torch.Size, device: torch.device):
        self.sums, self.fresh = torch.empty(shape, dtype=torch.float32, device=device), True

    def add_product(self, dz: Tensor, x: Tensor) -> None:
        beta, self.fresh = float(not self.fresh), False
        if dz.dtype in HALF_DTYPES:
            gemm_accumulate_op(self.sums, dz.t(), x, beta=beta)
        else:
            F.addmm(self.sums, dz.t(), x, beta=beta, out=self.sums)

    def add_rows(self, dz: Tensor) -> None:
        if self.fresh:
            self.sums, self.fresh = column_sums(dz), False
        else:
            self.sums += column_sums(dz)

    def gradient(self, dtype: torch.dtype) -> Tensor:
        return self.sums.zero_() if self.fresh else self.sums


def check_head(
    op: str, input, linear_weight, linear_bias, shadow, dtype, autocast: bool, chunk_size: int | None
) -> None:
    if input.ndim == 0 or linear_weight.ndim != 2 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"{op}: input has shape {list(input.shape)} and linear_weight {list(linear_weight.shape)}; accepted: "
            "[..., in_features] and [classes, in_features]"
        )
    check_bias(op, linear_bias, linear_weight.shape[0], dtype, autocast, "linear_bias")
    check_shadow(op, "shadow", shadow, linear_weight, dtype)
    if chunk_size is not None:
        check_count(op, "chunk_size", chunk_size, 1)


def plain_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, logits_dtype: torch.dtype
) -> Tensor:
    """All logits, in torch's operations: of operands that are rounded to ``dtype``."""
    x, weight = x.to(dtype).to(logits_dtype), weight.to(dtype).to(logits_dtype)
    return F.linear(x, weight, None if bias is None else bias.to(logits_dtype))


def finished(ctx: torch.autograd.function.FunctionCtx, gradients: Gradients, factor: Tensor) -> Gradients:
    """``factor`` times gradients that :meth:`Head.gradients` made outside of ``batch_invariant``, each rounded once to its dtype, that
    of the weight in its ``main_grad`` if it has one."""
    dx, dw, db = gradients
    rest = None if dw is None else _main_grad.add(ctx, 1, dw, factor)
    own = None if rest is not None else dw
    dx, dw, db = _loss.scaled(factor, *zip((dx, own, db), ctx.dtypes, strict=True))
    return dx, dw if rest is None else rest, db


def ignored_rows(target: Tensor, ignore_index: int) -> Tensor | None:
    return None if target.is_floating_point() else target == ignore_index


def default_chunk(
    rows: int,
    dtype: torch.dtype,
    device_type: str,
    blocks: int = 0,
    classes: int = 0,
    logits_dtype: torch.dtype | None = None,
) -> int:
    """Rows of a chunk. Tensor Cores take twice the memory for it: there the fp32 gradient of the weight, which each chunk
    reads and writes, is what chunks cost. fp32 logits of 16-bit operands take 32 MiB on a CPU, which an allocator keeps for the next
    chunk, where fresh pages cost a fifth of a forward. Within ``batch_invariant`` whole units, for the sums over rows."""
    least, chunks = (2048, 4) if dtype in HALF_DTYPES and device_type != "cpu" else (1024, 8)
    chunk = max(least, -(-rows // chunks))
    if device_type == "cpu" and dtype in HALF_DTYPES and logits_dtype == torch.float32:
        chunk = min(chunk, max(128, 2**23 // classes))
    return -(-chunk // UNIT) * UNIT if blocks else chunk


def chunk_and_blocks(
    op: str,
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    batch_invariant: int,
    chunk_size: int | None,
    logits_dtype: torch.dtype | None,
) -> tuple[int, int]:
    """Those of :class:`Head`, for a ``chunk_size`` that may be ``None``; raises if a sum cannot be cut into the blocks."""
    blocks, classes = batch_invariant if dtype in HALF_DTYPES else 0, weight.shape[0]
    check_blocks(op, blocks, in_features=x.shape[1], **({"classes": classes} if needs_gradient(x) else {}))
    return chunk_size or default_chunk(x.shape[0], dtype, x.device.type, blocks, classes, logits_dtype), blocks


def fp16_scale(size: Tensor, ignored: Tensor | None) -> tuple[Tensor, Tensor]:
    """The power of two that brings the largest of ``size``, the magnitudes of the rows' fp32 gradients, to 2^10 or a little more, and its
    inverse, found on the device. Fp16 then keeps all digits of gradients 2^-24 times as large, and 32 times as large are in range.
    1 if one is not finite, which a loss scaler has to see; those of ``ignored`` rows are 0 whatever comes in."""
    size = size if ignored is None else size.masked_fill(ignored, 0)
    exponent = size.amax().view(torch.int32) >> 23 & 255
    scale = torch.where(exponent == 255, 127, (264 - exponent).clamp(1, 253))
    return (scale << 23).view(torch.float32), (254 - scale << 23).view(torch.float32)

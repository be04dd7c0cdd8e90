"""``syrk`` in Triton: a program for each tile of the lower triangle, which it also writes transposed.

The work is N (N + BLOCK) K flops on Tensor Cores against 4 N K bytes of operands and 2 N^2 of the result. The triangle is
folded into lines of equal length, as csrc/gemm/call.h has it. A tile on the diagonal takes its upper half from its own
transpose, so the result is symmetric to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._raw.syrk import check_syrk

BLOCK, BLOCK_K = 64, 64
_OPTIONS = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": False}


@triton.jit
def _place(tile, tiles):
    length = tiles + 1 - tiles % 2
    line = tile // length
    across = tile - line * length
    lower = tiles - line
    row = tl.where(across < lower, lower - 1, line - tiles % 2)
    return row.to(tl.int64), tl.where(across < lower, across, across - lower).to(tl.int64)


@triton.jit(do_not_specialize=["tiles"])
def syrk_kernel(
    a,  # [batches, N, K], likewise b
    b,
    c,  # [batches, N, N], or None
    out,  # [batches, N, N], contiguous
    alpha,
    beta,
    diagonal,
    N,
    K,
    tiles,  # rows of tiles
    stride_ab,
    stride_an,
    stride_ak,
    stride_bb,
    stride_bn,
    stride_bk,
    stride_cb,
    stride_cm,
    stride_cn,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    count = tiles * (tiles + 1) // 2
    batch = (tl.program_id(0) // count).to(tl.int64)
    tile_row, tile_column = _place(tl.program_id(0) % count, tiles)
    rows = tile_row * BLOCK + tl.arange(0, BLOCK)
    columns = tile_column * BLOCK + tl.arange(0, BLOCK)
    ks = tl.arange(0, BLOCK_K)
    a_rows = a + batch * stride_ab + rows[:, None] * stride_an
    b_columns = b + batch * stride_bb + columns[None, :] * stride_bn
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK_K):
        a_tile = tl.load(
            a_rows + (k + ks)[None, :] * stride_ak, mask=(rows < N)[:, None] & (k + ks < K)[None, :], other=0.0
        )
        b_inside = (k + ks < K)[:, None] & (columns < N)[None, :]
        acc = tl.dot(a_tile, tl.load(b_columns + (k + ks)[:, None] * stride_bk, mask=b_inside, other=0.0), acc)
    acc = acc * alpha
    lower = columns[None, :] <= rows[:, None]
    if c is not None:
        places = c + batch * stride_cb + rows[:, None] * stride_cm + columns[None, :] * stride_cn
        acc = tl.fma(
            tl.load(places, mask=lower & (rows < N)[:, None], other=0.0).to(tl.float32), beta + tl.zeros_like(acc), acc
        )
    acc += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    s = acc.to(out.dtype.element_ty)
    mirror = tl.trans(s)
    origin = out + batch * N * N
    if tile_row == tile_column:
        s = tl.where(lower, s, mirror)
    else:
        turned = origin + columns[:, None] * N + rows[None, :]
        tl.store(turned, mirror, mask=(columns < N)[:, None] & (rows < N)[None, :])
    tl.store(origin + rows[:, None] * N + columns[None, :], s, mask=(rows < N)[:, None] & (columns < N)[None, :])


def syrk(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
) -> torch.Tensor:
    check_syrk("syrk", a, b, c)
    n, k = a.shape[-2:]
    out = a.new_empty(*a.shape[:-1], n)
    if out.numel() == 0:
        return out
    if beta == 0:
        c = None
    a, b, batched_c = (None if t is None else t if t.ndim == 3 else t.unsqueeze(0) for t in (a, b, c))
    tiles = triton.cdiv(n, BLOCK)
    grid = (a.shape[0] * tiles * (tiles + 1) // 2,)
    c_strides = (0, 0, 0) if batched_c is None else batched_c.stride()
    with torch.cuda.device(out.device if out.is_cuda else -1):
        syrk_kernel[grid](
            *(a, b, batched_c, out, float(alpha), float(beta), float(diagonal), n, k, tiles),
            *(*a.stride(), *b.stride(), *c_strides),
            BLOCK=BLOCK,
            BLOCK_K=BLOCK_K,
            **_OPTIONS,
        )
    return out

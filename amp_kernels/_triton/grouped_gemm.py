"""The grouped GEMM ops in Triton: one kernel for both forms, a program for each tile; ``_gemm_epilogue.finish`` is its epilogue.

Every program loads the ends of all groups at once and finds its group in registers: a prefix maximum clamps the ends, a prefix sum counts
the tiles. No chain of loads delays it. The grid depends on shapes alone: in the rows form it has the most tiles that any ends could make,
``T // BLOCK_M`` plus one for each group and one for the rows past the last end, which some programs fill with zeros. The work is 2 T K N
flops, of which a group's last tile wastes half a tile of rows on average.

Traps:

- Terms of a group are masked in both operands, since a zero times a NaN of a neighbour is NaN.
- As in ``_gemm_kernel`` the loop takes at least one step, of zeros if a group has no terms.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._checks.activations import GATED
from .._raw.grouped_gemm import (
    check_grouped,
    check_grouped_accumulate,
    grouped_gemm_accumulate_op,
    grouped_gemm_op,
)
from ._autotune import GemmConfig, gemm_config
from ._gemm_epilogue import STRIDES_OF_RESULTS, finish, store_tile
from .gemm import _batched, _described, _layout, _Matrix


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y)


@triton.jit
def _ends(offs, stride, first, groups, total, GROUPS: tl.constexpr):
    """Ends of the groups from number ``first`` on, clamped to [previous, total]: 0 before the first one, past it the last one's."""
    g = first + tl.arange(0, GROUPS)
    found = tl.load(offs + g.to(tl.int64) * stride, mask=(g >= 0) & (g < groups), other=0)
    return tl.associative_scan(tl.minimum(tl.maximum(found, 0), total), 0, _larger)


@triton.jit
def _group_of_rows(offs, stride_offs, groups, M, row_tile, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """Group, first row and end of a tile of rows; the group is GROUPS past the last end."""
    ends = _ends(offs, stride_offs, 0, groups, M, GROUPS)
    begins = _ends(offs, stride_offs, -1, groups, M, GROUPS)
    tiles = tl.cdiv(ends - begins, BLOCK_M)
    through = tl.cumsum(tiles, 0)
    group = tl.sum((through <= row_tile).to(tl.int32), 0)
    here = tl.arange(0, GROUPS) == group
    is_past = group == GROUPS
    first_tile = tl.where(is_past, tl.sum(tiles, 0), tl.sum(tl.where(here, through - tiles, 0), 0))
    begin = tl.where(is_past, tl.max(ends, 0), tl.sum(tl.where(here, begins, 0), 0))
    end = tl.where(is_past, M, tl.sum(tl.where(here, ends, 0), 0))
    return group, begin + (row_tile - first_tile) * BLOCK_M, end


@triton.jit
def _group_of_terms(offs, stride_offs, groups, K, group, GROUPS: tl.constexpr):
    """First term and end of a group."""
    ends = _ends(offs, stride_offs, 0, groups, K, GROUPS)
    g = tl.arange(0, GROUPS)
    return tl.max(tl.where(g < group, ends, 0), 0), tl.max(tl.where(g <= group, ends, 0), 0)


@triton.jit
def _store_zeros(matrix, tile, HALVES: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    batch, row, column, rows, columns = tile
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for half in tl.static_range(HALVES):
        store_tile(matrix, zeros, batch, row, column, rows, columns, WIDE, half == 1)


@triton.jit(
    do_not_specialize=["M", "N", "K", "groups", "stride_offs", "stride_cb", "stride_zb", "stride_rb"],
    do_not_specialize_on_alignment=["c", "preact", "residual", *STRIDES_OF_RESULTS],
)
def grouped_kernel(
    a,  # [M, K]
    b,  # [groups, K, N], or if GATED [groups, K, 2 N]; if SUMS [K, N]
    c,  # [M, N]; if SUMS [groups, M, N]
    bias,  # [groups, N], or None
    preact,
    residual,  # c itself, or None
    offs,
    M,
    N,
    K,
    groups,
    stride_offs,
    stride_am,
    stride_ak,
    stride_bg,
    stride_bk,
    stride_bn,
    stride_bias,
    stride_bias_g,
    stride_cb,
    stride_cm,
    stride_cn,
    stride_zb,
    stride_zm,
    stride_zn,
    stride_rb,
    stride_rm,
    stride_rn,
    ACTIVATION: tl.constexpr,
    SUMS: tl.constexpr,
    C_COLUMN_MAJOR: tl.constexpr,
    Z_COLUMN_MAJOR: tl.constexpr,
    R_COLUMN_MAJOR: tl.constexpr,
    VEC_C: tl.constexpr,
    VEC_Z: tl.constexpr,
    VEC_R: tl.constexpr,
    WIDE: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, at least groups
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    tiles_n = tl.cdiv(N, BLOCK_N)
    row_tile = tl.program_id(0) // tiles_n
    first_column = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N
    if SUMS:
        tiles_m = tl.cdiv(M, BLOCK_M)
        group = row_tile // tiles_m
        first_row, row_end = row_tile % tiles_m * BLOCK_M, M
        k_first, k_end = _group_of_terms(offs, stride_offs, groups, K, group, GROUPS)
        runs = (residual is None) | (k_first < k_end)  # else the memory of an empty group stays
        batch = group.to(tl.int64)
    else:
        group, first_row, row_end = _group_of_rows(offs, stride_offs, groups, M, row_tile, BLOCK_M, GROUPS)
        k_first, k_end = tl.full((), 0, tl.int32), tl.cast(K, tl.int32)
        runs = group < GROUPS
        batch = tl.full((), 0, tl.int64)
    first_row = first_row.to(tl.int64)
    if runs:
        rows = first_row + tl.arange(0, BLOCK_M)
        columns = first_column + tl.arange(0, BLOCK_N)
        ks = tl.arange(0, BLOCK_K)
        a_rows = a + rows[:, None] * stride_am
        b_columns = b + columns[None, :] * stride_bn
        if not SUMS:
            b_columns += group.to(tl.int64) * stride_bg
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = acc if GATED else None
        for first in range(k_first, tl.maximum(k_end, k_first + 1), BLOCK_K):
            k = (first + ks).to(tl.int64)
            a_inside = (rows < row_end)[:, None] & (k < k_end)[None, :]
            b_inside = (k < k_end)[:, None] & (columns < N)[None, :]
            a_tile = tl.load(a_rows + k[None, :] * stride_ak, mask=a_inside, other=0.0)
            b_places = b_columns + k[:, None] * stride_bk
            acc = tl.dot(a_tile, tl.load(b_places, mask=b_inside, other=0.0), acc)
            if GATED:
                up = tl.dot(a_tile, tl.load(b_places + N.to(tl.int64) * stride_bn, mask=b_inside, other=0.0), up)
        if bias is not None:
            bias += group.to(tl.int64) * stride_bias_g
        finish(
            acc,
            up,
            batch,
            first_row,
            first_column,
            row_end,
            N,
            (c, stride_cb, stride_cm, stride_cn, C_COLUMN_MAJOR, VEC_C),
            bias,
            stride_bias,
            (preact, stride_zb, stride_zm, stride_zn, Z_COLUMN_MAJOR, VEC_Z),
            (residual, stride_rb, stride_rm, stride_rn, R_COLUMN_MAJOR, VEC_R),
            None,
            1.0,
            1.0,
            ACTIVATION,
            False,
            False,
            WIDE,
        )
    elif not SUMS:
        tile = (batch, first_row, first_column, row_end, N)
        _store_zeros((c, stride_cb, stride_cm, stride_cn, C_COLUMN_MAJOR, VEC_C), tile, 1, WIDE, BLOCK_M, BLOCK_N)
        if preact is not None:
            _store_zeros(
                (preact, stride_zb, stride_zm, stride_zn, Z_COLUMN_MAJOR, VEC_Z),
                tile,
                2 if GATED else 1,
                WIDE,
                BLOCK_M,
                BLOCK_N,
            )


@grouped_gemm_op.bound
def grouped_gemm(call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    a, b, offs = call.a, call.b, call.offs
    name = check_grouped(a, b, offs, call.bias, call.activation, call.out_dtype, call.preact)
    sums = b.ndim == 2
    shape = ([offs.shape[0]] if sums else []) + [a.shape[0], b.shape[-1] // (2 if name in GATED else 1)]
    c = torch.empty(shape, dtype=call.out_dtype or a.dtype, device=a.device)
    z = c.new_empty(a.shape[0], b.shape[2]) if call.preact else None
    _run(c, a, b, offs, call.bias, z, activation=name, batch_invariant=call.batch_invariant)
    return c, z


@grouped_gemm_accumulate_op.bound
def grouped_gemm_accumulate_(call: Any) -> None:
    check_grouped_accumulate(call.c, call.a, call.b, call.offs)
    residual = None if call.overwrite else call.c
    _run(call.c, call.a, call.b, call.offs, residual=residual, batch_invariant=call.batch_invariant)


def _run(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    preact: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: str = "none",
    batch_invariant: bool = False,
    config: GemmConfig | None = None,
) -> None:
    """The arguments have been checked. ``config`` replaces the choice, for tests."""
    if c.numel() == 0:
        return
    (m, k), n, groups, sums = a.shape, c.shape[-1], offs.shape[0], b.ndim == 2
    results = (_layout(_batched(c)), *(None if t is None else _layout(_batched(t)) for t in (preact, residual)))
    if config is None:
        config = _config(a, b, results, n, groups, activation, batch_invariant)
    tiles = groups * triton.cdiv(m, config.block_m) if sums else m // config.block_m + groups + 1
    bias_strides = (0, 0) if bias is None else (bias.stride(-1), bias.stride(0) if bias.ndim == 2 else 0)
    with torch.cuda.device(c.device if c.is_cuda else -1):
        grouped_kernel[(tiles * triton.cdiv(n, config.block_n),)](
            *(a, b, c, bias, preact, residual, offs, m, n, k, groups, offs.stride(0)),
            *(*a.stride(), *_batched(b).stride(), *bias_strides),
            **_described(results, n, (config.block_m, config.block_n)),
            ACTIVATION=activation,
            SUMS=sums,
            GROUPS=triton.next_power_of_2(max(1, groups)),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=False,
        )


def _config(a, b, results, n: int, groups: int, activation: str, batch_invariant: bool) -> GemmConfig:
    """That of a batch of products of the groups' mean size."""
    (m, k), sums = a.shape, b.ndim == 2
    mean = triton.cdiv(k if sums else m, max(1, groups))
    return gemm_config(
        m if sums else mean,
        n,
        mean if sums else k,
        batch=groups,
        out_bytes=sum(t.shape[2] // n * t.size for t in results if t is not None),
        capability=torch.cuda.get_device_capability(a.device) if a.is_cuda else (8, 0),
        vec=min(_Matrix(_layout(_batched(a)), k).vec, _Matrix(_layout(_batched(b)), n).vec),
        full_epilogue=results[1] is not None or results[2] is not None or activation not in ("none", "relu"),
        gated=activation in GATED,
        batch_invariant=batch_invariant,
        whole=True,
    )

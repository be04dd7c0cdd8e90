"""The Triton GEMM for fp16 or bf16 operands: one kernel for all GEMM ops. ``_gemm_epilogue.finish`` is its epilogue.

The work is 2 M N K flops on Tensor Cores against (M K + K N) * 2 bytes read and M N written: with tiles of 128 x 256 an operand byte
that reaches shared memory is used 85 to 256 times, enough for the Tensor Cores to be the limit. One program computes one tile of c.
It walks along K, and Triton pipelines the loads ``num_stages`` deep (cp.async on sm_80, TMA or cp.async into wgmma on sm_90). The
accumulators stay in fp32; everything that follows the last product is done on them, and each stored value is rounded once. Tiles are
numbered in groups of GROUP_M rows of tiles, so that the programs that run at one time share rows of a and columns of b in L2.

If a result has few tiles and K is long, several programs share a tile, ``k_split`` of K each: c is then an fp32 matrix per split,
and ``finish_kernel`` adds these in order and does the rest. An activation of two values (GATED) takes column j and column N + j of
a @ b: the program multiplies its rows of a with two tiles of b, into two accumulators, so that both values meet in registers.

Traps, besides those of ``_gemm_epilogue``:

- All four layouts are read in place: a pair of strides is enough, the compiler finds the contiguous one because Triton turns an
  argument equal to 1 into a constant.
- Out-of-range elements of a and b are read as zero on both sides, so nothing beyond K can bring a NaN in. Splits begin at multiples
  of BLOCK_K, so that no step reaches into the next one.
- The loop takes at least one step, of zeros if K is 0. A path around it would merge zeros with the accumulators, and ptxas serialises
  every wgmma whose accumulators anything else defines: a wait after each instruction instead of one a step.
- A residual with the factor 0 is not passed at all: it may hold anything.
"""

import triton
import triton.language as tl

from ._gemm_epilogue import STRIDES_OF_RESULTS, base, finish, load_tile, multiple, places, tile_of_program


@triton.jit
def _load_box(descriptor, batch, row, column, COLUMN_MAJOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A [ROWS, COLUMNS] tile through a TMA descriptor, whose last dimension is the contiguous one."""
    if COLUMN_MAJOR:
        return descriptor.load([batch, column, row]).reshape(COLUMNS, ROWS).T
    else:
        return descriptor.load([batch, row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def _multiply(a, b, acc, up, begin, shape, WIDE: tl.constexpr, BLOCK_K: tl.constexpr):
    """``acc``, and ``up`` unless it is None, plus the products of the terms from k_first to k_last, loaded through pointers."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    A_COLUMN_MAJOR: tl.constexpr = a[4]
    B_COLUMN_MAJOR: tl.constexpr = b[4]
    VEC_A: tl.constexpr = a[5]
    VEC_B: tl.constexpr = b[5]
    batch, first_row, first_column, k_first, k_last = begin
    M, N, K = shape
    # Each operand has one stride, of the outer dimension, and one bound, of its contiguous dimension.
    a_row = multiple(a[2], 1 if A_COLUMN_MAJOR else VEC_A)
    a_step = multiple(a[3], VEC_A if A_COLUMN_MAJOR else 1)
    b_step = multiple(b[2], 1 if B_COLUMN_MAJOR else VEC_B)
    b_column = multiple(b[3], VEC_B if B_COLUMN_MAJOR else 1)
    a_end = multiple(K, 1 if A_COLUMN_MAJOR else VEC_A)
    b_end = multiple(K, VEC_B if B_COLUMN_MAJOR else 1)
    b_width = multiple(N, 1 if B_COLUMN_MAJOR else VEC_B)
    a_rows = (first_row + tl.arange(0, BLOCK_M) < multiple(M, VEC_A if A_COLUMN_MAJOR else 1))[:, None]
    b_columns = (first_column + tl.arange(0, BLOCK_N) < b_width)[None, :]
    a_base = base(a[0], batch * multiple(a[1], VEC_A) + first_row * a_row + k_first * a_step, VEC_A)
    b_origin = batch * multiple(b[1], VEC_B) + first_column * b_column + k_first * b_step
    b_base = base(b[0], b_origin, VEC_B)
    up_base = base(b[0], b_origin + b_width * b_column, VEC_B)
    ks = tl.arange(0, BLOCK_K)
    a_places = places(tl.arange(0, BLOCK_M), a_row, ks, a_step, WIDE)
    b_places = places(ks, b_step, tl.arange(0, BLOCK_N), b_column, WIDE)
    for k in range(k_first, k_last, BLOCK_K):
        a_tile = tl.load(a_base + a_places, mask=a_rows & (ks[None, :] < a_end - k), other=0.0)
        b_inside = (ks[:, None] < b_end - k) & b_columns
        b_tile = tl.load(b_base + b_places, mask=b_inside, other=0.0)
        acc = tl.dot(a_tile, b_tile, acc)
        if up is not None:
            b_tile = tl.load(up_base + b_places, mask=b_inside, other=0.0)
            up = tl.dot(a_tile, b_tile, up)
            up_base += BLOCK_K * b_step
        a_base += BLOCK_K * a_step
        b_base += BLOCK_K * b_step
    return acc, acc if up is None else up  # a function cannot return None among others


_STRIDES = ["stride_am", "stride_ak", "stride_bk", "stride_bn", *STRIDES_OF_RESULTS]


# The VEC arguments say what alignment matters, so that a size which happens to divide by 16 does not compile another kernel.
@triton.jit(
    do_not_specialize=[
        *("M", "N", "K", "k_split", "batches"),
        *("stride_ab", "stride_bb", "stride_cb", "stride_zb", "stride_rb"),
    ],
    do_not_specialize_on_alignment=["a", "b", "c", "preact", "residual", *_STRIDES],
)
def gemm_kernel(
    a,  # [batches, M, K]: a pointer, or with TMA a descriptor; likewise b
    b,  # [batches, K, N], or if GATED [batches, K, 2 N]
    c,  # [batches, M, N], or [splits * batches, M, N]; if BACKWARD and swiglu of 2 N columns
    bias,
    preact,
    residual,
    sums,
    alpha,
    beta,
    M,
    N,
    K,
    k_split,  # terms of a split, a multiple of BLOCK_K
    batches,
    stride_ab,
    stride_am,
    stride_ak,
    stride_bb,
    stride_bk,
    stride_bn,
    stride_cb,
    stride_cm,
    stride_cn,
    stride_zb,
    stride_zm,
    stride_zn,
    stride_rb,
    stride_rm,
    stride_rn,
    stride_bias,
    ACTIVATION: tl.constexpr,
    BACKWARD: tl.constexpr,
    BIAS_OF_ROWS: tl.constexpr,
    CHAINED: tl.constexpr,  # the sums start from the residual
    A_COLUMN_MAJOR: tl.constexpr,
    B_COLUMN_MAJOR: tl.constexpr,
    C_COLUMN_MAJOR: tl.constexpr,
    Z_COLUMN_MAJOR: tl.constexpr,
    R_COLUMN_MAJOR: tl.constexpr,
    VEC_A: tl.constexpr,
    VEC_B: tl.constexpr,
    VEC_C: tl.constexpr,
    VEC_Z: tl.constexpr,
    VEC_R: tl.constexpr,
    WIDE: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION == "swiglu" and not BACKWARD
    matrix, tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    batch = matrix % batches
    # In a form that shows a multiple of BLOCK_K: the mask of a step is as fine as its first k.
    k_first = matrix // batches * k_split // BLOCK_K * BLOCK_K
    k_last = tl.minimum(tl.maximum(K, 1), k_first + k_split)
    tl.assume(k_first < k_last)
    first_row, first_column = tile_m * BLOCK_M, tile_n * BLOCK_N
    if CHAINED:
        acc = load_tile(
            (residual, stride_rb, stride_rm, stride_rn, R_COLUMN_MAJOR, VEC_R),
            batch,
            first_row,
            first_column,
            M,
            N,
            WIDE,
            BLOCK_M,
            BLOCK_N,
            False,
        )
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = acc if GATED else None
    if TMA:
        row, column = first_row.to(tl.int32), first_column.to(tl.int32)
        for k in range(k_first, k_last, BLOCK_K):
            a_tile = _load_box(a, batch, row, k, A_COLUMN_MAJOR, BLOCK_M, BLOCK_K)
            b_tile = _load_box(b, batch, k, column, B_COLUMN_MAJOR, BLOCK_K, BLOCK_N)
            acc = tl.dot(a_tile, b_tile, acc)
            if GATED:
                b_tile = _load_box(b, batch, k, column + N, B_COLUMN_MAJOR, BLOCK_K, BLOCK_N)
                up = tl.dot(a_tile, b_tile, up)
    else:
        acc, up = _multiply(
            (a, stride_ab, stride_am, stride_ak, A_COLUMN_MAJOR, VEC_A),
            (b, stride_bb, stride_bk, stride_bn, B_COLUMN_MAJOR, VEC_B),
            acc,
            up,
            (batch, first_row, first_column, k_first, k_last),
            (M, N, K),
            WIDE,
            BLOCK_K,
        )
    finish(
        acc,
        up,
        matrix,
        first_row,
        first_column,
        M,
        N,
        (c, stride_cb, stride_cm, stride_cn, C_COLUMN_MAJOR, VEC_C),
        bias,
        stride_bias,
        (preact, stride_zb, stride_zm, stride_zn, Z_COLUMN_MAJOR, VEC_Z),
        (None if CHAINED else residual, stride_rb, stride_rm, stride_rn, R_COLUMN_MAJOR, VEC_R),
        sums,
        alpha,
        beta,
        ACTIVATION,
        BACKWARD,
        BIAS_OF_ROWS,
        WIDE,
    )

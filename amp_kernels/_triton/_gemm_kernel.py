"""The Triton GEMM: ``c = activation(alpha * a @ b + bias) + beta * c`` for fp16 or bf16 operands, one kernel for all three GEMM ops.

The work is 2 M N K flops on Tensor Cores against (M K + K N) * 2 bytes read and M N written: with tiles of 128 x 256 an operand byte
that reaches shared memory is used 85 to 256 times, enough for the Tensor Cores to be the limit. One program computes one tile of c.
It walks along K, and Triton pipelines the loads ``num_stages`` deep (cp.async on sm_80, TMA or cp.async into wgmma on sm_90). The
accumulators stay in fp32; everything that follows the last product (alpha, bias, pre-activation, activation, beta) is done on them,
and each stored value is rounded once. Tiles are numbered in groups of GROUP_M rows of tiles, so that the programs that run at one
time share rows of a and columns of b in L2.

Traps:

- All four layouts are read in place: a pair of strides is enough, the compiler finds the contiguous one because Triton turns an
  argument equal to 1 into a constant. Whether loads are 16 bytes wide or 2 hangs on what it can prove about divisibility. Triton
  itself only notices multiples of 16, so VEC_A, VEC_B and VEC_C say how many elements of the contiguous dimension an aligned group
  has, and ``_multiple`` writes that into the arithmetic. The extent counts as well: a mask ``column < N`` is as fine as N.
- Hints on kernel arguments or on sums of pointer and offset are dropped silently; ``_base`` therefore sums integers.
- Element offsets and coordinates are 64-bit: matrices of more than 2^31 elements are common (a language model's head), and a
  stride that fits 32 bits times a row number need not.
- Out-of-range elements of a and b are read as zero on both sides, so nothing beyond K can bring a NaN in.
- ``beta=None`` compiles a kernel that does not read c, which may hold anything.
"""

import triton
import triton.language as tl

from ._activations import activate


@triton.jit
def _multiple(x, VEC: tl.constexpr):
    """``x``, which VEC divides, in 64 bits and in a form that shows it."""
    return tl.cast(x // VEC * VEC, tl.int64)


@triton.jit
def _base(pointer, offset, VEC: tl.constexpr):
    """``pointer + offset``, aligned to VEC elements."""
    size: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    address = pointer.to(tl.int64) + offset * size
    return tl.multiple_of(address.to(pointer.dtype), VEC * size)


@triton.jit
def _places(rows, row_stride, columns, column_stride, WIDE: tl.constexpr):
    """Element offsets within a tile: 64-bit where WIDE, otherwise 32-bit, which halves the registers they take."""
    if not WIDE:
        row_stride = row_stride.to(tl.int32)
        column_stride = column_stride.to(tl.int32)
    return rows[:, None] * row_stride + columns[None, :] * column_stride


@triton.jit
def _tile_of_program(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Which matrix of the batch and which tile of it this program computes: the batches one after the other, grouped within."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    tile = program % (tiles_m * tiles_n)
    group = tile // (GROUP_M * tiles_n)
    rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    batch = program // (tiles_m * tiles_n)
    return batch.to(tl.int64), (group * GROUP_M + within % rows).to(tl.int64), (within // rows).to(tl.int64)


@triton.jit
def _load_box(descriptor, batch, row, column, COLUMN_MAJOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A [ROWS, COLUMNS] tile through a TMA descriptor, whose last dimension is the contiguous one."""
    if COLUMN_MAJOR:
        return descriptor.load([batch.to(tl.int32), column, row]).reshape(COLUMNS, ROWS).T
    else:
        return descriptor.load([batch.to(tl.int32), row, column]).reshape(ROWS, COLUMNS)


_STRIDES = ["stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn"]


# The VEC arguments say what alignment matters, so that a size which happens to divide by 16 does not compile another kernel.
@triton.jit(
    do_not_specialize=["M", "N", "K", "stride_ab", "stride_bb", "stride_cb"],
    do_not_specialize_on_alignment=["a", "b", "c", "preact", *_STRIDES],
)
def gemm_kernel(
    a,  # [batch, M, K]: a pointer, or with TMA a descriptor; likewise b
    b,  # [batch, K, N]
    c,  # [batch, M, N]
    bias,  # [N] or None
    preact,  # None, or where to store the value before the activation: strides and dtype of c
    alpha,  # None is 1
    beta,  # None is 0
    M,
    N,
    K,
    stride_ab,
    stride_am,
    stride_ak,
    stride_bb,
    stride_bk,
    stride_bn,
    stride_cb,
    stride_cm,
    stride_cn,
    stride_bias,
    ACTIVATION: tl.constexpr,
    A_COLUMN_MAJOR: tl.constexpr,
    B_COLUMN_MAJOR: tl.constexpr,
    C_COLUMN_MAJOR: tl.constexpr,
    VEC_A: tl.constexpr,
    VEC_B: tl.constexpr,
    VEC_C: tl.constexpr,
    WIDE: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    batch, tile_m, tile_n = _tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    if TMA:
        row = (tile_m * BLOCK_M).to(tl.int32)
        column = (tile_n * BLOCK_N).to(tl.int32)
        for k in range(0, K, BLOCK_K):
            a_tile = _load_box(a, batch, row, k, A_COLUMN_MAJOR, BLOCK_M, BLOCK_K)
            b_tile = _load_box(b, batch, k, column, B_COLUMN_MAJOR, BLOCK_K, BLOCK_N)
            acc = tl.dot(a_tile, b_tile, acc)
    else:
        # Of each operand one stride is that of the outer dimension, and one extent ends its contiguous dimension.
        a_row = _multiple(stride_am, 1 if A_COLUMN_MAJOR else VEC_A)
        a_step = _multiple(stride_ak, VEC_A if A_COLUMN_MAJOR else 1)
        b_step = _multiple(stride_bk, 1 if B_COLUMN_MAJOR else VEC_B)
        b_column = _multiple(stride_bn, VEC_B if B_COLUMN_MAJOR else 1)
        a_rows = (rows < _multiple(M, VEC_A if A_COLUMN_MAJOR else 1))[:, None]
        b_columns = (columns < _multiple(N, 1 if B_COLUMN_MAJOR else VEC_B))[None, :]
        a_end = _multiple(K, 1 if A_COLUMN_MAJOR else VEC_A)
        b_end = _multiple(K, VEC_B if B_COLUMN_MAJOR else 1)
        a_base = _base(a, batch * _multiple(stride_ab, VEC_A) + tile_m * BLOCK_M * a_row, VEC_A)
        b_base = _base(b, batch * _multiple(stride_bb, VEC_B) + tile_n * BLOCK_N * b_column, VEC_B)
        ks = tl.arange(0, BLOCK_K)
        a_places = _places(tl.arange(0, BLOCK_M), a_row, ks, a_step, WIDE)
        b_places = _places(ks, b_step, tl.arange(0, BLOCK_N), b_column, WIDE)
        for k in range(0, K, BLOCK_K):
            a_tile = tl.load(a_base + a_places, mask=a_rows & (ks[None, :] < a_end - k), other=0.0)
            b_tile = tl.load(b_base + b_places, mask=(ks[:, None] < b_end - k) & b_columns, other=0.0)
            acc = tl.dot(a_tile, b_tile, acc)
            a_base += BLOCK_K * a_step
            b_base += BLOCK_K * b_step

    if alpha is not None:
        acc *= alpha
    if bias is not None:
        acc += tl.load(bias + columns * stride_bias, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    c_row = _multiple(stride_cm, 1 if C_COLUMN_MAJOR else VEC_C)
    c_column = _multiple(stride_cn, VEC_C if C_COLUMN_MAJOR else 1)
    c_origin = batch * _multiple(stride_cb, VEC_C) + tile_m * BLOCK_M * c_row + tile_n * BLOCK_N * c_column
    places = _places(tl.arange(0, BLOCK_M), c_row, tl.arange(0, BLOCK_N), c_column, WIDE)
    inside = (rows < _multiple(M, VEC_C if C_COLUMN_MAJOR else 1))[:, None]
    inside &= (columns < _multiple(N, 1 if C_COLUMN_MAJOR else VEC_C))[None, :]
    out = activate(acc, ACTIVATION)
    if preact is not None:
        tl.store(_base(preact, c_origin, VEC_C) + places, acc.to(preact.dtype.element_ty), mask=inside)
    acc = out
    if beta is not None:
        acc = tl.fma(tl.load(_base(c, c_origin, VEC_C) + places, mask=inside), beta, acc)
    tl.store(_base(c, c_origin, VEC_C) + places, acc.to(c.dtype.element_ty), mask=inside)

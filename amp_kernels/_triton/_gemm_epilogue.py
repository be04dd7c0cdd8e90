"""The epilogue of a GEMM: :func:`finish`, on the fp32 sums of one tile, and the two small kernels of other sums.

``finish_kernel`` adds the partial sums of a GEMM whose K was split and does with the result what the GEMM kernel does with its own.
``column_sums_kernel`` adds the sums over rows that each row of tiles left. Both add in one order, whatever order blocks run in: a
result has the same bits each time. Both move 4 bytes a number that they add, a small part of what the GEMM itself moves.

Traps:

- Accesses are 16 bytes wide if the compiler can prove divisibility, else 2. Triton itself only notices
  multiples of 16, so the VEC arguments say how many elements of the contiguous dimension an aligned group has, and ``multiple``
  writes that into the arithmetic. The extent counts as well: a mask ``column < N`` is as fine as N.
- Hints on kernel arguments or on sums of pointer and offset are dropped silently; ``base`` therefore sums integers.
- Element offsets and coordinates are 64-bit: matrices of more than 2^31 elements are common (a language model's head), and a
  stride that fits 32 bits times a row number need not.

A matrix travels through these functions as a tuple ``(pointer, batch stride, row stride, column stride, COLUMN_MAJOR, VEC)``.
"""

import triton
import triton.language as tl

from ._activations import activate, activate_backward, swiglu, swiglu_backward


@triton.jit
def multiple(x, VEC: tl.constexpr):
    """``x``, which VEC divides, in 64 bits and in a form that shows it."""
    return tl.cast(x // VEC * VEC, tl.int64)


@triton.jit
def base(pointer, offset, VEC: tl.constexpr):
    """``pointer + offset``, aligned to VEC elements."""
    size: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    address = pointer.to(tl.int64) + offset * size
    return tl.multiple_of(address.to(pointer.dtype), VEC * size)


@triton.jit
def places(rows, row_stride, columns, column_stride, WIDE: tl.constexpr):
    """Element offsets within a tile: 64-bit where WIDE, otherwise 32-bit, which halves the registers they take."""
    if not WIDE:
        row_stride = row_stride.to(tl.int32)
        column_stride = column_stride.to(tl.int32)
    return rows[:, None] * row_stride + columns[None, :] * column_stride


@triton.jit
def tile_of_program(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Which matrix and which tile of it this program computes: the matrices one after the other, tiles in groups of GROUP_M rows."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    tile = program % (tiles_m * tiles_n)
    group = tile // (GROUP_M * tiles_n)
    rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return program // (tiles_m * tiles_n), (group * GROUP_M + within % rows).to(tl.int64), (within // rows).to(tl.int64)


@triton.jit
def _elements(
    matrix,
    batch,
    row,
    column,
    M,
    N,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Addresses of the tile at (row, column), and which of its elements exist; SECOND: N columns further to the right."""
    COLUMN_MAJOR: tl.constexpr = matrix[4]
    VEC: tl.constexpr = matrix[5]
    row_step = multiple(matrix[2], 1 if COLUMN_MAJOR else VEC)
    column_step = multiple(matrix[3], VEC if COLUMN_MAJOR else 1)
    rows = multiple(M, VEC if COLUMN_MAJOR else 1)
    columns = multiple(N, 1 if COLUMN_MAJOR else VEC)
    origin = batch * multiple(matrix[1], VEC) + row * row_step + column * column_step
    if SECOND:
        origin += columns * column_step
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    return (
        base(matrix[0], origin, VEC) + places(i, row_step, j, column_step, WIDE),
        (row + i < rows)[:, None] & (column + j < columns)[None, :],
    )


@triton.jit
def load_tile(
    matrix,
    batch,
    row,
    column,
    M,
    N,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SECOND: tl.constexpr,
):
    pointers, inside = _elements(matrix, batch, row, column, M, N, WIDE, BLOCK_M, BLOCK_N, SECOND)
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(matrix, x, batch, row, column, M, N, WIDE: tl.constexpr, SECOND: tl.constexpr):
    pointers, inside = _elements(matrix, batch, row, column, M, N, WIDE, x.shape[0], x.shape[1], SECOND)
    tl.store(pointers, x.to(matrix[0].dtype.element_ty), mask=inside)


@triton.jit
def _preactivation(acc, alpha, bias, stride_bias, row, column, M, N, BIAS_OF_ROWS: tl.constexpr, SECOND: tl.constexpr):
    z = acc * alpha
    if bias is not None:
        if BIAS_OF_ROWS:
            rows = row + tl.arange(0, z.shape[0])
            z += tl.load(bias + rows * stride_bias, mask=rows < M, other=0.0).to(tl.float32)[:, None]
        else:
            columns = column + tl.arange(0, z.shape[1])
            inside = columns < N
            if SECOND:
                columns += N
            z += tl.load(bias + columns * stride_bias, mask=inside, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def _store_sums(sums, x, batch, row, column, M, N, COLUMNS: tl.constexpr, SECOND: tl.constexpr):
    """The sums of the tile's rows, into row ``batch * row tiles + row tile`` of ``sums``, whose rows have COLUMNS * N elements."""
    inside = row + tl.arange(0, x.shape[0]) < M  # beyond them an infinite b has made NaN
    columns = column + tl.arange(0, x.shape[1])
    block = batch * tl.cdiv(M, x.shape[0]) + row // x.shape[0]
    total = tl.sum(tl.where(inside[:, None], x, 0.0), axis=0)
    start = block * N * COLUMNS
    if SECOND:
        start += N
    tl.store(sums + start + columns, total, mask=columns < N)


@triton.jit
def finish(
    acc,  # [BLOCK_M, BLOCK_N] sums
    up,  # None, or the sums N columns further to the right, for an activation that takes two values
    batch,
    row,  # of the tile's first element
    column,
    M,
    N,  # columns of a @ b; with `up` half of them
    c,  # matrix of the result
    bias,
    stride_bias,
    preact,  # matrix of the pre-activation: stored, or if BACKWARD read; its pointer may be None
    residual,  # matrix; its pointer may be None
    sums,  # None, or where to store the sums over the tile's rows of what is stored in c, before it is rounded
    alpha,
    beta,
    ACTIVATION: tl.constexpr,
    BACKWARD: tl.constexpr,
    BIAS_OF_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``c = activation(alpha * acc + bias) + beta * residual``, or if BACKWARD ``c = acc * activation'(preact)``, in fp32."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    batch = batch.to(tl.int64)
    if BACKWARD and ACTIVATION == "swiglu":
        gate = load_tile(preact, batch, row, column, M, N, WIDE, BLOCK_M, BLOCK_N, False)
        value = load_tile(preact, batch, row, column, M, N, WIDE, BLOCK_M, BLOCK_N, True)
        d_gate, d_up = swiglu_backward(acc, gate, value)
        if sums is not None:
            _store_sums(sums, d_gate, batch, row, column, M, N, 2, False)
            _store_sums(sums, d_up, batch, row, column, M, N, 2, True)
        store_tile(c, d_gate, batch, row, column, M, N, WIDE, False)
        store_tile(c, d_up, batch, row, column, M, N, WIDE, True)
    else:
        if BACKWARD:
            out = acc
            if ACTIVATION != "none":
                z = load_tile(preact, batch, row, column, M, N, WIDE, BLOCK_M, BLOCK_N, False)
                out = activate_backward(acc, z, ACTIVATION)
            if sums is not None:
                _store_sums(sums, out, batch, row, column, M, N, 1, False)
        else:
            z = _preactivation(acc, alpha, bias, stride_bias, row, column, M, N, BIAS_OF_ROWS, False)
            if ACTIVATION == "swiglu":
                z_up = _preactivation(up, alpha, bias, stride_bias, row, column, M, N, BIAS_OF_ROWS, True)
                out = swiglu(z, z_up)
                if preact[0] is not None:
                    store_tile(preact, z_up, batch, row, column, M, N, WIDE, True)
            else:
                out = activate(z, ACTIVATION)
            if preact[0] is not None:
                store_tile(preact, z, batch, row, column, M, N, WIDE, False)
            if residual[0] is not None:
                r = load_tile(residual, batch, row, column, M, N, WIDE, BLOCK_M, BLOCK_N, False)
                out = tl.fma(r, beta, out)
        store_tile(c, out, batch, row, column, M, N, WIDE, False)


STRIDES_OF_RESULTS = [f"stride_{matrix}{dim}" for matrix in "czr" for dim in "mn"]


@triton.jit(
    do_not_specialize=["M", "N", "batches", "splits", "stride_cb", "stride_zb", "stride_rb"],
    do_not_specialize_on_alignment=["c", "preact", "residual", *STRIDES_OF_RESULTS],
)
def finish_kernel(
    partials,  # fp32 [splits, batches, M, N], of 2 N columns for an activation that takes two values
    c,
    bias,
    preact,
    residual,
    sums,
    alpha,
    beta,
    M,
    N,
    batches,
    splits,
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
    C_COLUMN_MAJOR: tl.constexpr,
    Z_COLUMN_MAJOR: tl.constexpr,
    R_COLUMN_MAJOR: tl.constexpr,
    VEC_P: tl.constexpr,
    VEC_C: tl.constexpr,
    VEC_Z: tl.constexpr,
    VEC_R: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION == "swiglu" and not BACKWARD
    batch, tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, 1)
    row = tile_m * BLOCK_M
    column = tile_n * BLOCK_N
    width = N * 2 if GATED else N
    matrix_stride = M * width.to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = acc if GATED else None
    for split in range(splits):
        matrix = tl.cast(split, tl.int64) * batches + batch
        # The tuple is written out each time, since what is assigned to a name is no compile-time constant any more.
        acc += load_tile(
            (partials, matrix_stride, width, 1, False, VEC_P), matrix, row, column, M, N, WIDE, BLOCK_M, BLOCK_N, False
        )
        if GATED:
            up += load_tile(
                (partials, matrix_stride, width, 1, False, VEC_P),
                matrix,
                row,
                column,
                M,
                N,
                WIDE,
                BLOCK_M,
                BLOCK_N,
                True,
            )
    finish(
        acc,
        up,
        batch,
        row,
        column,
        M,
        N,
        (c, stride_cb, stride_cm, stride_cn, C_COLUMN_MAJOR, VEC_C),
        bias,
        stride_bias,
        (preact, stride_zb, stride_zm, stride_zn, Z_COLUMN_MAJOR, VEC_Z),
        (residual, stride_rb, stride_rm, stride_rn, R_COLUMN_MAJOR, VEC_R),
        sums,
        alpha,
        beta,
        ACTIVATION,
        BACKWARD,
        BIAS_OF_ROWS,
        WIDE,
    )


@triton.jit(do_not_specialize=["rows", "columns"])
def column_sums_kernel(partials, sums, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """``sums[column]`` of the fp32 ``partials[rows, columns]``."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        acc += tl.load(partials + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(sums + column, tl.sum(acc, axis=0), mask=column < columns)

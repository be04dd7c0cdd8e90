"""Matrix products in Triton: ``gemm`` and ``gemm_accumulate_`` for a GPU that has no CUDA kernel of this package.

The result is cut into tiles of BLOCK_M x BLOCK_N elements, and one program, a group of 128 or 256 threads, computes one tile. It walks
along K in steps of BLOCK_K. A step loads some columns of a and as many rows of b, multiplies them on the Tensor Cores and adds the
products to fp32 sums, which stay in the threads' registers; Triton loads the operands of the next steps meanwhile. After the last step
the program finishes the sums where they are: it adds the bias, applies the activation, adds the residual, rounds each value once and
stores it. No sum leaves the chip before it is finished.

torch's product does the same work in less time, so the policy takes this kernel where its order of sums is wanted: one program adds
the terms of an element in the order of K, so the bits depend on nothing else (``batch_invariant``, deterministic algorithms). The other
products (grouped, symmetric, of several matrices, gradients of activations) are torch's and this op's, in ``amp_kernels/_aten``.

The tiles are two fixed ones. A search for each shape would pay where the kernel is the fastest one, and timing at run time would make
bits depend on noise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._checks.activations import GATED
from .._raw._product import output_shape
from .._raw.gemm import gemm_accumulate_op, gemm_op
from ._activations import activate
from ._tables import on
from .activation_forward import activation_forward

# Rows of tiles that are computed together: their programs run at one time and find the same columns of b in the L2 cache.
_GROUP: tl.constexpr = tl.constexpr(8)


@triton.jit
def _elements(matrix, strides, batch, rows, columns):
    """Addresses of a tile. Offsets have 64 bits, since a language model's head has more than 2^31 elements. A stride of 1 is a constant
    of the compiled kernel, as Triton has it, so the contiguous dimension of each matrix is known and accesses are 16 bytes wide."""
    rows, columns = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    return matrix + (batch.to(tl.int64) * strides[0] + rows * strides[1] + columns * strides[2])


@triton.jit
def gemm_kernel(
    a,  # [batches, M, K]
    b,  # [batches, K, N]
    c,  # [batches, M, N], like bias and residual, which may be None
    bias,
    residual,
    alpha,
    beta,
    M,
    N,
    K,
    strides_a,  # of the batch, the rows and the columns; so are the others
    strides_b,
    strides_c,
    strides_bias,  # 0 where the bias is one for all
    strides_residual,
    ACTIVATION: tl.constexpr,
    CHAINED: tl.constexpr,  # the sums start from the residual
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``c = activation(alpha * a @ b + bias) + beta * residual``."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    batch = program // (tiles_m * tiles_n)
    tile = program % (tiles_m * tiles_n)
    first = tile // (_GROUP * tiles_n) * _GROUP
    height = tl.minimum(tiles_m - first, _GROUP)
    within = tile % (_GROUP * tiles_n)
    rows = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (columns < N)[None, :]

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if CHAINED:
        acc = tl.load(_elements(residual, strides_residual, batch, rows, columns), mask=inside, other=0.0)
    ks = tl.arange(0, BLOCK_K)
    a_tile = _elements(a, strides_a, batch, rows, ks)
    b_tile = _elements(b, strides_b, batch, ks, columns)
    # At least one step, of zeros if K is 0: with a path around the loop, ptxas would wait after every wgmma (test_one_wait_a_step).
    for k in range(0, tl.maximum(K, 1), BLOCK_K):
        # Elements outside are zero in both operands: zero times a NaN from beyond K would be NaN.
        a_part = tl.load(a_tile, mask=(rows < M)[:, None] & (ks < K - k)[None, :], other=0.0)
        b_part = tl.load(b_tile, mask=(ks < K - k)[:, None] & (columns < N)[None, :], other=0.0)
        acc = tl.dot(a_part, b_part, acc)
        a_tile += tl.cast(strides_a[2], tl.int64) * BLOCK_K
        b_tile += tl.cast(strides_b[1], tl.int64) * BLOCK_K

    y = acc * alpha
    if bias is not None:
        y += tl.load(_elements(bias, strides_bias, batch, rows, columns), mask=inside, other=0.0).to(tl.float32)
    y = activate(y, ACTIVATION)
    if residual is not None and not CHAINED:
        r = tl.load(_elements(residual, strides_residual, batch, rows, columns), mask=inside, other=0.0)
        y = tl.fma(r.to(tl.float32), beta, y)
    tl.store(_elements(c, strides_c, batch, rows, columns), y.to(c.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    """Rows, columns and terms of a step; warps of 32 threads; steps in flight."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Shared memory holds (m + n) * k * 2 bytes a stage: 96 and 64 KiB, which the smallest chips (99 KiB, compute capability 8.6) have, too. A
# tile of 128 has 8 warps: with 4, Triton has been seen to miscompile it on Hopper. A step divides 64 terms, so that sums which start from
# C at multiples of 64 have the bits of one call.
LARGE, SMALL = Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 8, 4)
_PROGRAMS = 100  # as many large tiles leave few multiprocessors of a large chip without one


def tile_of(m: int, n: int, k: int, batch: int, batch_invariant: bool) -> Tile:
    """The small tile for narrow results, for few large tiles, and for lines that do not begin at 16 bytes: each of their elements has an
    address in registers, and a large tile has too many. ``batch_invariant``: by columns and terms alone."""
    if n <= SMALL.n or n % 16 or k % 16:
        return SMALL
    many = batch * triton.cdiv(m, LARGE.m) * triton.cdiv(n, LARGE.n) >= _PROGRAMS
    return LARGE if batch_invariant or many else SMALL


@gemm_op.bound
def gemm(call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype = call.out_dtype or call.a.dtype
    residual = None if call.beta == 0 else call.residual
    # Two values of one result, and two results of one value, are a second pass over the fp32 pre-activation.
    in_one = not call.preact and call.activation not in GATED
    shape = output_shape(call.a, call.b, "none")
    out = torch.empty(shape, dtype=dtype if in_one else torch.float32, device=call.a.device)
    options = {"alpha": call.alpha, "batch_invariant": call.batch_invariant}
    if in_one:
        run(out, call.a, call.b, call.bias, residual, activation=call.activation, beta=call.beta, **options)
        return out, None
    run(out, call.a, call.b, call.bias, **options)
    y = activation_forward(out, activation=call.activation)
    if residual is not None:
        y = torch.add(y, residual, alpha=call.beta)
    return y.to(dtype), out.to(dtype) if call.preact else None


@gemm_accumulate_op.bound
def gemm_accumulate_(call: Any) -> None:
    residual = None if call.beta == 0 else call.c
    options = {"alpha": call.alpha, "beta": call.beta, "batch_invariant": call.batch_invariant}
    chained = call.batch_invariant and call.alpha == call.beta == 1
    run(call.c, call.a, call.b, residual=residual, chained=chained, **options)


def run(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: str = "none",
    alpha: float = 1.0,
    beta: float = 1.0,
    batch_invariant: bool = False,
    chained: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes ``c``, of any strides without overlap; the arguments are those of the op ``gemm`` and have been checked.

    Args:
        residual: may be ``c`` itself.
        chained: the sums start from ``residual``, which is not added at the end.
        tile: replaces the choice of :func:`tile_of`, for tests.
    """
    if c.numel() == 0:
        return
    a, b, c, residual = (t if t is None or t.ndim == 3 else t.unsqueeze(0) for t in (a, b, c, residual))
    bias = None if bias is None else bias.expand(c.shape)
    (batch, m, n), k = c.shape, a.shape[2]
    tile = tile or tile_of(m, n, k, batch, batch_invariant)
    matrices = (a, b, c, bias, residual)
    with on(c.device):
        gemm_kernel[(batch * triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)](
            *matrices,
            *(float(alpha), float(beta), m, n, k),
            *((0, 0, 0) if t is None else t.stride() for t in matrices),
            ACTIVATION=activation,
            CHAINED=chained,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )

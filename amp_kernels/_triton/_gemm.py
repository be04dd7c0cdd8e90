"""Host side of the Triton GEMM: strides and alignments of the operands, the configuration, TMA descriptors, the launch."""

from __future__ import annotations

import math

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .._autotune import GemmConfig, gemm_config
from ._gemm_kernel import gemm_kernel

_INT32 = 2**31
_INVARIANT_ROWS = 4096


def product32(a: torch.Tensor, b: torch.Tensor, batch_invariant: bool) -> torch.Tensor:
    """``a @ b`` in fp32, for epilogues that the kernel does not have: torch's own operations finish it in fp32."""
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32, device=a.device)
    run(out, a, b, batch_invariant=batch_invariant)
    return out


def run(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    preact: torch.Tensor | None = None,
    *,
    activation: str = "none",
    alpha: float | None = None,
    beta: float | None = None,
    batch_invariant: bool = False,
    config: GemmConfig | None = None,
) -> None:
    """``c = activation(alpha * a @ b + bias) + beta * c``; the arguments are checked by the ops.

    Args:
        c: ``[M, N]`` or ``[B, M, N]``, any strides without overlap.
        a, b, bias: as the op ``gemm`` takes them.
        preact: takes the value before the activation; dtype and strides of ``c``.
        alpha: ``None`` is 1.
        beta: ``None`` is 0: ``c`` is not read.
        batch_invariant: choose the configuration as for a fixed number of rows, and by alignments that N and K decide.
        config: replaces the choice of ``_autotune``; tests run every configuration with it.
    """
    a, b, c3 = (t if t.ndim == 3 else t.unsqueeze(0) for t in (a, b, c))
    batch, m, n, k = *c3.shape, a.shape[2]
    if c.numel() == 0:
        return
    a_column_major, vec_a = _order(a)
    b_column_major, vec_b = _order(b)
    c_column_major, vec_c = _order(c3)
    if preact is not None:  # shares the hints of c
        vec_c = min(vec_c, _order(preact.view_as(c3))[1])
    if config is None:
        config = gemm_config(
            _INVARIANT_ROWS if batch_invariant else m,
            n,
            k,
            batch=1 if batch_invariant else batch,
            out_bytes=c.element_size() * (1 + (preact is not None or beta is not None)),
            capability=torch.cuda.get_device_capability(c.device) if c.is_cuda else (8, 0),
            vec=math.gcd(8, n, k) if batch_invariant else min(vec_a, vec_b),
            full_epilogue=preact is not None or beta is not None or activation not in ("none", "relu"),
        )
    a_box, b_box = (config.block_m, config.block_k), (config.block_k, config.block_n)
    c_box = (config.block_m, config.block_n)
    tma = config.tma and _fits_tma(a, a_column_major) and _fits_tma(b, b_column_major)
    grid = batch * triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    with torch.cuda.device(c.device if c.is_cuda else -1):
        gemm_kernel[(grid,)](
            _descriptor(a, a_column_major, a_box) if tma else a,
            _descriptor(b, b_column_major, b_box) if tma else b,
            c,
            bias,
            preact,
            alpha,
            beta,
            m,
            n,
            k,
            *a.stride(),
            *b.stride(),
            *c3.stride(),
            0 if bias is None else bias.stride(0),
            ACTIVATION=activation,
            A_COLUMN_MAJOR=a_column_major,
            B_COLUMN_MAJOR=b_column_major,
            C_COLUMN_MAJOR=c_column_major,
            VEC_A=vec_a,
            VEC_B=vec_b,
            VEC_C=vec_c,
            WIDE=not (_spans_int32(a, a_box) and _spans_int32(b, b_box) and _spans_int32(c3, c_box)),
            TMA=tma,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=False,
        )


def _order(t: torch.Tensor) -> tuple[bool, int]:
    """Whether rows are the contiguous dimension of ``t[batch, row, column]``, and how many elements an access may take.

    That number is a power of two of at most 16 bytes. It divides the extent of the contiguous dimension, the other strides and the
    address, so that no group of as many elements crosses an edge of the matrix or an alignment boundary.
    """
    batch, rows, columns = t.shape
    batch_stride, row_stride, column_stride = t.stride()
    column_major = row_stride == 1 and (column_stride != 1 or columns == 1)
    if column_major:
        contiguous, extent, outer, outer_stride = row_stride, rows, columns, column_stride
    else:
        contiguous, extent, outer, outer_stride = column_stride, columns, rows, row_stride
    if contiguous != 1:
        return column_major, 1
    steps = [stride for size, stride in ((outer, outer_stride), (batch, batch_stride)) if size > 1]
    return column_major, math.gcd(16 // t.element_size(), extent, t.data_ptr() // t.element_size(), *steps)


def _fits_tma(t: torch.Tensor, column_major: bool) -> bool:
    """Whether a TMA descriptor can describe ``t[batch, row, column]``: 16-byte aligned, no overlap, coordinates of 32 bits."""
    batch, outer, inner = t.mT.shape if column_major else t.shape
    batch_stride, outer_stride, inner_stride = t.mT.stride() if column_major else t.stride()
    vec = 16 // t.element_size()
    return (
        inner_stride == 1
        and t.data_ptr() % 16 == 0
        and outer_stride % vec == 0
        and batch_stride % vec == 0
        and outer_stride >= inner > 0
        and (batch == 1 or batch_stride > 0)
        and max(batch, outer, inner) < _INT32 - 256
        and max(batch_stride, outer_stride) * t.element_size() < 2**40
    )


def _descriptor(t: torch.Tensor, column_major: bool, box: tuple[int, int]) -> TensorDescriptor:
    """Describes ``t[batch, row, column]`` with the contiguous dimension last; ``box`` is a tile's rows and columns."""
    if column_major:
        t, box = t.mT, box[::-1]
    batch_stride = t.stride(0) if t.shape[0] > 1 else t.shape[1] * t.stride(1)
    return TensorDescriptor(t, list(t.shape), [batch_stride, t.stride(1), 1], [1, *box])


def _spans_int32(t: torch.Tensor, box: tuple[int, int]) -> bool:
    return box[0] * t.stride(1) + box[1] * t.stride(2) < _INT32

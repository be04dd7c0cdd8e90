"""The GEMM ops in Triton: strides and alignments of the operands, the configuration, TMA descriptors, the launches."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .._checks.activations import GATED
from .._raw._product import check_gemm, output_shape
from .._raw.gemm import check_accumulate, check_dact, gemm_accumulate_op, gemm_dact_op, gemm_op
from ._autotune import GemmConfig, gemm_config, loads_by_tma
from ._gemm_epilogue import column_sums_kernel, finish_kernel
from ._gemm_kernel import gemm_kernel

_INT32 = 2**31
_FINISH_BLOCK = (16, 128)  # of finish_kernel, with 4 warps: 16 sums a thread, loaded 16 bytes at a time
_SUMS_BLOCK = (32, 32)
_kept = functools.lru_cache(maxsize=4096)  # by the layout of the tensors: a training step repeats its calls


@gemm_op.bound
def gemm(call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_gemm(call.a, call.b, call.bias, call.residual, call.activation, call.out_dtype)
    shape, dtype = output_shape(call.a, call.b, call.activation), call.out_dtype or call.a.dtype
    c = torch.empty(shape, dtype=dtype, device=call.a.device)
    z = c.new_empty(output_shape(call.a, call.b, "none")) if call.preact else None
    options = {name: getattr(call, name) for name in ("activation", "alpha", "beta", "batch_invariant")}
    run(c, call.a, call.b, call.bias, z, call.residual, **options)
    return c, z


@gemm_dact_op.bound
def gemm_dact(call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_dact(call.a, call.b, call.preact, call.activation, call.out_dtype)
    dz = torch.empty_like(call.preact, dtype=call.out_dtype or call.a.dtype, memory_format=torch.contiguous_format)
    sums = dz.new_empty(dz.shape[-1], dtype=torch.float32) if call.bias_grad else None
    options = {"activation": call.activation, "backward": True, "sums": sums, "batch_invariant": call.batch_invariant}
    run(dz, call.a, call.b, preact=call.preact, **options)
    return dz, sums


@gemm_accumulate_op.bound
def gemm_accumulate_(call: Any) -> None:
    check_accumulate(call.c, call.a, call.b)
    options = {name: getattr(call, name) for name in ("alpha", "beta", "batch_invariant")}
    chained = call.batch_invariant and call.alpha == 1 and call.beta == 1
    run(call.c, call.a, call.b, residual=call.c, **options, chained=chained)


def run(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    preact: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: str = "none",
    backward: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    sums: torch.Tensor | None = None,
    batch_invariant: bool = False,
    chained: bool = False,
    config: GemmConfig | None = None,
) -> None:
    """``c = activation(alpha * a @ b + bias) + beta * residual``; the arguments have been checked.

    Args:
        c: ``[M, N]`` or ``[B, M, N]``, any strides without overlap.
        a, b, bias: as the op ``gemm`` takes them.
        preact: takes the value before the activation; any strides without overlap.
        residual: the shape of ``c``; may be ``c`` itself. With ``beta`` 0 it is not read.
        backward: ``c = (a @ b) * activation'(preact)``, as the op ``gemm_dact`` has it: ``preact`` is read.
        sums: with ``backward``, takes the fp32 sums of the unrounded ``c`` over all rows and batches.
        batch_invariant: choose the configuration by N, the dtypes and the layout alone.
        chained: the sums start from ``residual``, which is not added at the end.
        config: replaces the choice of ``_autotune``; tests run every configuration with it.
    """
    gated = activation in GATED and not backward
    a, b, c = (_batched(t) for t in (a, b, c))
    batch, m, k = a.shape
    n = b.shape[2] // 2 if gated else b.shape[2]
    if c.numel() == 0:
        if sums is not None:
            sums.zero_()
        return
    if backward and activation == "none":
        preact = None
    if beta == 0:
        residual = None
    preact, residual = (None if t is None else _batched(t) for t in (preact, residual))
    # A row-major b of swiglu has its up values in its second half, which TMA can read if it begins at 16 bytes.
    tma = not gated or n % 8 == 0 or _order(_layout(b))[0]
    if config is None:
        capability = torch.cuda.get_device_capability(c.device) if c.is_cuda else (8, 0)
        layouts = (_layout(c), _layout(a), _layout(b), _layout(preact), None if chained else _layout(residual))
        config = _choose(capability, *layouts, n, activation, backward, batch_invariant, tma)
    if not tma:
        config = replace(config, tma=False)
    if config.tma:
        a, b = _for_tma(a, k), _for_tma(b, n)

    k_split = max(1, triton.cdiv(k, config.splits * config.block_k)) * config.block_k
    splits = max(1, triton.cdiv(k, k_split))  # recounted: the last ones might be left without terms
    results = (_layout(c), _layout(preact), _layout(residual))
    finish_m = _FINISH_BLOCK[0] if splits > 1 else config.block_m
    row_sums = None
    if sums is not None:
        row_sums = torch.empty(batch * triton.cdiv(m, finish_m), sums.shape[0], dtype=torch.float32, device=c.device)
    epilogue = _epilogue(bias, preact, residual, row_sums, float(alpha), float(beta), activation, backward)
    with torch.cuda.device(c.device if c.is_cuda else -1):
        if splits == 1:
            _launch(config, a, b, c, results, epilogue, n, k_split, chained)
        else:
            _launch_split(config, a, b, c, results, epilogue, n, k_split, splits)
        if sums is not None:
            rows, columns = row_sums.shape
            column_sums_kernel[(triton.cdiv(columns, _SUMS_BLOCK[1]),)](row_sums, sums, rows, columns, *_SUMS_BLOCK)


def _epilogue(
    bias=None, preact=None, residual=None, sums=None, alpha=1.0, beta=1.0, activation="none", backward=False
) -> dict[str, object]:
    """The arguments of both kernels that describe the epilogue; the defaults store the plain sums."""
    return {
        "bias": bias,
        "preact": preact,
        "residual": residual,
        "sums": sums,
        "alpha": alpha,
        "beta": beta,
        "stride_bias": 0 if bias is None else bias.stride(0),
        "ACTIVATION": activation,
        "BACKWARD": backward,
        "BIAS_OF_ROWS": bias is not None and bias.ndim == 2,
    }


def _batched(t: torch.Tensor) -> torch.Tensor:
    return t if t.ndim == 3 else t.unsqueeze(0)


class _Layout(NamedTuple):
    """Layout of ``t[batch, row, column]`` in memory; launches depend on it and on the address, and are cached by it."""

    shape: tuple[int, int, int]
    stride: tuple[int, int, int]
    size: int  # bytes of an element
    address: int  # modulo 16


def _layout(t: torch.Tensor | None) -> _Layout | None:
    return None if t is None else _Layout(t.shape, t.stride(), t.element_size(), t.data_ptr() % 16)


@_kept
def _choose(capability, c, a, b, preact, residual, n, activation, backward, batch_invariant, tma) -> GemmConfig:
    """The configuration of a call; tensors as they are laid out."""
    batch, m, k = a.shape
    of_a = (
        0 if _Matrix(a, k).column_major else k
    )  # rows that are not adjacent in memory may be as many as the batch has
    vec = math.gcd(8, n, of_a) if batch_invariant else min(_Matrix(a, k).vec, _Matrix(b, n).vec)
    if tma and loads_by_tma(capability):
        vec = 8
    return gemm_config(
        m,
        n,
        k,
        batch=batch,
        out_bytes=sum(t.shape[2] // n * t.size for t in (c, preact, residual) if t is not None),
        capability=capability,
        vec=vec,
        full_epilogue=preact is not None or residual is not None or activation not in ("none", "relu"),
        gated=activation in GATED,
        backward=backward,
        batch_invariant=batch_invariant,
    )


class _Matrix:
    """The properties of ``t[batch, row, column]`` that the kernels depend on. It has ``n`` or 2 n columns, read n at a time.

    ``column_major``: rows are the contiguous dimension. ``vec``: how many elements an access may take (:func:`_order`).
    """

    def __init__(self, layout: _Layout | None, n: int):
        self.column_major, self.vec, self.stride = False, 1, (0, 0, 0)
        if layout is None:
            return
        batch, rows, columns = layout.shape
        self.stride = layout.stride
        self.column_major, self.vec = _order(layout._replace(shape=(batch, rows, n)))
        if columns > n:
            second = (layout.address + n * layout.stride[2] * layout.size) % 16
            self.vec = min(self.vec, _order(layout._replace(shape=(batch, rows, columns - n), address=second))[1])

    def fits_int32(self, box: tuple[int, int]) -> bool:
        """True if offsets within a tile fit 32 bits."""
        return box[0] * self.stride[1] + box[1] * self.stride[2] < _INT32


@_kept
def _described(
    results: tuple[_Layout | None, _Layout | None, _Layout | None], n: int, box: tuple[int, int]
) -> dict[str, object]:
    """The arguments of both kernels that describe result, pre-activation and residual."""
    matrices = [_Matrix(layout, n) for layout in results]
    described: dict[str, object] = {"WIDE": not all(matrix.fits_int32(box) for matrix in matrices)}
    for name, matrix in zip("czr", matrices, strict=True):
        described |= {f"stride_{name}{dim}": stride for dim, stride in zip("bmn", matrix.stride, strict=True)}
        described |= {f"{name.upper()}_COLUMN_MAJOR": matrix.column_major, f"VEC_{name.upper()}": matrix.vec}
    return described


@_kept
def _arguments(
    config: GemmConfig,
    a: _Layout,
    b: _Layout,
    results: tuple[_Layout | None, _Layout | None, _Layout | None],
    n: int,
    k_split: int,
) -> tuple[tuple[int], dict[str, object]]:
    """Grid and arguments of gemm_kernel that follow from the layout of the tensors."""
    batch, m, k = a.shape
    first, second = _Matrix(a, k), _Matrix(b, n)
    a_box, b_box = (config.block_m, config.block_k), (config.block_k, config.block_n)
    described = dict(_described(results, n, (config.block_m, config.block_n)))
    described["WIDE"] |= not (first.fits_int32(a_box) and second.fits_int32(b_box))
    grid = batch * max(1, triton.cdiv(k, k_split)) * triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    return (grid,), {
        "M": m,
        "N": n,
        "K": k,
        "k_split": k_split,
        "batches": batch,
        **{f"stride_a{dim}": stride for dim, stride in zip("bmk", first.stride, strict=True)},
        **{f"stride_b{dim}": stride for dim, stride in zip("bkn", second.stride, strict=True)},
        **described,
        "A_COLUMN_MAJOR": first.column_major,
        "B_COLUMN_MAJOR": second.column_major,
        "VEC_A": first.vec,
        "VEC_B": second.vec,
        "TMA": config.tma and _fits_tma(a, first.column_major) and _fits_tma(b, second.column_major),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": False,
    }


def _launch(
    config: GemmConfig,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    results: tuple[_Layout | None, _Layout | None, _Layout | None],
    epilogue: dict[str, object],
    n: int,
    k_split: int,
    chained: bool = False,
) -> None:
    """One program for each tile of n columns and each split of ``k_split`` terms."""
    grid, arguments = _arguments(config, _layout(a), _layout(b), results, n, k_split)
    if arguments["TMA"]:
        a = _descriptor(a, arguments["A_COLUMN_MAJOR"], (config.block_m, config.block_k))
        b = _descriptor(b, arguments["B_COLUMN_MAJOR"], (config.block_k, config.block_n))
    gemm_kernel[grid](a, b, c, **epilogue, **arguments, CHAINED=chained)


def _launch_split(config, a, b, c, results, epilogue, n: int, k_split: int, splits: int) -> None:
    """The product in ``splits`` parts of K, whose sums a second kernel adds in order before its epilogue."""
    batch, m, columns = c.shape[0], a.shape[1], b.shape[2]
    partials = torch.empty(splits * batch, m, columns, dtype=torch.float32, device=c.device)
    _launch(config, a, b, partials, (_layout(partials), None, None), _epilogue(), columns, k_split)
    block_m, block_n = _FINISH_BLOCK
    finish_kernel[(batch * triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        partials,
        c,
        M=m,
        N=n,
        batches=batch,
        splits=splits,
        VEC_P=math.gcd(4, n),
        **epilogue,
        **_described(results, n, _FINISH_BLOCK),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _order(t: _Layout) -> tuple[bool, int]:
    """True if rows are the contiguous dimension of ``t[batch, row, column]``, and how many elements an access may take.

    That number is a power of two of at most 16 bytes. It divides the extent of the contiguous dimension, the other strides and the
    address, so that no group of as many elements crosses an edge of the matrix or an alignment boundary.
    """
    batch, rows, columns = t.shape
    batch_stride, row_stride, column_stride = t.stride
    column_major = row_stride == 1 and (column_stride != 1 or columns == 1)
    if column_major:
        contiguous, extent, outer, outer_stride = row_stride, rows, columns, column_stride
    else:
        contiguous, extent, outer, outer_stride = column_stride, columns, rows, row_stride
    if contiguous != 1:
        return column_major, 1
    steps = [stride for size, stride in ((outer, outer_stride), (batch, batch_stride)) if size > 1]
    return column_major, math.gcd(16 // t.size, extent, t.address // t.size, *steps)


def _fits_tma(t: _Layout, column_major: bool) -> bool:
    """True if a TMA descriptor can describe ``t[batch, row, column]``: 16-byte aligned, no overlap, coordinates of 32 bits."""
    (batch, outer, inner), (batch_stride, outer_stride, inner_stride) = t.shape, t.stride
    if column_major:
        outer, inner, outer_stride, inner_stride = inner, outer, inner_stride, outer_stride
    vec = 16 // t.size
    return (
        inner_stride == 1
        and t.address == 0
        and outer_stride % vec == 0
        and batch_stride % vec == 0
        and outer_stride >= inner > 0
        and outer > 0
        and (batch == 1 or batch_stride > 0)
        and max(batch, outer, inner) < _INT32 - 256
        and max(batch_stride, outer_stride) * t.size < 2**40
    )


@_kept
def _tma_order(t: _Layout, n: int) -> tuple[bool, bool]:
    column_major = _Matrix(t, n).column_major
    return column_major, _fits_tma(t, column_major)


def _for_tma(t: torch.Tensor, n: int) -> torch.Tensor:
    """``t``, or a copy in the same order whose lines begin at multiples of 16 bytes, long ones at lines of L2 (gemm_repack_pitch in
    csrc/gemm/sm90/repack.h): loads of 2 bytes cannot be asynchronous, and a tile is read once for each tile of the other operand. Nothing
    reads the padding."""
    column_major, fits = _tma_order(_layout(t), n)
    if fits or t.numel() == 0:
        return t
    lines = t.mT if column_major else t
    width = lines.shape[2]
    copy = t.new_empty(*lines.shape[:2], width + -width % (64 if width >= 512 else 8))[..., :width].copy_(lines)
    return copy.mT if column_major else copy


def _descriptor(t: torch.Tensor, column_major: bool, box: tuple[int, int]) -> TensorDescriptor:
    """Describes ``t[batch, row, column]`` with the contiguous dimension last; ``box`` is a tile's rows and columns."""
    if column_major:
        t, box = t.mT, box[::-1]
    batch_stride = t.stride(0) if t.shape[0] > 1 else t.shape[1] * t.stride(1)
    return TensorDescriptor(t, list(t.shape), [batch_stride, t.stride(1), 1], [1, *box])

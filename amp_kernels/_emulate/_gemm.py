"""The GEMM kernels (``csrc/kernels/gemm_sm90``, ``gemm_sm80``) on CPU tensors, as ``csrc/tuning/gemm.h`` chooses them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _emulator
from . import DTYPE_CODES, Memory

#: Of the GPU that is emulated, 10 major + minor: from 80 on.
CAPABILITY = 90

Values = tuple[int, int, tuple[int, int, int]]


class Places(Memory):
    """Tensors with any strides."""

    def matrix(self, name: str, tensor: Tensor | None, initialised: bool = True) -> Values | None:
        """Address, dtype and strides (batch, row, column) of ``[M, N]`` or ``[B, M, N]``; ``None`` without elements."""
        if tensor is None or tensor.numel() == 0:
            return None
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.pieces.append((name, tensor.data_ptr(), (last + 1) * tensor.element_size(), initialised))
        batch = tensor.stride(0) if tensor.ndim == 3 and tensor.shape[0] > 1 else 0
        return tensor.data_ptr(), DTYPE_CODES[tensor.dtype], (batch, tensor.stride(-2), tensor.stride(-1))


def _operand(tensor: Tensor, k_dim: int) -> Tensor:
    """``tensor`` as a kernel takes it: with a k, and contiguous along one of its two dimensions, in lines of their own."""
    if tensor.shape[k_dim] == 0:  # 8 zeros give the same sums as none
        shape = list(tensor.shape)
        shape[k_dim] = 8
        return tensor.new_zeros(shape)
    along = [d for d in (-2, -1) if tensor.stride(d) == 1 or tensor.shape[d] == 1]
    if all(tensor.shape[-3 - d] > 1 and tensor.stride(-3 - d) < tensor.shape[d] for d in along):
        return tensor.contiguous()
    return tensor


def run(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    accumulate: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str = "none",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    z: Tensor | None = None,
    preact: Tensor | None = None,
    sums: Tensor | None = None,
    batch_invariant: bool = False,
) -> dict[str, Any] | None:
    """Fills ``c``, and ``z`` and ``sums`` where they are given; returns the plan, ``None`` if there was nothing to do."""
    size = (a.shape[-2], b.shape[-1], a.shape[0] if a.ndim == 3 else 1)
    if 0 in size:
        if sums is not None:
            sums.zero_()
        return None
    a, b = _operand(a, -1), _operand(b, -2)
    places = Places()
    if bias is not None:
        bias = bias[None] if bias.ndim == 1 else bias
        column = bias.shape[0] == size[0] and bias.shape[1] == 1 and size[1] != 1
        bias = bias.expand(size[:2]) if column else bias.expand(size[0], -1)
    reads = {"bias": bias, "residual": residual if beta != 0 else None, "preact": preact}
    of = {name: places.matrix(name, tensor) for name, tensor in {"a": a, "b": b, **reads}.items()}
    reads_c = accumulate or (residual is not None and residual.data_ptr() == c.data_ptr())
    to_c, to_z = places.matrix("c", c, reads_c), places.matrix("z", z, False)
    to_sums = places.add("sums", sums, False)
    return _emulator.gemm(
        places.pieces,
        (size[0], size[1], a.shape[-1], size[2]),
        of["a"],
        of["b"],
        to_c,
        accumulate,
        alpha,
        beta,
        activation,
        of["bias"],
        of["residual"],
        to_z,
        of["preact"],
        to_sums,
        batch_invariant,
        CAPABILITY,
    )


def output(a: Tensor, columns: int, dtype: torch.dtype | None) -> Tensor:
    """An uninitialised ``[..., M, columns]``."""
    return a.new_empty((*a.shape[:-1], columns), dtype=dtype or a.dtype)

"""The grouped GEMM ops over torch's products.

``torch._grouped_mm`` multiplies all groups in one call, by ends that stay on the device. On a GPU it takes BF16 alone, with lines of 16
bytes. FP16, other lines, FP32 results and sums in a fixed order take a product for each group, for which the host reads the ends: it
waits for the device, and a CUDA graph cannot capture the call.
"""

from __future__ import annotations

from typing import Any

import torch

from .._checks.activations import activated_width
from .._dispatch import policy
from .._dispatch.library import is_traced
from .._raw import activation_forward
from .._raw.grouped_gemm import clamped_ends, grouped_gemm_accumulate_op, grouped_gemm_op
from .gemm import products


@grouped_gemm_op.bound
def grouped_gemm(call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if is_traced(call.a):  # the program asks again when it runs and the ends are known
        return grouped_gemm_op.overload(**call._asdict())
    if call.b.ndim == 2:
        return (_sums_in_one_call if _fits_one_call(call) else _sums)(call), None
    if not _fits_one_call(call):
        return _rows(call)
    z = _rows_in_one_call(call)
    if call.activation != "none":
        return activation_forward.op(z, activation=call.activation), z if call.preact else None
    return (z.clone(), z) if call.preact else (z, None)


@grouped_gemm_accumulate_op.bound
def grouped_gemm_accumulate_(call: Any) -> None:
    if is_traced(call.a):
        return grouped_gemm_accumulate_op.overload(**call._asdict())
    _, accumulate = products(call.batch_invariant)
    options = {"beta": float(not call.overwrite), "batch_invariant": call.batch_invariant}
    for g, terms in enumerate(_ranges(call.offs, call.a.shape[1])):
        if call.overwrite or terms.start < terms.stop:  # else the memory of an empty group stays
            accumulate(call.c[g], call.a[:, terms], call.b[terms], **options)
    return None


def _ranges(offs: torch.Tensor, total: int) -> list[slice]:
    ends = clamped_ends(offs, total).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _rows(call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    a, b, bias = call.a, call.b, call.bias
    multiply, _ = products(call.batch_invariant)
    options = {name: getattr(call, name) for name in ("activation", "out_dtype", "batch_invariant", "preact")}
    ranges = _ranges(call.offs, a.shape[0])
    biases = [bias if bias is None or bias.ndim == 1 else bias[g] for g in range(len(ranges))]
    parts = [multiply(a[rows], b[g], biases[g], **options) for g, rows in enumerate(ranges)]
    past = a.new_zeros(a.shape[0] - (ranges[-1].stop if ranges else 0), b.shape[2], dtype=call.out_dtype or a.dtype)
    out = torch.cat([*(y for y, _ in parts), past[:, : activated_width(call.activation, b.shape[2])]])
    return out, torch.cat([*(z for _, z in parts), past]) if call.preact else None


def _sums(call: Any) -> torch.Tensor:
    a, b = call.a, call.b
    multiply, _ = products(call.batch_invariant)
    options = {"out_dtype": call.out_dtype, "batch_invariant": call.batch_invariant}
    sums = [multiply(a[:, terms], b[terms], **options)[0] for terms in _ranges(call.offs, a.shape[1])]
    return torch.stack(sums) if sums else a.new_empty(0, a.shape[0], b.shape[1], dtype=call.out_dtype or a.dtype)


def _fits_one_call(call: Any) -> bool:
    a, b = call.a, call.b
    if a.dtype != torch.bfloat16 or call.out_dtype not in (None, a.dtype) or policy.fixes_order(call._asdict()):
        return False
    if not (a.numel() and b.numel()) or (a.is_cuda and policy.capability_of("cuda", a.device.index) < (8, 0)):
        return False
    if b.ndim == 2:  # groups begin at any term, so the terms must be lines
        return call.offs.shape[0] > 0 and _is_aligned(a.mT) and _is_aligned(b)
    return _is_aligned(a) and b.shape[2] % 8 == 0 and (_is_aligned(b) or _is_aligned(b.mT))


def _is_aligned(t: torch.Tensor) -> bool:
    """True if each line of ``t`` is contiguous and begins and ends at 16 bytes."""
    *outer, inner = t.stride()
    return inner == 1 and t.data_ptr() % 16 == 0 and all(size % 8 == 0 for size in (t.shape[-1], *outer))


def _rows_in_one_call(call: Any) -> torch.Tensor:
    """The pre-activation."""
    a, bias = call.a, call.bias
    ends = clamped_ends(call.offs, a.shape[0])
    z = torch._grouped_mm(a, call.b, offs=ends)
    row = torch.arange(a.shape[0], dtype=ends.dtype, device=ends.device)
    if bias is not None:
        if bias.ndim == 2:
            bias = bias[torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)]
        z = (z + bias).to(z.dtype)
    return torch.where((row < ends[-1])[:, None], z, 0)  # torch leaves rows past the last end as they were


def _sums_in_one_call(call: Any) -> torch.Tensor:
    ends = clamped_ends(call.offs, call.a.shape[1])
    sums = torch._grouped_mm(call.a, call.b, offs=ends)
    filled = ends > torch.cat([ends.new_zeros(1), ends])[:-1]
    return torch.where(filled[:, None, None], sums, 0)  # torch does not say what it writes for an empty group

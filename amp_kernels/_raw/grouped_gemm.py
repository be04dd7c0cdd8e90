"""Grouped GEMMs of fp16 or bf16 operands, as the experts of a mixture need them: the groups' sizes are on the device.

``offs`` holds the exclusive end of each group, int32 ``[G]``; group g is ``[offs[g - 1], offs[g])``. Sizes are arbitrary, also 0. With
``a`` and ``b`` of these shapes:

- ``[T, K]`` and ``[G, K, N]``: rows of ``a`` in group g times ``b[g]``, ``[T, N]``. Rows past the last end are zero.
- ``[M, T]`` and ``[T, N]``: for each group the product over its terms, ``[G, M, N]``. An empty group's is zero.

``grouped_gemm`` computes both, the first one with bias and activation as ``gemm`` has them. ``grouped_gemm_accumulate_`` adds the second
one to an fp32 ``c``, and leaves the memory of empty groups untouched. Numerics are those of ``gemm``.

An element outside a group, NaN or not, reaches no result of that group; elements past the last end reach none. A kernel clamps each end
to ``[previous end, T]``, so it touches nothing outside of its tensors. The host reads no end, except for
torch's products (``amp_kernels/_aten``); the CPU kernel refuses bad ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._checks.activations import ACTIVATIONS, check_activation, check_gated_width
from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES
from .._checks.operands import check_no_internal_overlap, check_out_dtype, check_tensor
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from ._product import check_half_dtypes, finished, preactivation, product32, product_flops

# ---- checks


def check_offs(op: str, offs: torch.Tensor, groups: int | None) -> None:
    """``groups``: how many there must be; ``None`` if ``offs`` alone says it."""
    check_tensor(op, "offs", offs, (torch.int32,))
    if offs.ndim != 1 or groups not in (None, offs.shape[0]):
        accepted = "[G], one end per group" if groups is None else f"[{groups}], one end per group"
        raise ValueError(f"{op}: offs has shape {list(offs.shape)}; accepted: {accepted}")


def check_ends(op: str, offs: torch.Tensor, total: int) -> None:
    """The values of ``offs`` on a CPU, for ``total`` rows, columns or terms."""
    previous = 0
    for group, end in enumerate(offs.tolist()):
        if not previous <= end <= total:
            raise ValueError(
                f"{op}: offs[{group}] is {end}; accepted: ends in ascending order within [0, {total}], here from {previous} on"
            )
        previous = end


def _check_operands(op: str, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> bool:
    """True for the sums form."""
    check_half_dtypes(op, a, b)
    if a.ndim != 2 or b.ndim not in (2, 3) or a.shape[1] != b.shape[-2]:
        raise ValueError(
            f"{op}: a has shape {list(a.shape)} and b {list(b.shape)}; accepted: [T, K] and [G, K, N], or [M, T] and [T, N]"
        )
    check_offs(op, offs, b.shape[0] if b.ndim == 3 else None)
    return b.ndim == 2


def check_grouped(a, b, offs, bias, activation, out_dtype, preact: bool) -> str:
    """Everything that ``grouped_gemm`` asks of its arguments; the name of the activation."""
    op = "grouped_gemm"
    sums = _check_operands(op, a, b, offs)
    name = check_activation(op, activation)
    check_gated_width(op, "b", b, -1, name)
    if sums and (bias is not None or name != "none" or preact):
        raise ValueError(f"{op}: b has shape {list(b.shape)}; accepted with bias, activation or preact: [G, K, N]")
    if bias is not None:
        check_tensor(op, "bias", bias, (a.dtype, torch.float32))
        check_group_bias(op, bias, b.shape[0], b.shape[-1])
    check_out_dtype(op, out_dtype, KERNEL_DTYPES)
    return name


def check_group_bias(op: str, bias: torch.Tensor, groups: int, width: int) -> None:
    if tuple(bias.shape) not in ((width,), (groups, width)):
        raise ValueError(
            f"{op}: bias has shape {list(bias.shape)}; accepted: [{groups}, {width}], a row per group, or [{width}]"
        )


def check_grouped_accumulate(c, a, b, offs) -> None:
    op = "grouped_gemm_accumulate_"
    if not _check_operands(op, a, b, offs):
        raise ValueError(f"{op}: b has shape {list(b.shape)}; accepted: [T, N]")
    check_tensor(op, "c", c, (torch.float32,))
    shape = [offs.shape[0], a.shape[0], b.shape[1]]
    if list(c.shape) != shape:
        raise ValueError(f"{op}: c has shape {list(c.shape)}; accepted: {shape}, a product per group")
    check_no_internal_overlap(op, "c", c)


# ---- references


def clamped_ends(offs: torch.Tensor, total: int) -> torch.Tensor:
    """Each end clamped to [previous end, total], as the kernels clamp them."""
    return offs.clamp(0, total).cummax(0).values


def group_masks(offs: torch.Tensor, total: int) -> list[torch.Tensor]:
    """For each group, which of ``total`` rows or terms belong to it."""
    ends = clamped_ends(offs, total)
    begins = torch.cat([ends.new_zeros(1), ends])[:-1]
    place = torch.arange(total, device=offs.device)
    return [(begins[g] <= place) & (place < ends[g]) for g in range(offs.shape[0])]


def row_products(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, product, start: torch.Tensor) -> torch.Tensor:
    """``product(a, b[g], g)`` at the rows of each group, ``start`` past the last. All groups see all rows: nothing reads ``offs``."""
    for g, inside in enumerate(group_masks(offs, a.shape[0])):
        start = torch.where(inside[:, None], product(a, b[g], g), start)
    return start


def sum_products(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, product) -> torch.Tensor:
    """``product(a, b)`` over the terms of each group, [G, M, N]."""
    sums = [
        product(torch.where(inside, a, 0), torch.where(inside[:, None], b, 0))
        for inside in group_masks(offs, a.shape[1])
    ]
    return torch.stack(sums) if sums else product(a, b).new_zeros(0, a.shape[0], b.shape[1])


def _grouped_gemm_reference(call):
    a, b, offs, bias = call.a, call.b, call.offs, call.bias
    dtype = call.out_dtype or a.dtype
    if b.ndim == 2:
        sums = sum_products(a, b, offs, lambda a, b: product32(a, b, call.batch_invariant))
        return sums.to(dtype), None

    def preactivations(a, b, g):
        of_group = bias if bias is None or bias.ndim == 1 else bias[g]
        return preactivation(product32(a, b, call.batch_invariant), of_group, 1.0)

    zeros = a.new_zeros(a.shape[0], b.shape[-1], dtype=torch.float32)
    z = row_products(a, b, offs, preactivations, zeros)
    out = finished(z, None, call.activation, 0.0, dtype)  # every activation takes 0 to 0
    return out, z.to(dtype, copy=True) if call.preact else None


def _grouped_accumulate_reference(call):
    product = sum_products(call.a, call.b, call.offs, lambda a, b: product32(a, b, call.batch_invariant))
    if call.overwrite:
        call.c.copy_(product)
        return
    ends = clamped_ends(call.offs, call.a.shape[1])
    filled = ends > torch.cat([ends.new_zeros(1), ends])[:-1]
    call.c.copy_(torch.where(filled[:, None, None], call.c + product, call.c))


# ---- samples for opcheck and `info --check`


def _samples(device: str, form: str) -> Iterator[tuple[torch.Tensor, ...]]:
    """``a, b, offs``: groups of any size, empty ones first, last and all, rows past the last end, all layouts."""
    normal = Normal(device)
    for dtype in HALF_DTYPES:
        for ends in ((3, 3, 10), (0, 12, 12), (0, 0), (5,), ()):
            offs, groups = torch.tensor(ends, dtype=torch.int32, device=device), len(ends)
            if form == "rows":
                yield normal(12, 5, dtype=dtype), normal(groups, 5, 8, dtype=dtype), offs
                yield normal(16, 12, dtype=dtype).t(), normal(groups, 8, 16, dtype=dtype).mT, offs
            else:
                yield normal(12, 5, dtype=dtype).t(), normal(12, 8, dtype=dtype), offs
                yield normal(5, 16, dtype=dtype)[:, 2:14], normal(8, 12, dtype=dtype).t(), offs
        offs = torch.tensor([0, 9, 0, 9, 4, 9], dtype=torch.int32, device=device)[::2]  # strided, two groups empty
        if form == "rows":
            yield normal(4, 0, dtype=dtype), normal(3, 0, 6, dtype=dtype), offs
            yield normal(0, 4, dtype=dtype), normal(3, 4, 6, dtype=dtype), offs.zero_()
        else:
            yield normal(4, 9, dtype=dtype), normal(1, 6, dtype=dtype).expand(9, 6), offs
            yield normal(4, 0, dtype=dtype), normal(0, 6, dtype=dtype), torch.zeros_like(offs)


def grouped_gemm_samples(device: str) -> Iterator[Sample]:
    for a, b, offs in _samples(device, "sums"):
        yield (a, b, offs), {}
        yield (a, b, offs), {"out_dtype": torch.float32, "batch_invariant": True}
    for i, (a, b, offs) in enumerate(_samples(device, "rows")):
        bias = torch.linspace(-1, 1, b.shape[0] * b.shape[2]).to(device).view(b.shape[0], b.shape[2])
        activation = list(ACTIVATIONS)[i % len(ACTIVATIONS)]
        yield (a, b, offs), {"out_dtype": (None, *KERNEL_DTYPES)[i % 4]}
        yield (a, b, offs, bias.to(a.dtype)), {"activation": activation, "preact": i % 2 == 0}
        shared = torch.linspace(-1, 1, b.shape[2]).to(device)
        yield (a, b, offs, shared), {"activation": "swiglu", "preact": True, "batch_invariant": i % 2 == 0}


def grouped_gemm_accumulate_samples(device: str) -> Iterator[Sample]:
    for i, (a, b, offs) in enumerate(_samples(device, "sums")):
        c = torch.ones(offs.shape[0], a.shape[0], b.shape[1], device=device)
        yield (c.clone(), a, b, offs), {"batch_invariant": i % 2 == 0}
        yield (torch.full_like(c, torch.nan).mT.contiguous().mT, a, b, offs), {"overwrite": True}


# ---- ops


grouped_gemm_op = define(
    "grouped_gemm(Tensor a, Tensor b, Tensor offs, Tensor? bias=None, *, "
    'str activation="none", ScalarType? out_dtype=None, bool batch_invariant=False, bool preact=False) '
    "-> (Tensor, Tensor)",
    _grouped_gemm_reference,
    bound=True,
    samples=grouped_gemm_samples,
    check=lambda call: check_grouped(*call[:5], call.out_dtype, call.preact),
    tensor_cores=True,
    flop_count=product_flops,
)
#: ``c[g] += a @ b`` over the terms of group g, in fp32; with ``overwrite`` ``c`` is written, unread, and zero for empty groups.
grouped_gemm_accumulate_op = define(
    "grouped_gemm_accumulate_(Tensor(a!) c, Tensor a, Tensor b, Tensor offs, *, bool overwrite=False, "
    "bool batch_invariant=False) -> ()",
    _grouped_accumulate_reference,
    bound=True,
    samples=grouped_gemm_accumulate_samples,
    check=lambda call: check_grouped_accumulate(*call[:4]),
    tensor_cores=True,
    flop_count=lambda c_shape, a_shape, b_shape, *args, **kwargs: product_flops(a_shape, b_shape),
)

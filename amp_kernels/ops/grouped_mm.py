"""``grouped_mm``: a product for each group of rows, columns or terms, differentiable to any order, with an autocast rule.

Four forms, by the dimensions of ``a`` and ``b``; each one's gradients are products of these forms again:

- rows, ``[T, K]`` and ``[G, K, N]``: a layer of experts. ``da`` are rows, ``db`` sums; ``dbias`` are sums with a row of ones.
- sums, ``[M, T]`` and ``[T, N]``: the gradient of the experts' weights. ``da`` are columns, ``db`` rows.
- columns, ``[G, M, K]`` and ``[K, T]``: rows of the transposed operands.
- batch, ``[G, M, K]`` and ``[G, K, N]``: ``matmul``; with bias or activation, rows of groups of equal size.

The op is composite: it decomposes into ``grouped_gemm`` and ``activation_backward``. fp32 and fp64 outside autocast, torch.func
transforms and forward-mode AD take torch's products (``_grouped.py``). Precision is that of ``linear``.
"""

from __future__ import annotations

import torch

from .._checks.activations import ACTIVATIONS, check_activation, check_gated_width
from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES
from .._checks.operands import check_out_dtype, check_same_device, check_tensor, check_tensors
from .._dispatch import autocast
from .._dispatch.batch_invariant import is_batch_invariant
from .._dispatch.library import define
from .._raw.grouped_gemm import check_ends, check_group_bias, check_offs
from .._sharding.dtensor import refuse_dtensors
from ._autograd import under_transform
from ._grouped import Options, differentiable_rows, differentiable_sums, torch_rows, torch_sums
from ._products import working_dtype
from ._shadows import fresh_shadow, with_shadow
from ._tensors import cast, reshaped, values_are_known
from .linear import check_shadow
from .matmul import _matmul
from .routing import check_routes, combine_rows, spread_rows

_FORMS = {(2, 3): "rows", (2, 2): "sums", (3, 2): "columns", (3, 3): "batch"}


def _grouped_mm(
    a,
    b,
    offs=None,
    bias=None,
    shadow=None,
    gather=None,
    scatter=None,
    weights=None,
    *,
    activation="none",
    transposed=False,
    compute_dtype=None,
    out_dtype=None,
    batch_invariant=False,
):
    dtype = working_dtype("grouped_mm", compute_dtype, a=a, b=b)
    wide = dtype not in HALF_DTYPES
    routes = gather, scatter, weights
    form = _check(a, b, offs, bias, shadow, routes, activation, transposed, dtype, compute_dtype is not None)
    check_out_dtype("grouped_mm", out_dtype, (dtype,) if wide else KERNEL_DTYPES)
    out_dtype = out_dtype or dtype
    options = Options(dtype, out_dtype if scatter is None else dtype, activation, transposed, batch_invariant)
    if form == "batch":
        return _batch(a, b, bias, options, compute_dtype)
    if under_transform():
        rows = a if gather is None else spread_rows(a, gather)
        out = _transformed(form, rows, b, offs, bias, options)
    elif form == "sums":
        return differentiable_sums(a, b, offs, options)
    elif form == "columns":
        return differentiable_rows(b.t(), a.mT, offs, None, None, options).t().contiguous()
    else:
        out = differentiable_rows(a, b, offs, bias, shadow, options, gather)
    return out if scatter is None else combine_rows(out, scatter, weights, out_dtype)


def _batch(a, b, bias, options: Options, compute_dtype) -> torch.Tensor:
    plain = bias is None and options.activation == "none"
    if plain or options.dtype not in HALF_DTYPES or under_transform():
        out = _matmul(
            a, b, compute_dtype=compute_dtype, out_dtype=options.out_dtype, batch_invariant=options.batch_invariant
        )
        if bias is not None:
            out = out + (bias if bias.ndim == 1 else bias.unsqueeze(1))
        return ACTIVATIONS[options.activation](out).to(options.out_dtype)
    groups, rows, _ = a.shape
    offs = rows * torch.arange(1, groups + 1, device=a.device, dtype=torch.int32)
    out = differentiable_rows(a.reshape(groups * rows, a.shape[2]), b, offs, bias, None, options)
    return reshaped(out, (groups, rows, out.shape[1]))


def _transformed(form: str, a, b, offs, bias, options: Options) -> torch.Tensor:
    wide = options.dtype if options.out_dtype == options.dtype else torch.float32
    a, b = (cast(cast(t, options.dtype), wide) for t in (a, b))
    if form == "sums":
        return torch_sums(a, b, offs).to(options.out_dtype)
    if form == "columns":
        return torch_rows(b.t(), a.mT, offs, None).t().to(options.out_dtype)
    bias = None if bias is None else cast(bias, wide)
    z = torch_rows(a, b.mT if options.transposed else b, offs, bias)
    return ACTIVATIONS[options.activation](z).to(options.out_dtype)


def _check(a, b, offs, bias, shadow, routes, activation, transposed, dtype: torch.dtype, autocast: bool) -> str:
    """The form of the call."""
    op = "grouped_mm"
    shapes = f"{op}: a has shape {list(a.shape)} and b {list(b.shape)}"
    form = _FORMS.get((a.ndim, b.ndim))
    if transposed and (form != "rows" or a.shape[1] != b.shape[2]):
        raise ValueError(f"{shapes}; accepted: [T, in_features] and [G, out_features, in_features]")
    if form is None:
        raise ValueError(f"{shapes}; accepted: two or three dimensions each")
    right = b.mT if transposed else b
    if a.shape[-1] != right.shape[-2]:
        raise ValueError(f"{shapes}; accepted: as many columns of a as rows of b")
    if form == "batch" and a.shape[0] != b.shape[0]:
        raise ValueError(f"{shapes}; accepted: the same first dimension, the number of groups")
    if (form == "batch") == (offs is not None):
        given, accepted = ("None", "int32 [G], the end of each group") if offs is None else ("given", "None")
        raise ValueError(f"{shapes} and offs is {given}; accepted with these dimensions: {accepted}")
    groups = {"rows": b.shape[0], "columns": a.shape[0], "batch": a.shape[0]}.get(form)
    if offs is not None:
        check_offs(op, offs, groups)
    if form in ("sums", "columns") and (bias is not None or activation != "none"):
        raise ValueError(
            f"{shapes}; accepted with bias or activation: [T, K] and [G, K, N], or [G, M, K] and [G, K, N]"
        )
    if form != "rows" and any(given is not None for given in routes):
        raise ValueError(f"{shapes}; accepted with gather, scatter or weights: [T, K] and [G, K, N]")
    rows = check_routes(a, *routes) if form == "rows" else 0
    if bias is not None:
        accepted = KERNEL_DTYPES if autocast and dtype in HALF_DTYPES else (dtype, torch.float32)
        check_tensor(op, "bias", bias, accepted if dtype in HALF_DTYPES else (dtype,))
        check_group_bias(op, bias, groups, right.shape[-1])
    check_shadow(op, "shadow", shadow, b, dtype)
    check_same_device(op, a=a, b=b, offs=offs, bias=bias, shadow=shadow)
    check_gated_width(op, "b", right, -1, check_activation(op, activation))
    if offs is not None and values_are_known(offs) and not under_transform():
        check_ends(op, offs, {"rows": rows, "sums": a.shape[1], "columns": b.shape[1]}[form])
    return form


op = define(
    "grouped_mm(Tensor a, Tensor b, Tensor? offs=None, Tensor? bias=None, Tensor? shadow=None, Tensor? gather=None, "
    "Tensor? scatter=None, Tensor? weights=None, *, "
    'str activation="none", bool transposed=False, ScalarType? compute_dtype=None, ScalarType? out_dtype=None, '
    "bool batch_invariant=False) -> Tensor",
    _grouped_mm,
    composite=True,
)

autocast.lower_precision(op, with_shadow(4))


def _call(a, b, offs, bias, gather, scatter, weights, **options) -> torch.Tensor:
    check_tensors("grouped_mm", a=a, b=b)
    routes = {"gather": gather, "scatter": scatter, "weights": weights}
    check_tensors("grouped_mm", optional=True, offs=offs, bias=bias, **routes)
    refuse_dtensors("grouped_mm", "each rank's experts and their tokens as plain tensors", a=a, b=b)
    options |= {
        "activation": check_activation("grouped_mm", options["activation"]),
        "batch_invariant": is_batch_invariant(),
    }
    if autocast.eager(a, b):
        dtype = autocast.dtype_on(a.device.type)
        return _grouped_mm(a, b, offs, bias, fresh_shadow(b, dtype), compute_dtype=dtype, **routes, **options)
    return op(a, b, offs, bias, **routes, **options)


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = "none",
    gather: torch.Tensor | None = None,
    scatter: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """A matrix product for each group, as a mixture of experts needs it: torch.nn.functional.grouped_mm for groups of any size,
    with bias, activation and autocast.

    Group g is ``[offs[g - 1], offs[g])`` of the rows, terms or columns of which there are T:

    ===================  ==========  ============  =============  ======================================
    ``a``                ``b``       result        ``offs`` over  use
    ===================  ==========  ============  =============  ======================================
    ``[T, K]``           [G, K, N]   ``[T, N]``    rows           the layer of experts
    ``[M, T]``           [T, N]      ``[G, M, N]`` terms          the gradient of its weights
    ``[G, M, K]``        [K, T]      ``[M, T]``    columns        the same of transposed matrices
    ``[G, M, K]``        [G, K, N]   ``[G, M, N]`` none           groups of equal size: a batched product
    ===================  ==========  ============  =============  ======================================

    Groups may be empty, and of any size without padding. Rows or columns at and behind ``offs[-1]`` are exactly zero in the result
    and in gradients, and so are the products and gradients of empty groups. NaN of a group stays in that group; NaN behind
    ``offs[-1]`` reaches nothing.

    Args:
        a, b: two or three dimensions, any strides. T, K and G may be 0.
        offs: int32 ``[G]`` on the device of ``a``, the exclusive ends of the groups in ascending order. The host does not read
            them on a GPU with CUDA kernels of this package, so calls neither synchronize nor break a CUDA graph, which may be
            replayed with other values. Elsewhere torch multiplies, and the host reads them for all but plain bf16 products.
        bias: ``[G, N]``, a row per group, or ``[N]``; its dtype as in :func:`linear`. For the first and the last form.
        out_dtype: fp16, bf16 or fp32 for 16-bit operands; otherwise their own. Default: the working dtype.
        activation: as in :func:`linear`, ``None`` for ``"none"``. For the first and the last form.
        gather: int32 ``[T, k]``, as :func:`route` returns it, for the first form: row ``gather[t, j]`` of the product is that of
            ``a[t]``. ``offs`` divides the ``T * k`` rows. Backward gathers ``a`` again, so that no copy of its rows is kept.
        scatter: int32 ``[T, k]``, for the first form: the result, ``[T, N]``, is the sum over j of row ``scatter[t, j]`` of the
            product, added in the order of j in fp32, from rows of the working dtype.
        weights: ``[T, k]``, any float dtype: the factors of the rows that ``scatter`` adds. Differentiable.

    Returns:
        A contiguous tensor; with ``"swiglu"`` of N / 2 columns.

    The working dtype and gradients are as in :func:`linear`: fp16 and bf16 add in fp32 and round once; inside torch.autocast
    everything is computed in its dtype, and fp32 weights get the fp32 sums. A ``b`` with a ``main_grad``
    (:func:`amp_kernels.nn.accumulate_fp32`) accumulates there. fp32 and fp64 take torch's products; on a GPU, where the host does
    not know the groups, that is a product of all rows for each group. Results have the same bits in every run; under
    :func:`batch_invariant` a group has the bits of :func:`matmul` of its rows.

    Values of ``offs``, ``gather`` and ``scatter`` are checked on a CPU only. A kernel clamps each end to ``[previous end, T]``, passes
    over places outside ``[0, T * k)`` and touches nothing outside of its tensors.

    Raises:
        TypeError: a dtype or layout is not accepted, ``offs``, ``gather`` or ``scatter`` is not int32, or a tensor is a DTensor.
        ValueError: shapes, devices, ``activation`` or, on a CPU, the values of ``offs`` do not fit; or ``gather`` or ``scatter`` does
            not hold each number of ``[0, T * k)`` once.

    Examples:
        >>> x, experts = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(3, 8, 2, dtype=torch.bfloat16)
        >>> offs = torch.tensor([1, 1, 3], dtype=torch.int32)  # one row, none, two; the last row belongs to nobody
        >>> ak.grouped_mm(x, experts, offs=offs)
        tensor([[8., 8.],
                [8., 8.],
                [8., 8.],
                [0., 0.]], dtype=torch.bfloat16)
        >>> offs, places = ak.route(torch.tensor([[2, 0], [0, 1]]), 3)  # two of three experts for each of two tokens
        >>> rows = ak.grouped_mm(x[:2], experts, offs=offs, gather=places)
        >>> rows.shape
        torch.Size([4, 2])
        >>> ak.grouped_mm(rows, experts.mT, offs=offs, scatter=places, weights=torch.full((2, 2), 0.5)).shape
        torch.Size([2, 8])
    """
    return _call(a, b, offs, bias, gather, scatter, weights, out_dtype=out_dtype, activation=activation)


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    gather: torch.Tensor | None = None,
    scatter: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows form with a weight ``[G, N, K]``, which keeps its own gradient, ``main_grad`` and shadow."""
    options = {"out_dtype": out_dtype, "activation": activation, "transposed": True}
    return _call(x, weight, offs, bias, gather, scatter, weights, **options)

"""``newton_schulz``: the orthogonal factor of matrices by a polynomial iteration, in batches of one shape.

With ``A = X X^T`` a step is ``X = (a I + b A + c A^2) X``, of which the products of the short side are symmetric
(``syrk``). The Gram form iterates on the square of the short side alone and multiplies ``X`` by the product of several
steps; it has fewer flops for every matrix that is not square, and is taken from an aspect ratio of 1.5 (Dao-AILab,
gram-newton-schulz). Rounding makes small eigenvalues of ``R = Q X X^T Q`` negative, which the polynomial then magnifies. In
fp16 the form is as precise as the other one if ``R`` is recomputed after two steps, and after every third from there
on; in bf16, after every second.

Iterates are fp16, whatever the dtype of the input: normalized, they have no use for bf16's exponents. The exception is a
CPU that multiplies pairs of bf16 in one instruction, where an input that is not fp16 and has sides of 256 or more takes
bf16: smaller matrices gain little time, and average less of its rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_tensor
from .._checks.types import check_iterable
from .._dispatch import cpu_isa
from .._raw.gemm import gemm_op
from .._raw.syrk import op as syrk_op
from .._raw.unit_matrices import op as unit_matrices_op
from .._raw.unit_matrices import padded
from ._autograd import check_not_recorded

Triple = tuple[float, float, float]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]

KELLER_JORDAN: Triple = (3.4445, -4.7750, 2.0315)
_SAFETY = 1.05
#: Amsel et al., "The Polar Express", arXiv:2505.16932, for singular values from 1e-3, with room for rounding in all steps
#: but the last, which repeats.
POLAR_EXPRESS: tuple[Triple, ...] = tuple(
    (a / s, b / s**3, c / s**5)
    for (a, b, c), s in zip(
        (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        ),
        (_SAFETY, _SAFETY, _SAFETY, _SAFETY, 1.0),
        strict=True,
    )
)
GRAM_ASPECT = 1.5
_LEAST_BF16 = 256
#: Elements of the iterates that are in work at once: three stacks of 128 MB, and what their products need.
ELEMENTS_TOGETHER = 1 << 26


def triples_of(coefficients: Coefficients, steps: int) -> list[Triple]:
    """The coefficients of each step."""
    op = "newton_schulz"
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"{op}: steps is {steps!r}; accepted: an integer from 0 to 99")
    accepted = (
        "'keller_jordan', 'polar_express', a triple (a, b, c) for all steps, or a list of as many triples as steps"
    )
    if coefficients == "keller_jordan":
        return [KELLER_JORDAN] * steps
    if coefficients == "polar_express":
        return [POLAR_EXPRESS[min(i, len(POLAR_EXPRESS) - 1)] for i in range(steps)]
    if isinstance(coefficients, str) or not isinstance(coefficients, Sequence):
        raise ValueError(f"{op}: coefficients is {coefficients!r}; accepted: {accepted}")
    each = list(coefficients) if all(isinstance(c, Sequence) for c in coefficients) else [coefficients] * steps
    if len(each) != steps or any(len(c) != 3 or not all(math.isfinite(v) for v in c) for c in each):
        raise ValueError(f"{op}: coefficients is {coefficients!r} and steps is {steps}; accepted: {accepted}")
    return [(float(a), float(b), float(c)) for a, b, c in each]


def newton_schulz(
    x: torch.Tensor | Sequence[torch.Tensor],
    steps: int = 5,
    coefficients: Coefficients = KELLER_JORDAN,
    eps: float = 1e-7,
) -> torch.Tensor | list[torch.Tensor]:
    """The matrices of ``x`` with their singular values driven to 1 by ``steps`` Newton-Schulz steps, as Muon takes them.

    A step of ``X``, first divided by its Frobenius norm, is ``a X + (b A + c A^2) X`` with ``A = X X^T``. Iterates are 16-bit
    with fp32 sums, symmetric products compute one triangle, and wide or tall matrices iterate on the Gram matrix of their
    short side. A matrix gives the same bits alone, in a stack and in a list, and above ``eps`` also times any power of two.

    Args:
        x: ``[M, N]`` or ``[..., M, N]``, fp16, bf16 or fp32, any strides; or a list of such tensors of any shapes, of which
            those of one shape are computed together.
        steps: 0 to 99; with 0, ``x`` is divided by its norm alone.
        coefficients: ``(a, b, c)`` for all steps, a list of one triple a step, ``"keller_jordan"`` (the default), or
            ``"polar_express"``, whose last triple repeats.
        eps: the least norm to divide by: zeros stay zeros.

    Returns:
        Contiguous tensors of the shapes and dtypes of ``x``. Detached: the iteration is not differentiable.

    Raises:
        TypeError: a dtype or layout is not accepted.
        ValueError: a shape, ``steps``, ``coefficients`` or ``eps`` is not accepted.
        RuntimeError: a gradient of ``x`` would be recorded.

    Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.

    Examples:
        >>> x = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
        >>> ak.newton_schulz(x, steps=15, coefficients=(1.5, -0.5, 0.0))
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """
    triples = triples_of(coefficients, steps)
    if not math.isfinite(eps) or eps < 0:
        raise ValueError(f"newton_schulz: eps is {eps!r}; accepted: a finite number from 0 on")
    if isinstance(x, torch.Tensor):
        _check("x", x)
        return orthogonalized(_stack(x), triples, eps, x.dtype).view(x.shape)
    check_iterable("newton_schulz: x", x, "a tensor, a list of tensors")
    results: list[torch.Tensor] = list(x)
    groups: dict[tuple, list[int]] = {}
    for i, matrix in enumerate(results):
        _check(f"x[{i}]", matrix)
        groups.setdefault((matrix.shape[-2:], matrix.dtype, matrix.device), []).append(i)
    for members in groups.values():
        stacks = [_stack(results[i]) for i in members]
        together = torch.cat(stacks) if len(stacks) > 1 else stacks[0]
        made = orthogonalized(together, triples, eps, together.dtype)
        for i, part in zip(members, made.split([len(stack) for stack in stacks]), strict=True):
            results[i] = part.reshape(results[i].shape)
    return results


def _check(name: str, x: torch.Tensor) -> None:
    check_tensor("newton_schulz", name, x, KERNEL_DTYPES)
    if x.ndim < 2:
        raise ValueError(f"newton_schulz: {name} has shape {list(x.shape)}; accepted: [..., M, N]")
    check_not_recorded("newton_schulz", **{name: x})


def _stack(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def orthogonalized(x: torch.Tensor, triples: list[Triple], eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Those of ``x``, ``[B, M, N]``, contiguous in ``dtype``: the iterates themselves where nothing has to be copied."""
    batch, rows, columns = x.shape
    together = max(1, ELEMENTS_TOGETHER // max(1, padded(rows) * padded(columns)))
    if x.numel() == 0 or batch > together:
        out = x.new_empty(x.shape, dtype=dtype)
        for part, some in zip(out.split(together), x.split(together), strict=True):
            if x.numel():
                part.copy_(orthogonalized(some, triples, eps, dtype))
        return out
    iterate = unit_matrices_op(x, eps=eps, dtype=iterate_dtype(x))
    iterate = (gram_steps if is_gram(rows, columns) else symmetric_steps)(iterate, triples)
    return iterate[:, :rows, :columns].to(dtype).contiguous()


def iterate_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of the iterates."""
    large = x.is_cpu and x.dtype != torch.float16 and min(x.shape[-2:]) >= _LEAST_BF16
    return torch.bfloat16 if large and _multiplies_bf16() else torch.float16


def _multiplies_bf16() -> bool:
    return cpu_isa.chosen() in ("avx512_bf16", "amx", "amx_emulated")


# torch.compiler.assume_constant_result, which would import the compiler.
_multiplies_bf16._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_gram(rows: int, columns: int) -> bool:
    """True if the Gram form has the fewer flops by enough to pay for its launches."""
    return max(rows, columns) >= GRAM_ASPECT * min(rows, columns)


def _short_side(x: torch.Tensor) -> torch.Tensor:
    """``x`` or its transpose, so that its rows are the short side."""
    return x if x.shape[-2] <= x.shape[-1] else x.mT


def _applied(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The symmetric ``w`` times the short side of ``x``. The order of the sums must not depend on the batch, which on a
    CPU it never does."""
    a, b = (w, x) if x.shape[-2] <= x.shape[-1] else (x, w)
    return gemm_op(a, b, batch_invariant=not x.is_cpu)[0]


def symmetric_steps(x: torch.Tensor, triples: Sequence[Triple]) -> torch.Tensor:
    for a, b, c in triples:
        short = _short_side(x)
        gram = syrk_op(short, short)
        x = _applied(syrk_op(gram, gram, gram, alpha=c, beta=b, diagonal=a), x)
    return x


def gram_steps(x: torch.Tensor, triples: Sequence[Triple]) -> torch.Tensor:
    """``X = Q X`` with ``Q``, the product of all steps since the last restart, from ``R = Q X X^T Q`` alone."""
    for first, end in _segments(len(triples), x.dtype):
        short = _short_side(x)
        r = syrk_op(short, short)
        q = None
        for i in range(first, end):
            a, b, c = triples[i]
            z = syrk_op(r, r, r, alpha=c, beta=b)
            if q is None:
                q = z.clone()
                q.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                q = syrk_op(q, z, q, beta=a)
            if i + 1 < end:
                rz = syrk_op(r, z, r, beta=a)
                r = syrk_op(z, rz, rz, beta=a)
        if q is not None:
            x = _applied(q, x)
    return x


def _segments(steps: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Ranges of steps between two restarts."""
    starts = [0, *range(2, steps, 3 if dtype == torch.float16 else 2), steps]
    return [(first, end) for first, end in itertools.pairwise(starts) if first < end]

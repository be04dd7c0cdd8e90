"""Shared by the losses over classes: options, checks, the reduction and the gradient's factors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _functional as F
from .._checks.lists import FLOATS, check_number, is_dense, names
from .._checks.operands import check_tensor
from .._dispatch import autocast
from .._raw import unscale
from ._autograd import under_transform
from ._tensors import values_are_known

REDUCTIONS = ("mean", "sum", "none")


class Options(NamedTuple):
    """The options of a loss but its reduction, by the names of the raw op."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def check_options(op: str, reduction: str, label_smoothing: float, z_loss: float) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}; accepted: {', '.join(map(repr, REDUCTIONS))}")
    check_number(op, "label_smoothing", label_smoothing, 0, 1)
    check_number(op, "z_loss", z_loss, 0)


def check_target(
    op: str, target: Tensor, shape: tuple[int, ...], classes_dim: int, weight: Tensor | None, ignore_index: int
) -> None:
    """``shape`` is that of the logits."""
    classes = shape[classes_dim]
    if classes == 0:
        raise ValueError(
            f"{op}: target names classes, and logits of shape {list(shape)} have none; accepted: at least one"
        )
    check_tensor(op, "target", target, (torch.int64, torch.uint8, *FLOATS))
    if target.is_floating_point():
        if target.shape != shape:
            raise ValueError(
                f"{op}: target has dtype {names([target.dtype])}, that of probabilities, and shape {list(target.shape)}; "
                f"accepted: {list(shape)}, the shape of the logits, or class ids as int64 (target.long())"
            )
        if ignore_index >= 0:
            raise ValueError(
                f"{op}: ignore_index is {ignore_index}, but the target holds probabilities; accepted: none"
            )
    else:
        wanted = [size for dim, size in enumerate(shape) if dim != classes_dim]
        if list(target.shape) != wanted:
            raise ValueError(f"{op}: target has shape {list(target.shape)}; accepted: {wanted}, one class for each row")
    if weight is not None and weight.shape != (classes,):
        raise ValueError(f"{op}: weight has shape {list(weight.shape)}; accepted: [{classes}], one for each class")


@contextlib.contextmanager
def names_class(op: str, target: Tensor, classes: int, ignore_index: int) -> Iterator[None]:
    """The error of a CPU kernel about a class out of range, by its place in ``target``: its rows may be those of a chunk."""
    try:
        yield
    except (RuntimeError, IndexError):
        if not target.is_floating_point() and target.is_cpu and values_are_known(target) and not under_transform():
            ids = target.long()
            wrong = (ids != ignore_index) & ((ids < 0) | (ids >= classes))
            for at in wrong.nonzero()[:1].tolist():
                raise ValueError(
                    f"{op}: target{at or ''} is {ids[tuple(at)].item()}; accepted: 0 to {classes - 1}, and ignore_index, "
                    f"{ignore_index}"
                ) from None
        raise


def denominator(target: Tensor, weight: Tensor | None, reduction: str, options: Options) -> Tensor | None:
    """The divisor of a mean, in fp32 or the dtype of ``weight``: the sum of the counted rows' weights; for probabilities, their number.
    ``None`` for other reductions."""
    if reduction != "mean":
        return None
    if target.dtype != torch.int64:
        return torch.full((), float(target.shape[0]), dtype=torch.float32, device=target.device)
    counted = target != options.ignore_index
    if weight is None:
        return counted.sum(dtype=torch.float32)
    inside = counted & (target >= 0) & (target < weight.shape[0])
    return torch.where(inside, weight[torch.where(inside, target, 0)], 0.0).sum()


def reduced(loss: Tensor, reduction: str, divisor: Tensor | None) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() if divisor is None else loss.sum() / divisor


def row_factors(rows: int, divisor: Tensor | None, grad: Tensor | None, device) -> Tensor:
    """The factor of each row's gradient; ``grad`` is the gradient of the reduced loss, 1 if ``None``."""
    factor = torch.ones((), dtype=torch.float32, device=device) if grad is None else grad.float()
    return (factor if divisor is None else factor / divisor).expand(rows)


def made_in_forward(reduction: str, dtype: torch.dtype) -> bool:
    return reduction != "none" and dtype != torch.float16


def once(op: str) -> None:
    """Called by a backward: it is not itself differentiable."""
    if torch.is_grad_enabled():
        stock = f", or torch.nn.functional.{op}" if hasattr(torch.nn.functional, op) else ""
        raise RuntimeError(
            f"{op}: a second derivative (create_graph=True) was asked for, but its gradient is computed by a kernel; "
            f"accepted: first derivatives, float64{stock}"
        )


def scaled(factor: Tensor, *gradients: tuple[Tensor | None, torch.dtype]) -> list[Tensor | None]:
    """Each gradient times ``factor`` in fp32, rounded once to its dtype. If nobody can ask for it again it is in place, and
    not even read if the factor is 1, as in ``loss.backward()``: the device looks, not the host."""
    factor = factor.float()
    eager = autocast.eager(factor, *(gradient for gradient, _ in gradients if gradient is not None))
    keep = eager and torch._C._autograd._get_current_graph_task_keep_graph()
    in_place = []

    def product(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if gradient is None:
            return None
        if eager and not keep and dtype == gradient.dtype and is_dense(gradient):
            in_place.append(gradient)
            return gradient
        wide = factor.view([1] * gradient.ndim)  # of no dimension it would be rounded to the gradient's dtype first
        if not eager:
            return (gradient * wide).to(dtype)
        own = keep or dtype != gradient.dtype  # else logits with gaps, whose place the gradient has taken
        return torch.mul(gradient, wide, out=torch.empty_like(gradient, dtype=dtype) if own else gradient)

    results = [product(*each) for each in gradients]
    if in_place:
        unscale.op(in_place, None, factor)
    return results


def composed(logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, options: Options) -> Tensor:
    """The loss of [N, V] logits in torch's operations, in fp32 or fp64."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    weight = None if weight is None else weight.to(x.dtype)
    smoothing = options.label_smoothing
    if target.is_floating_point():  # not torch's cross_entropy, which takes no symbolic shapes here
        y = (1 - smoothing) * target.to(x.dtype) + smoothing / x.shape[1]
        loss = -((y if weight is None else y * weight) * x.log_softmax(1)).sum(1)
    else:
        index = options.ignore_index
        loss = F.cross_entropy(x, target, weight, reduction="none", label_smoothing=smoothing, ignore_index=index)
        counted = target != index
        row = counted if weight is None else counted * weight[torch.where(counted, target, 0)]
    if options.z_loss:
        z = options.z_loss * x.logsumexp(1).square()
        loss = loss + (z if target.is_floating_point() else torch.where(counted, row * z, 0.0))
    return reduced(loss, reduction, denominator(target, weight, reduction, options))

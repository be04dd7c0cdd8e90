"""Gradient norms and clipping with the interface of torch.nn.utils, in one read of gradients of any dtypes.

With an optimizer of this package, ``scaler.step(optimizer, max_norm=...)`` and ``max_grad_norm=`` clip inside the update and do not
write gradients. These functions are for other optimizers, and for code that reads ``.grad`` after clipping.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .._checks import lists
from .._checks.stack import users_line
from .._checks.types import check_iterable, check_tensors_of
from .._dispatch.devices import at, by_device
from .._raw.check_and_norm import op as check_and_norm
from .._raw.unscale import op as unscale_
from .._sharding.agreement import Agreement, Declared, check_declared, check_shard_group, declared_in
from .._sharding.local import is_dtensor, local, placed_as, summed

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # a float32 sum would lose float64's precision
_DEVICES = ("cpu", "cuda")
# Saved now, because a program may replace torch's functions with those below.
_torch_get_total_norm, _torch_clip_grad_norm_ = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def get_total_norm(
    tensors: Iterable[Tensor] | Iterable[dict[str, Any]] | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    shard_group: ProcessGroup | None = None,
) -> Tensor:
    """:func:`torch.nn.utils.get_total_norm`: the norm of all tensors as one vector. No host sync, unless ``error_if_nonfinite``.

    The L2 and infinity norms of dense float16, bfloat16 and float32 tensors in any mix take one read per device and are float32;
    squares are summed in a fixed order. An L2 norm above 1.8e19, whose square float32 does not hold, is infinite. (torch rounds to
    the tensors' dtype, so its L2 norm of float16 gradients is infinite above 65504; it rejects the infinity norm of an empty
    tensor, which is 0 here.) torch computes everything else: other norms, float64, tensor subclasses except DTensor, tensors with
    gaps in memory, other devices.

    DTensors may have any placements and be on several meshes if one contains the others. Plain tensors next to them must be equal
    on all ranks. Every rank reads its shards, and one all-reduce, in which all ranks must take part with the same list, gives the norm.
    The first norm of a list with tensors on a part of the widest mesh also compares their norms between the parts, and waits once.

    Args:
        tensors: one tensor or an iterable of them, any shapes and devices; or of groups ``{"params": [...], "shard_group": ...}``,
            whose ``shard_group`` is a process group over which their tensors are distinct, such as that of experts, or ``"copies"``.
        norm_type: order of the norm; ``"inf"`` or ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is infinite or NaN; this waits for the device.
        foreach: accepted for compatibility; passed to torch if torch computes the norm.
        shard_group: ranks whose plain tensors are shards of one model, as in FSDP1; see
            :class:`amp_kernels.optim.MixedPrecision`.

    Returns:
        The norm, a plain tensor, 0-dim, on the device of the first tensor; 0.0 on the CPU if there are none.

    Raises:
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite.
        ValueError: DTensors are on several meshes and none contains the others; tensors on a part of a mesh differ between its parts and
            have no ``shard_group``; or torch would have to compute the norm over a ``shard_group``.
        TypeError: ``tensors`` holds anything but tensors, or the ``shard_group`` of a group is neither.

    Examples:
        >>> ak.get_total_norm([torch.full((4,), 60_000.0, dtype=torch.float16), torch.zeros(3)])
        tensor(120000.)
    """
    if not isinstance(tensors, Tensor):
        check_iterable("get_total_norm: tensors", tensors, "a tensor, an iterable of tensors")
    check_shard_group("get_total_norm", shard_group)
    tensors, declared = _flat("get_total_norm", [tensors] if isinstance(tensors, Tensor) else list(tensors))
    check_tensors_of("get_total_norm: tensors", tensors)
    values = list(map(summed, tensors))
    pieces, agreement = list(map(local, values)), Agreement(values, shard_group, declared, are_grads=True)
    if not _fusible(pieces, norm_type, agreement):
        _refuse_declared("get_total_norm", norm_type, agreement)
        return _torch_get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    if float(norm_type) != math.inf:
        agreement.settle("get_total_norm")
    return _total_norm(pieces, agreement, agreement.counts, float(norm_type), error_if_nonfinite)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Iterable[dict[str, Any]] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    shard_group: ProcessGroup | None = None,
) -> Tensor:
    """:func:`torch.nn.utils.clip_grad_norm_`: scale gradients in place so that their total norm is at most
    ``max_norm``. No host sync, unless ``error_if_nonfinite``.

    Every gradient is multiplied by ``min(1, max_norm / (norm + 1e-6))`` (Pascanu, Mikolov and Bengio, "On the
    difficulty of training recurrent neural networks", ICML 2013). After the one read of :func:`get_total_norm`, a second pass over
    all dtypes writes the scaled gradients; the factor is float32 and each result is rounded once. (torch rounds the factor to the
    gradients' dtype.) As in torch, a NaN norm makes all gradients NaN; an infinite norm makes finite gradients 0 and infinite ones
    NaN. Under a scaler use ``scaler.step(optimizer, max_norm=...)``, which skips the step instead.

    Args:
        parameters: one tensor or an iterable of them, or of groups as in :func:`get_total_norm`, such as an optimizer's
            ``param_groups``; those without a ``.grad`` are ignored.
        max_norm: the norm to clip to.
        norm_type, error_if_nonfinite, foreach, shard_group: as in :func:`get_total_norm`. Ranks without a gradient must also call
            this function.

    Returns:
        The norm before clipping; see :func:`get_total_norm`.

    Raises:
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite; gradients are unchanged.
        ValueError: ``max_norm`` is negative or NaN, parameters are sharded by FSDP1 and there is no ``shard_group``, or as for
            :func:`get_total_norm`; parameters on a part of a mesh are compared by weights and gradients.
        TypeError: ``max_norm`` is not a number, or as for :func:`get_total_norm`.

    Examples:
        >>> weight = torch.zeros(1, requires_grad=True)
        >>> bias = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
        >>> (3 * weight + 4 * bias).backward()
        >>> ak.clip_grad_norm_([weight, bias], max_norm=1.0)
        tensor(5.)
        >>> weight.grad, bias.grad
        (tensor([0.6000]), tensor([0.8008], dtype=torch.bfloat16))
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    else:
        check_iterable("clip_grad_norm_: parameters", parameters, "model.parameters(), a tensor")
        is_generator = isinstance(parameters, types.GeneratorType)
        parameters = list(parameters)
        if is_generator and not parameters:
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=users_line()
            )
    if not isinstance(max_norm, Tensor):  # torch takes one, whose value only the device knows
        lists.check_number("clip_grad_norm_", "max_norm", max_norm, 0.0)
    check_shard_group("clip_grad_norm_", shard_group)
    parameters, declared = _flat("clip_grad_norm_", parameters)
    check_tensors_of("clip_grad_norm_: parameters", parameters)
    agreement = Agreement(parameters, shard_group, declared)
    agreement.check("clip_grad_norm_")
    if float(norm_type) != math.inf:
        agreement.settle("clip_grad_norm_")
    return clip(parameters, agreement, max_norm, norm_type, error_if_nonfinite, foreach)


def clip(
    parameters: list[Tensor],
    agreement: Agreement,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    name: str = "clip_grad_norm_",
) -> Tensor:
    """:func:`clip_grad_norm_` with a known agreement of ranks."""
    counted = [
        (param, counts) for param, counts in zip(parameters, agreement.counts, strict=True) if param.grad is not None
    ]
    counts = [own for _, own in counted]
    pieces = [local(placed_as(param.grad, param)) if is_dtensor(param) else param.grad for param, _ in counted]
    written = by_device([local(param.grad) for param, _ in counted])  # partial DTensors are scaled term by term
    # torch scales memory shared by two gradients twice, one after the other; one pass would race.
    if not _fusible(pieces, norm_type, agreement) or any(map(lists.overlap, written.values())):
        _refuse_declared(name, norm_type, agreement)
        return _torch_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = _total_norm(pieces, agreement, counts, float(norm_type), error_if_nonfinite)
    factor = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    for device, members in written.items():
        unscale_(members, None, at(factor, device))
    return norm


def _flat(name: str, entries: list[Any]) -> tuple[list[Tensor], list[Declared] | None]:
    """The tensors of a list of tensors or groups, and what the groups declare."""
    if not any(isinstance(entry, dict) for entry in entries):
        return entries, None
    groups = [entry if isinstance(entry, dict) else {"params": entry} for entry in entries]
    for i, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(f"{name}: group {i} has the keys {list(group)}; accepted: 'params' and 'shard_group'")
        check_declared(name, group)
        params = group["params"]
        groups[i] = {**group, "params": [params] if isinstance(params, Tensor) else list(params)}
    return [tensor for group in groups for tensor in group["params"]], declared_in(groups)


def _refuse_declared(name: str, norm_type: float, agreement: Agreement) -> None:
    """Raise if torch, which does not know process groups, would compute the norm."""
    if agreement.is_declared and agreement:
        raise ValueError(
            f"{name}: norm_type is {norm_type}, and a shard_group is given; accepted with it: dense float16, bfloat16 and float32 "
            "gradients, and norm_type 2 or inf"
        )


def _fusible(tensors: Sequence[Tensor], norm_type: float, agreement: Agreement) -> bool:
    """True if the kernels support these tensors with torch's result."""
    return (
        (len(tensors) > 0 or bool(agreement))
        and float(norm_type) in (2.0, math.inf)
        and all(
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.dtype in _DTYPES
            and tensor.device.type in _DEVICES
            and tensor.layout is torch.strided
            and lists.is_dense(tensor)
            for tensor in tensors
        )
    )


def _total_norm(
    pieces: list[Tensor], agreement: Agreement, counts: list[bool], norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    if norm_type == math.inf:
        counts = [True] * len(pieces)  # copies do not change the maximum
    first = pieces[0].device if pieces else agreement.device
    parts = []
    for mine in sorted(set(counts), reverse=True):
        members = by_device([piece for piece, own in zip(pieces, counts, strict=True) if own == mine])
        for tensors in members.values():
            part = at(check_and_norm(tensors, norm_type=norm_type)[0], first)
            parts.append(part if mine else part * 0.0)  # counted on another rank; NaN if it is not finite here
    parts = parts or [torch.zeros((), dtype=torch.float32, device=first)]
    if norm_type == math.inf:
        norm = parts[0] if len(parts) == 1 else torch.stack(parts).amax()
        norm = agreement.largest(norm) if agreement else norm
    else:
        norm = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        norm = (agreement.reduce(norm, torch.zeros_like(norm))[0] if agreement else norm).sqrt()
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    return norm

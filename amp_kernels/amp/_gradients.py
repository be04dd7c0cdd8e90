"""A gradient scaler's passes over the gradients that this rank holds, and the ranks with which it agrees on what they find."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._checks import lists
from .._dispatch.devices import Copies, by_device, largest_flag
from .._raw.check_and_norm import check_and_norm
from .._raw.unscale import unscale_
from .._sharding.agreement import Agreement, LatestAgreement, check_declared, check_shard_group, declared_in
from .._sharding.local import is_dtensor, local
from ..optim._base import FusedOptimizer


class Agreements:
    """The agreements of a scaler's optimizers.

    Args:
        shard_group: of optimizers that are not of this package.
    """

    def __init__(self, shard_group: ProcessGroup | None):
        check_shard_group("GradScaler", shard_group)
        self.shard_group = shard_group
        self._latest: weakref.WeakKeyDictionary[Optimizer, LatestAgreement] = weakref.WeakKeyDictionary()

    def over(self, optimizer: Optimizer) -> Agreement:
        """The ranks with which to agree on the optimizer's steps."""
        if isinstance(optimizer, FusedOptimizer):
            agreement = optimizer._agreement()
        else:
            groups = optimizer.param_groups
            for group in groups:
                check_declared("GradScaler", group)
            params, latest = [p for group in groups for p in group["params"]], self._latest
            agreement = latest.setdefault(optimizer, LatestAgreement()).over(
                params, self.shard_group, declared_in(groups)
            )
        agreement.check("GradScaler")
        return agreement

    def check_declared(self, optimizer: Optimizer, inner: FusedOptimizer) -> None:
        """Raise if ``optimizer`` distributes its parameters, or this scaler's are distributed, and ``inner``, which takes the
        steps, does not know over which ranks."""
        if inner.shard_group is not None or (inner is optimizer and self.shard_group is None):
            return
        if any(group["params"] and group.get("shard_group") is None for group in inner.param_groups):
            raise ValueError(
                f"GradScaler.step: {type(inner).__name__} has no shard_group, so that each rank would clip and skip by its "
                "own parameters; accepted: the option shard_group=... of the optimizer, or the key of each of its groups"
            )

    def __reduce__(self) -> tuple:
        return Agreements, (self.shard_group,)


def check(grads: list[Tensor], scale: Tensor, agreement: Agreement) -> dict[torch.device, Tensor]:
    """By device, a flag above 0 if a gradient on any rank is not finite once divided by ``scale``."""
    scales = Copies(scale)
    dense = [grad if lists.is_dense(grad) else grad.contiguous() for grad in grads]
    flags = {device: check_and_norm(members, scales.get(device))[1] for device, members in by_device(dense).items()}
    return _agreed(flags, agreement, scale.device)


@torch.no_grad()
def unscale(
    grads: list[Tensor], inverse_scale: Tensor, found_inf: Tensor, agreement: Agreement
) -> dict[torch.device, Tensor]:
    """Multiply gradients by ``inverse_scale`` in place. Returns flags as :func:`check`, the first of which is ``found_inf``."""
    inverses, flags = Copies(inverse_scale), Copies(found_inf)
    for device, members in by_device(grads).items():
        dense = [grad if lists.is_dense(grad) else grad.contiguous() for grad in members]
        unscale_(dense, flags.get(device), inverses.get(device))
        for grad, copy in zip(members, dense, strict=True):
            if copy is not grad:
                grad.copy_(copy)
    return _agreed(flags._per_device_tensors, agreement, found_inf.device)


def _agreed(
    flags: dict[torch.device, Tensor], agreement: Agreement, default: torch.device
) -> dict[torch.device, Tensor]:
    """The flags of all ranks in place of this rank's, on the ``default`` device if this rank has none."""
    if not agreement:
        return flags
    device = next(iter(flags), default)
    flag = largest_flag([*flags.values(), torch.zeros((), dtype=torch.float32, device=device)], device)
    return {device: agreement.reduce(torch.zeros_like(flag), flag)[1]}


def local_grads(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's gradients as dense tensors: the values of a sparse one, this rank's piece of a DTensor.

    A float16 sparse gradient is coalesced first, as torch does, because adding up duplicate entries may overflow; that
    replaces ``.grad``.
    """
    values = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                if param.grad.dtype == torch.float16:
                    param.grad = param.grad.coalesce()
                values.append(param.grad._values())
            else:
                values.append(local(param.grad))
    return values


def has_foreign(grads: Iterable[Tensor]) -> bool:
    """True if one is a tensor subclass that only torch's own ops can read."""
    return any(is_traceable_wrapper_subclass(grad) and not is_dtensor(grad) for grad in grads)

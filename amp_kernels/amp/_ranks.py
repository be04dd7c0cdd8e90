"""The ranks that share an optimizer's parameters, and the gradients that this rank holds, for a gradient scaler."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._dispatch.devices import largest_flag
from .._sharding.agreement import Agreement, LatestAgreement
from .._sharding.local import is_dtensor, local
from ..optim._base import FusedOptimizer


class Agreements:
    """The agreements of a scaler's optimizers.

    Args:
        shard_group: of optimizers that are not of this package.
    """

    def __init__(self, shard_group: ProcessGroup | None):
        self.shard_group = shard_group
        self._latest: weakref.WeakKeyDictionary[Optimizer, LatestAgreement] = weakref.WeakKeyDictionary()

    def over(self, optimizer: Optimizer) -> Agreement:
        """The ranks with which to agree on the optimizer's steps."""
        if isinstance(optimizer, FusedOptimizer):
            agreement = optimizer.agreement()
        else:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            agreement = self._latest.setdefault(optimizer, LatestAgreement()).over(params, self.shard_group)
        agreement.check("GradScaler")
        return agreement

    def __reduce__(self) -> tuple:
        return Agreements, (self.shard_group,)


def agreed(
    agreement: Agreement, flags: dict[torch.device, Tensor], default: torch.device
) -> dict[torch.device, Tensor]:
    """The flags of all ranks in place of this rank's, which are on the ``default`` device if there are none."""
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
    """Whether one is a tensor subclass that only torch's own ops can read."""
    return any(is_traceable_wrapper_subclass(grad) and not is_dtensor(grad) for grad in grads)

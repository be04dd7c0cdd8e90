"""Agreement of a gradient scaler with the ranks that share an optimizer's parameters, and the local gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._dispatch.devices import largest_flag
from .._dispatch.walks import identical
from .._sharding.agreement import Agreement
from .._sharding.local import is_dtensor, local
from ..optim._base import FusedOptimizer


class TogetherWithRanks:
    """Mixin of :class:`amp_kernels.GradScaler`."""

    def _agreement(self, optimizer: Optimizer) -> Agreement:
        """The ranks that must agree on an optimizer's steps."""
        if isinstance(optimizer, FusedOptimizer):
            agreement = optimizer._agreement()
        else:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            known = self._agreements.get(optimizer)
            if known is None or not identical(params, known[0]):
                known = self._agreements[optimizer] = params, Agreement(params, self._shard_group)
            agreement = known[1]
        agreement.check("GradScaler")
        self._together = agreement if agreement else self._together
        return agreement

    def _agreed(self, agreement: Agreement, flags: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """The flags combined over all ranks."""
        if not agreement:
            return flags
        device = next(iter(flags), self._scale.device)
        flag = largest_flag([*flags.values(), torch.zeros((), dtype=torch.float32, device=device)], device)
        return {device: agreement.reduce(torch.zeros_like(flag), flag)[1]}


def local_grads(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's gradients as dense tensors: the values of a sparse tensor, the local shard of a DTensor.

    A float16 sparse gradient is coalesced first, as in torch, because summing duplicate entries may overflow. This replaces
    ``.grad``.
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
    """True if there is a tensor subclass that only torch's own ops can handle."""
    return any(is_traceable_wrapper_subclass(grad) and not is_dtensor(grad) for grad in grads)

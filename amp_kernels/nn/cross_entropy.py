"""``CrossEntropyLoss``: torch.nn.CrossEntropyLoss over ``amp_kernels.cross_entropy``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.cross_entropy import cross_entropy
from ._derived import shown


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss whose forward is :func:`amp_kernels.cross_entropy`; same buffer and state_dict.

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: as in torch.nn.CrossEntropyLoss.
        z_loss: coefficient of the squared ``logsumexp``.
        inplace: overwrite the logits with their gradient.

    Examples:
        >>> criterion = ak.nn.CrossEntropyLoss(label_smoothing=0.1, z_loss=1e-4, inplace=True)
        >>> head, hidden = ak.nn.Linear(64, 1000, dtype=torch.bfloat16), torch.randn(8, 64).bfloat16()
        >>> loss = criterion(head(hidden), torch.randint(1000, (8,)))  # overwrites the logits
        >>> loss.backward()
        >>> head.weight.grad.shape
        torch.Size([1000, 64])
    """

    z_loss: float = 0.0
    inplace: bool = False

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        inplace: bool = False,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss = z_loss
        self.inplace = inplace

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        options = {
            name: getattr(self, name)
            for name, default in (("z_loss", 0.0), ("inplace", False))
            if getattr(self, name) != default
        }
        details = ", ".join(f"{name}={value}" for name, value in options.items())
        return shown(details, "amp_kernels.cross_entropy", torch.nn.CrossEntropyLoss)

"""``LinearCrossEntropyLoss``: a classifier's last layer and loss over ``amp_kernels.linear_cross_entropy``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.linear_cross_entropy import linear_cross_entropy
from .linear import Linear


class LinearCrossEntropyLoss(torch.nn.Module):
    """torch 2.13's module of that name with :func:`amp_kernels.linear_cross_entropy` as its forward; same state_dict
    (``linear.weight``, ``linear.bias``).

    Args:
        in_features: size of each input row.
        num_classes: rows of the weight.
        bias, device, dtype: of the layer.
        reduction, weight, ignore_index, label_smoothing: as in torch.nn.CrossEntropyLoss.
        z_loss: coefficient of the squared ``logsumexp``.
        chunk_size: number of rows whose logits exist at a time.

    Shapes: ``[..., in_features]`` and a target ``[...]`` or ``[..., num_classes]``.

    Examples:
        >>> head = ak.nn.LinearCrossEntropyLoss(64, 1000, dtype=torch.bfloat16)
        >>> hidden = torch.randn(2, 10, 64, dtype=torch.bfloat16)
        >>> target = torch.randint(1000, (2, 10))
        >>> head(hidden, target).backward()  # no [2, 10, 1000] logits in memory at once
        >>> head.linear.weight.grad.shape
        torch.Size([1000, 64])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        self.linear = Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.chunk_size = chunk_size

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            chunk_size=self.chunk_size,
        )

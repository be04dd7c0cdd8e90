"""``LinearCrossEntropyLoss``: a classifier's last layer and loss over ``amp_kernels.linear_cross_entropy``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.loss import _WeightedLoss

from .functional import linear_cross_entropy
from .linear import Linear

Base = getattr(torch.nn, "LinearCrossEntropyLoss", _WeightedLoss)  # from torch 2.13 on


class LinearCrossEntropyLoss(Base):
    """torch 2.13's module of that name with :func:`amp_kernels.linear_cross_entropy` as its forward; same arguments and state_dict
    (``linear.weight``, ``linear.bias``).

    Args:
        in_features: size of each input row.
        num_classes: rows of the weight for each prediction.
        out_features: dimensions of several predictions for each row, as in torch. With these all logits are made, in torch's
            module too.
        bias, device, dtype: of the layer.
        reduction, weight, ignore_index, label_smoothing: as in torch.nn.CrossEntropyLoss.
        options: torch's choice of chunks, which is not read: this module always works in chunks and sums in fp32.
        z_loss: coefficient of the squared ``logsumexp``.
        chunk_size: number of rows whose logits exist at a time; not with ``out_features``.

    Shapes: ``[..., in_features]`` and a target ``[...]`` or ``[..., num_classes]``; with ``out_features`` ``[N, in_features]`` and
    ``[N, *out_features]`` or ``[N, num_classes, *out_features]``.

    Raises:
        ValueError: ``chunk_size`` is given with ``out_features``, or a shape or option does not fit in a call.

    Examples:
        >>> head = ak.nn.LinearCrossEntropyLoss(64, 1000, dtype=torch.bfloat16)
        >>> hidden = torch.randn(2, 10, 64, dtype=torch.bfloat16)
        >>> target = torch.randint(1000, (2, 10))
        >>> head(hidden, target).backward()  # no [2, 10, 1000] logits in memory at once
        >>> head.linear.weight.grad.shape
        torch.Size([1000, 64])
    """

    out_features: tuple[int, ...] = ()
    options: Any = None
    z_loss: float = 0.0
    chunk_size: int | None = None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        z_loss: float = 0.0,
        chunk_size: int | None = None,
    ) -> None:
        out_features = tuple(out_features)
        if out_features and chunk_size is not None:
            raise ValueError(
                f"LinearCrossEntropyLoss: chunk_size is {chunk_size}; accepted with out_features={out_features}: None"
            )
        torch.nn.Module.__init__(self)
        self.linear = Linear(in_features, math.prod(out_features, start=num_classes), bias, device, dtype)
        self.register_buffer("weight", weight)
        self.num_classes = num_classes
        self.out_features = out_features
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.options = options
        self.z_loss = z_loss
        self.chunk_size = chunk_size

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        linear_weight, linear_bias = self.linear.weight, self.linear.bias
        if self.out_features:
            predictions = self.num_classes, *self.out_features
            linear_weight = linear_weight.unflatten(0, predictions)
            linear_bias = None if linear_bias is None else linear_bias.view(predictions)
        more = {} if self.out_features else {"chunk_size": self.chunk_size}
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            **more,
        )

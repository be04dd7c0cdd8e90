"""``GroupedLinear``: a linear layer for each group of rows, such as the experts of a mixture."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._checks.activations import GATED, check_activation
from ..ops.grouped_mm import grouped_linear


class GroupedLinear(torch.nn.Module):
    """``num_groups`` linear layers of one shape; each takes its own rows of the input (:func:`amp_kernels.grouped_mm`).

    Args:
        num_groups, in_features, out_features: sizes of the weight, ``[num_groups, out_features, in_features]``.
        bias: whether there is a bias, ``[num_groups, out_features]``.
        device, dtype: as in torch.nn.Linear.
        activation: as in :class:`Linear`.

    Parameters are uniform within ``1 / sqrt(in_features)``, as those of torch.nn.Linear.

    ``forward(x, offs)``: ``[T, in_features]`` and int32 ``[num_groups]``, the exclusive end of each group's rows, to
    ``[T, out_features]``. Rows past the last end are zero. ``forward(x, offs, gather=, scatter=, weights=)`` takes the rows of tokens
    and returns their weighted sums, as :func:`amp_kernels.grouped_mm` does.

    Raises:
        ValueError: ``activation`` is not accepted, or is ``"swiglu"`` with an odd ``out_features``.

    Examples:
        >>> experts = ak.nn.GroupedLinear(4, 16, 8)
        >>> offs = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     experts(torch.randn(6, 16), offs).shape
        torch.Size([6, 8])
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        check_activation("GroupedLinear", activation)
        if activation in GATED and out_features % 2:
            raise ValueError(
                f"GroupedLinear: out_features is {out_features}; accepted with activation={activation!r}: an even number, "
                "half of them gates"
            )
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.activation = activation
        options = {"device": device, "dtype": dtype}
        self.weight = torch.nn.Parameter(torch.empty(num_groups, out_features, in_features, **options))
        self.bias = torch.nn.Parameter(torch.empty(num_groups, out_features, **options)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Not kaiming_uniform_, which takes out_features x in_features for the fan of three dimensions.
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in self.parameters(recurse=False):
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: torch.Tensor,
        offs: torch.Tensor,
        *,
        gather: torch.Tensor | None = None,
        scatter: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        routes = {"gather": gather, "scatter": scatter, "weights": weights}
        return grouped_linear(x, self.weight, offs, self.bias, activation=self.activation, **routes)

    def extra_repr(self) -> str:
        text = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self.bias is not None}"
        return text + (f", activation={self.activation!r}" if self.activation else "")

"""``Linear``: torch.nn.Linear over ``amp_kernels.linear``, with an optional fused activation."""

from __future__ import annotations

from typing import Any

import torch

from .._checks.activations import GATED, check_activation
from ..ops.linear import linear
from ._derived import shown


class Linear(torch.nn.Linear):
    """torch.nn.Linear whose forward is :func:`amp_kernels.linear`; same parameters, initialisation and state_dict.

    Args:
        in_features, out_features, bias, device, dtype: as in torch.nn.Linear.
        activation: ``None``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"silu"`` or ``"swiglu"``, applied in fp32
            before the result is rounded.

    Shapes: ``[..., in_features]`` to ``[..., out_features]``; with ``"swiglu"`` to ``[..., out_features / 2]``, because the
    first half of the features gates the second (:func:`amp_kernels.linear`).

    Raises:
        ValueError: ``activation`` is not one of these, or is ``"swiglu"`` with an odd ``out_features``.

    Examples:
        >>> layer = ak.nn.Linear(16, 8, activation="relu")
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     y = layer(torch.randn(4, 16))
        >>> y.shape, y.dtype, bool((y >= 0).all())
        (torch.Size([4, 8]), torch.bfloat16, True)
    """

    activation: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        check_activation("Linear", activation)
        if activation in GATED and out_features % 2:
            raise ValueError(
                f"Linear: out_features is {out_features}; accepted with activation={activation!r}: an even number, "
                "half of them gates"
            )
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        details = super().extra_repr() + (f", activation={self.activation!r}" if self.activation else "")
        return shown(details, "amp_kernels.linear", torch.nn.Linear)

"""``MLP``: the feed-forward block of a transformer over ``amp_kernels.mlp``."""

from __future__ import annotations

from typing import Any

import torch

from .._checks.activations import GATED, check_activation
from ..ops.mlp import mlp
from ._wrapped import is_untouched
from .linear import Linear


class MLP(torch.nn.Module):
    """``fc2(activation(fc1(x)))`` with the activation and its gradient fused into the GEMMs.

    ``fc1`` and ``fc2`` are :class:`amp_kernels.nn.Linear` modules with torch's initialisation, so the state_dict has
    ``fc1.weight``, ``fc1.bias``, ``fc2.weight`` and ``fc2.bias``. If one of them has hooks or was replaced, parametrised or
    wrapped, the two modules are called one after the other, with the same result up to rounding.

    Args:
        in_features: size of the input.
        hidden_features: size between the layers, after the activation.
        out_features: size of the output; ``in_features`` by default.
        bias: give both layers a bias.
        activation: ``None``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"silu"``, or ``"swiglu"``, the gated
            ``silu(gate) * up``, for which ``fc1`` has ``2 * hidden_features`` rows, gates first.
        recompute: as in :func:`amp_kernels.mlp`.
        device, dtype: as in torch.nn.Linear.

    Shapes: ``[..., in_features]`` to ``[..., out_features]``.

    Raises:
        ValueError: ``activation`` is not one of these.

    Examples:
        >>> block = ak.nn.MLP(64, 172, activation="swiglu", bias=False, dtype=torch.bfloat16)
        >>> [(name, list(weight.shape)) for name, weight in block.state_dict().items()]
        [('fc1.weight', [344, 64]), ('fc2.weight', [64, 172])]
        >>> block(torch.randn(2, 10, 64, dtype=torch.bfloat16)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        activation: str | None = "gelu",
        device: Any = None,
        dtype: torch.dtype | None = None,
        recompute: bool = False,
    ) -> None:
        name = check_activation("MLP", activation)
        super().__init__()
        rows = 2 * hidden_features if name in GATED else hidden_features
        out_features = in_features if out_features is None else out_features
        self.activation, self.recompute = activation, recompute
        self.fc1 = Linear(in_features, rows, bias=bias, device=device, dtype=dtype, activation=activation)
        self.fc2 = Linear(hidden_features, out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        fc1, fc2 = self.fc1, self.fc2
        plain = all(type(fc) is Linear and is_untouched(fc) for fc in (fc1, fc2))
        if plain and fc1.activation == self.activation and fc2.activation is None:
            options = {"activation": self.activation, "recompute": self.recompute}
            return mlp(input, fc1.weight, fc1.bias, fc2.weight, fc2.bias, **options)
        return fc2(fc1(input))

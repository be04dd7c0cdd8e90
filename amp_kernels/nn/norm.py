"""``LayerNorm`` and ``RMSNorm``: torch's modules over ``amp_kernels.layer_norm`` and ``amp_kernels.rms_norm``."""

from __future__ import annotations

import torch

from ..ops.norm import layer_norm, rms_norm
from ._derived import shown
from .waiting import fetched


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm whose forward is :func:`amp_kernels.layer_norm`; same arguments, parameters and state_dict.

    ``norm(x, residual=r)`` returns ``(norm(x + r), x + r)`` in one pass.

    Examples:
        >>> norm = ak.nn.LayerNorm(64)
        >>> x, residual = torch.randn(4, 64), torch.randn(4, 64)
        >>> y, total = norm(x, residual=residual)
        >>> torch.equal(total, x + residual)
        True
    """

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None):
        if residual is None and (y := fetched(self, input)) is not None:
            return y
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, residual=residual)

    def extra_repr(self) -> str:
        return shown(super().extra_repr(), "amp_kernels.layer_norm", torch.nn.LayerNorm)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm whose forward is :func:`amp_kernels.rms_norm`; same arguments, parameters and state_dict.

    ``norm(x, residual=r)`` returns ``(norm(x + r), x + r)`` in one pass.

    Examples:
        >>> norm = ak.nn.RMSNorm(4)
        >>> norm(torch.tensor([[2.0, -2.0, 2.0, 2.0]], dtype=torch.bfloat16)).data
        tensor([[ 1., -1.,  1.,  1.]], dtype=torch.bfloat16)
    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        if residual is None and (y := fetched(self, x)) is not None:
            return y
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, residual=residual)

    def extra_repr(self) -> str:
        return shown(super().extra_repr(), "amp_kernels.rms_norm", torch.nn.RMSNorm)

"""``LayerNorm`` and ``RMSNorm``: torch's modules over ``amp_kernels.layer_norm`` and ``amp_kernels.rms_norm``."""

from __future__ import annotations

import torch

from ..ops.norm import layer_norm, rms_norm


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm whose forward is :func:`amp_kernels.layer_norm`; same arguments, parameters and state_dict.

    ``norm(x, residual=r)`` returns ``(norm(x + r), x + r)`` in one pass.
    """

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None):
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, residual=residual)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm whose forward is :func:`amp_kernels.rms_norm`; same arguments, parameters and state_dict.

    ``norm(x, residual=r)`` returns ``(norm(x + r), x + r)`` in one pass.
    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, residual=residual)

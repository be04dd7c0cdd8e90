"""``Embedding``: torch's module over ``amp_kernels.embedding``."""

from __future__ import annotations

import torch

from ..ops.embedding import embedding
from ._derived import shown


class Embedding(torch.nn.Embedding):
    """torch.nn.Embedding whose forward is :func:`amp_kernels.embedding`; same arguments, parameters and state_dict.

    Examples:
        >>> table = ak.nn.Embedding(50257, 8, padding_idx=0, dtype=torch.bfloat16)
        >>> table(torch.tensor([[1, 0, 1]])).sum().backward()
        >>> table.weight.grad[:2, 0]
        tensor([0., 2.], dtype=torch.bfloat16)
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )

    def extra_repr(self) -> str:
        return shown(super().extra_repr(), "amp_kernels.embedding", torch.nn.Embedding)

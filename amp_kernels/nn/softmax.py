"""``Softmax`` and ``LogSoftmax``: torch's modules over ``amp_kernels.softmax`` and ``amp_kernels.log_softmax``."""

from __future__ import annotations

import torch

from . import functional


class Softmax(torch.nn.Softmax):
    """torch.nn.Softmax whose forward is :func:`amp_kernels.softmax`.

    Examples:
        >>> ak.nn.Softmax(-1)(torch.zeros(2, 4, dtype=torch.bfloat16))[0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.bfloat16)
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.softmax(input, self.dim)


class LogSoftmax(torch.nn.LogSoftmax):
    """torch.nn.LogSoftmax whose forward is :func:`amp_kernels.log_softmax`.

    Examples:
        >>> ak.nn.LogSoftmax(-1)(torch.zeros(4))
        tensor([-1.3863, -1.3863, -1.3863, -1.3863])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(input, self.dim)

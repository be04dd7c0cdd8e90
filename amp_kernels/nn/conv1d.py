"""``Conv1D``, Hugging Face's linear layer of GPT-2 with a transposed weight, over ``amp_kernels.linear``."""

from __future__ import annotations

import torch

from ..ops.linear import linear
from ._derived import shows


def is_conv1d(kind: type) -> bool:
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


@shows("amp_kernels.linear")
def forward(self, x: torch.Tensor) -> torch.Tensor:
    return linear(x, self.weight.t(), self.bias)

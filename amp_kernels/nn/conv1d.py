"""``Conv1D``, the linear layer of Hugging Face's GPT-2 with its transposed weight, over ``amp_kernels.linear``.

The class is derived from theirs when the first such module is converted; nothing here imports transformers before that.
"""

from __future__ import annotations

from functools import cache

import torch

from ..ops.linear import linear


def is_conv1d(kind: type) -> bool:
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


@cache
def derived(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class that takes the place of ``base``, which :func:`is_conv1d`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight.t(), self.bias)

    return type("Conv1D", (base,), {"forward": forward, "__module__": __name__, "__doc__": __doc__})


def __getattr__(name: str) -> type[torch.nn.Module]:  # what pickle looks up
    if name != "Conv1D":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers.pytorch_utils import Conv1D

    return derived(Conv1D)

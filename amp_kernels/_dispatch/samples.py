"""Seeded tensors of normally distributed numbers, for the samples of ops and for tests."""

from __future__ import annotations

import torch


class Normal:
    """``normal(*shape, dtype=...)``: the next tensor of a sequence that depends on the seed alone, not on the device.

    ``generator`` is the CPU generator behind it, for numbers of other distributions.
    """

    def __init__(self, device: torch.device | str = "cpu", *, seed: int = 0, grad: bool = False):
        self.device, self.grad = device, grad
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(
        self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, grad: bool | None = None
    ) -> torch.Tensor:
        """``scale``: the standard deviation. ``grad``: whether the tensor requires gradients."""
        values = scale * torch.randn(shape, generator=self.generator)
        return values.to(self.device, dtype).requires_grad_(self.grad if grad is None else grad)

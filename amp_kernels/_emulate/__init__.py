"""CUDA kernels on CPU tensors, for debugging: the kernel's own source runs on the emulator (``csrc/emulator``).

It reports out of bounds and uninitialised accesses, races, deadlocks and broken rules of the asynchronous units. Slow: some
hundred nanoseconds an element. ``AMP_KERNELS_EMULATE_SEED`` chooses the schedule of threads and copies (default 0); an error
names its seed, and the same seed gives the same run.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .. import _emulator

DTYPE_CODES = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
}  # enum DType of csrc/device/tensor_list.cuh

Piece = tuple[str, int, int, bool]


class Memory:
    """The tensors that a kernel may touch. Anything outside of them is out of bounds for it."""

    def __init__(self):
        _emulator.set_options(seed=int(os.environ.get("AMP_KERNELS_EMULATE_SEED", "0")))
        self.pieces: list[Piece] = []

    def add(self, name: str, tensor: Tensor | None, initialised: bool = True) -> int:
        """The address of ``tensor``'s first element, 0 for ``None``. Its elements are dense."""
        if tensor is None or tensor.numel() == 0:
            return 0
        self.pieces.append((name, tensor.data_ptr(), tensor.numel() * tensor.element_size(), initialised))
        return tensor.data_ptr()

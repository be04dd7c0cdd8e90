"""Tensor maps (CUDA Driver API, cuTensorMapEncodeTiled) as the fake runtime writes them, and how TMA lays boxes into shared memory
(PTX ISA §5.5)."""

import struct
from dataclasses import dataclass

import numpy as np

from .memory import PARAM_WINDOW
from .types import PtxError

LAYOUT = struct.Struct("<QiiQ5Q4Q5Ii")  # mirrored in fake_cuda/launch.cpp
MAGIC = 0x544D4150
ELEMENT_BYTES = {6: 2, 9: 2, 7: 4}  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16, BFLOAT16, FLOAT32
KIND = {6: "f16", 9: "bf16", 7: "f32"}
# §5.5.6: the 16-byte chunk within a row of 32, 64 or 128 bytes is exchanged by the number of the 128-byte line
SWIZZLE_MASK = {0: 0, 1: 1, 2: 3, 3: 7}


def swizzled(address: np.ndarray, mode: int) -> np.ndarray:
    return address ^ (((address >> 7) & SWIZZLE_MASK[mode]) << 4)


@dataclass(frozen=True)
class TensorMap:
    kind: str
    element: int
    base: int
    size: tuple
    stride: tuple  # bytes, of all dimensions
    box: tuple
    swizzle: int

    @property
    def bytes(self) -> int:
        return int(np.prod(self.box)) * self.element

    def shared_places(self, at: int, text: str) -> np.ndarray:
        """Addresses of the box's elements in shared memory, first dimension fastest."""
        if at % 128:
            raise PtxError(f"a box at shared address {at:#x}, which is no multiple of 128: {text}")
        if self.swizzle and self.box[0] * self.element != 16 << self.swizzle:
            raise PtxError(f"a box narrower than its swizzle has no meaning here: {text}")
        return swizzled(at + self.element * np.arange(int(np.prod(self.box))), self.swizzle)

    def global_places(self, coordinates: tuple) -> tuple[np.ndarray, np.ndarray]:
        """(offsets from the base, which of them are inside of the tensor)"""
        offset, inside = np.zeros((), np.int64), np.ones((), bool)
        for size, stride, box, first in zip(self.size, self.stride, self.box, coordinates, strict=True):
            x = first + np.arange(box)
            # dimensions to come are outer ones: they get axes in front
            offset = np.where((x >= 0) & (x < size), x, 0).reshape(box, *[1] * offset.ndim) * stride + offset
            inside = ((x >= 0) & (x < size)).reshape(box, *[1] * inside.ndim) & inside
        # built from the inside out: the first dimension became the last axis
        return offset.reshape(-1), inside.reshape(-1)


_decoded: dict[bytes, TensorMap] = {}


def tensor_map(block, address: int, rank: int, text: str) -> TensorMap:
    """The map at a generic address (§9.7.9.27.1.2: in param, const or global space, 64-byte aligned)."""
    if address >> 57 != PARAM_WINDOW >> 57:
        raise PtxError(f"a tensor map outside of the kernel's parameters has no meaning here: {address:#x}: {text}")
    at = address - PARAM_WINDOW
    if at % 64 or at + 128 > block.launch.parameters.size:
        raise PtxError(f"a tensor map at byte {at} of {block.launch.parameters.size} of the parameters: {text}")
    raw = block.launch.parameters.bytes[at : at + 128].tobytes()
    if raw not in _decoded:
        magic, kind, n, base, *rest = LAYOUT.unpack_from(raw)
        if magic != MAGIC:
            raise PtxError(f"there is no tensor map at byte {at} of the parameters: {text}")
        element = ELEMENT_BYTES[kind]
        size, stride, box = rest[:n], [element, *rest[5 : 5 + n - 1]], rest[9 : 9 + n]
        _decoded[raw] = TensorMap(KIND[kind], element, base, tuple(size), tuple(stride), tuple(box), rest[14])
    found = _decoded[raw]
    if len(found.size) != rank:
        raise PtxError(f"a map of {len(found.size)} dimensions: {text}")
    return found

"""State spaces (PTX ISA 9.0, §5.1): buffers of global memory, shared memory, kernel parameters. Every access is checked for alignment
and bounds."""

import bisect
import ctypes

import numpy as np

from .order import GRANULE, PROXY_GLOBAL, PROXY_SHARED, Shadow
from .types import UNSIGNED, PtxError

# Windows of the generic address space (§5.1.1): where shared memory and parameters lie is not specified.
PARAM_WINDOW, SHARED_WINDOW = 1 << 57, 1 << 58
CLUSTER_STRIDE = (
    1 << 24
)  # of the shared::cluster window: rank r begins at (r + 1) * CLUSTER_STRIDE; below it is a block's own


class Region:
    """Bytes, seen as elements of 1 to 8 bytes."""

    def __init__(self, data: np.ndarray, size: int, base: int, name: str, shadow: Shadow | None):
        self.bytes = data[:size]
        self.base, self.size, self.name, self.shadow = base, size, name, shadow
        self.elements = {n: data[: data.size // 8 * 8].view(UNSIGNED[n]) for n in (1, 2, 4, 8)}

    def places(self, addresses: np.ndarray, total: int, element: int, text: str) -> np.ndarray:
        """Element numbers of accesses to `total` bytes at `addresses` (§6.4.1: aligned to their size)."""
        at = addresses - np.uint64(self.base)
        if (addresses & np.uint64(total - 1)).any():
            raise PtxError(
                f"misaligned for {total} bytes: address {int(addresses[(addresses % total) != 0][0]):#x}: {text}"
            )
        if self.size < total or (at > np.uint64(self.size - total)).any():
            worst = int(at.max())
            raise PtxError(f"{self.name}: {total} bytes at offset {worst} of {self.size}: {text}")
        return (at // np.uint64(element)).astype(np.int64)


def granules(addresses: np.ndarray, base: int, total: int) -> np.ndarray:
    """[access, granule] of accesses to `total` bytes."""
    first = ((addresses - np.uint64(base)) // np.uint64(GRANULE)).astype(np.int64)
    return first[:, None] + np.arange(total // GRANULE)


def granules_of(elements: np.ndarray, element: int) -> np.ndarray:
    """Granules of elements of `element` bytes each, by their places."""
    per = element // GRANULE
    return (elements.reshape(-1, 1) * per + np.arange(per)).reshape(-1)


def shared_region(size: int) -> Region:
    padded = np.empty(-(-size // 16) * 16 + 16, np.uint8)
    return Region(padded, size, 0, "shared memory", Shadow(padded.size, PROXY_SHARED, "shared memory", True))


class Parameters(Region):
    """The kernel's arguments, read-only."""

    def __init__(self, data: bytes):
        padded = np.zeros(-(-len(data) // 16) * 16 + 16, np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        super().__init__(padded, len(data), 0, "kernel parameters", None)


class GlobalMemory:
    """The buffers that exist on the device."""

    def __init__(self):
        self.regions: dict[int, Region] = {}
        self.bases: list[int] = []
        self.last: Region | None = None

    def set_buffers(self, buffers: list[tuple[int, int]]) -> None:
        given = set(buffers)
        kept = {base: r for base, r in self.regions.items() if (base, r.size) in given}
        for base, size in buffers:
            if base not in kept and size:
                data = np.ctypeslib.as_array((ctypes.c_uint8 * (-(-size // 8) * 8)).from_address(base))
                name = f"global buffer of {size} bytes at {base:#x}"
                kept[base] = Region(data, size, base, name, Shadow(size, PROXY_GLOBAL, name, False))
        self.regions, self.bases, self.last = kept, sorted(kept), None

    def at(self, address: int, text: str) -> Region:
        """The buffer that holds the address, or the one in front of it."""
        i = bisect.bisect_right(self.bases, address) - 1
        region = self.regions[self.bases[i]] if i >= 0 else None
        if region is None or address >= region.base + region.size:
            near = f"; {address - region.base} bytes from the begin of the {region.name}" if region else ""
            raise PtxError(f"global address {address:#x} is in no buffer{near}: {text}")
        return region

    def split(self, addresses: np.ndarray, text: str):
        """Pairs of a region and which of the accesses go to it (None: all)."""
        low, high = int(addresses.min()), int(addresses.max())
        region = self.last
        if region is None or not region.base <= low < region.base + region.size:
            region = self.last = self.at(low, text)
        if high < region.base + region.size:
            return [(region, None)]
        starts = np.array(self.bases, np.uint64)
        which = np.searchsorted(starts, addresses, "right") - 1
        return [(self.at(int(addresses[which == i].min()), text), which == i) for i in np.unique(which)]

"""Loads and stores, PTX ISA §9.7.9.8 (ld) and §9.7.9.11 (st), and their memory order (§8)."""

import numpy as np

from ..memory import CLUSTER_STRIDE, PARAM_WINDOW, SHARED_WINDOW, granules
from ..order import ASYNC, PLAIN, STRONG
from ..text import Symbol, Vector
from ..types import BYTES, UNSIGNED, PtxError, numpy_type
from . import meaning

ORDER = r"(\.(?P<order>weak|volatile|(relaxed|acquire|release)\.(?P<scope>cta|cluster|gpu|sys)))?"
SPACE = r"(\.(?P<space>global|shared|param)(::(cta|cluster|entry))?)?"
HINTS = r"(\.(ca|cg|cs|lu|cv|nc|wb|wt))?(\.L1::(evict_\w+|no_allocate))?(\.L2::(cache_hint|\d+B|evict_\w+))*"
KIND = r"(\.(?P<vector>v2|v4|v8))?\.(?P<kind>[bus](8|16|32|64)|f32|f64)"


def peer(block, address: int, text: str):
    """The block and the address within it of a shared or shared::cluster address (§5.1.7)."""
    if address < CLUSTER_STRIDE:
        return block, address
    rank = address // CLUSTER_STRIDE - 1
    if rank >= len(block.peers):
        raise PtxError(f"the cluster has no block {rank}: {text}")
    return block.peers[rank], address % CLUSTER_STRIDE


def resolve(block, space: str | None, addresses: np.ndarray, text: str):
    """The memories that accesses go to: triples of region, addresses within its base, and which accesses (None: all)."""
    if space is None:  # generic (§5.1.1)
        window = addresses >> np.uint64(57)
        if (window != window[0]).any():
            raise PtxError(f"one generic access to several state spaces has no meaning here: {text}")
        space = {0: "global", PARAM_WINDOW >> 57: "param", SHARED_WINDOW >> 57: "shared"}.get(int(window[0]))
        if space is None:
            raise PtxError(f"generic address {int(addresses[0]):#x} is in no state space: {text}")
        addresses = addresses - np.uint64({"global": 0, "param": PARAM_WINDOW, "shared": SHARED_WINDOW}[space])
    if space == "param":
        return [(block.launch.parameters, addresses, None)]
    if space == "shared":
        if (addresses >= CLUSTER_STRIDE).any():
            raise PtxError(f"plain access to another block's shared memory has no meaning here: {text}")
        return [(block.shared, addresses, None)]
    parts = block.launch.memory.split(addresses, text)
    return [(region, addresses if which is None else addresses[which], which) for region, which in parts]


def touch(region, block, addresses, threads, total: int, text: str, *, write: bool, kind: int = PLAIN) -> None:
    """Notes accesses of threads in the region's shadow, which checks their order, and in the traffic if it is counted."""
    if region.shadow is None:
        return
    warps = block.warp_of[threads]
    if (traffic := block.launch.device.traffic) and kind == PLAIN:  # others are few, or counters
        place = "shared" if region is block.shared else "stores" if write else "loads"
        traffic.access(block, place, addresses, threads, total, text)
    at = granules(addresses, region.base, total)
    if write:
        region.shadow.write(at, block, warps[:, None], text, kind)
    else:
        region.shadow.read(at, block, warps[:, None], text, proxy=kind == ASYNC, strong=kind == STRONG)


@meaning(rf"ld{ORDER}{SPACE}{HINTS}{KIND}")
def ld(block, instruction, pc, order, scope, space, vector, kind):
    d, a = instruction.operands[:2]
    items = d.items if isinstance(d, Vector) else (d,)
    check_vector(items, vector, instruction)
    size, kind_of = BYTES[kind], numpy_type(kind)
    total, text = size * len(items), instruction.text
    writes, address = [block.writer(item, kind) for item in items], block.address(a)
    if space == "param" and isinstance(a.base, Symbol):  # the same for all threads
        return load_argument(block, a, writes, size, total, kind_of, text)
    # A volatile access may neither be removed nor merged; it is relaxed with system scope (§9.7.9.8).
    strong = order is not None and order != "weak"

    def run(mask):
        all_addresses = address()
        active = all_addresses if mask is True else all_addresses[mask]
        threads = block.thread if mask is True else block.thread[mask]
        values = [np.empty(len(active), kind_of) for _ in items]
        for region, where, which in resolve(block, space, active, text):
            first = region.places(where, total, size, text)
            here = threads if which is None else threads[which]
            touch(region, block, where, here, total, text, write=False, kind=STRONG if strong else PLAIN)
            data = region.elements[size]
            for i, value in enumerate(values):
                value[slice(None) if which is None else which] = data[first + i].view(kind_of)
            if strong:
                acquire(block, order, region, where, block.warp_of[here])
        for value, write in zip(values, writes, strict=True):
            if mask is not True:
                spread = np.zeros(block.size, kind_of)
                spread[mask] = value
                value = spread
            write(value, mask)

    return run


def load_argument(block, a, writes, size, total, kind_of, text):
    at = np.array([a.base.address + a.offset], np.uint64)

    def run(mask):
        parameters = block.launch.parameters
        first = int(parameters.places(at, total, size, text)[0])
        for i, write in enumerate(writes):
            write(parameters.elements[size][first + i : first + i + 1].view(kind_of)[0], mask)

    return run


@meaning(rf"st{ORDER}{SPACE}{HINTS}{KIND}")
def st(block, instruction, pc, order, scope, space, vector, kind):
    a, s = instruction.operands[:2]
    items = s.items if isinstance(s, Vector) else (s,)
    check_vector(items, vector, instruction)
    if space == "param":
        raise PtxError(f"kernel parameters are read-only: {instruction.text}")
    size = BYTES[kind]
    total, text = size * len(items), instruction.text
    sources, address = [block.source(item, f"b{8 * size}") for item in items], block.address(a)
    strong = order is not None and order != "weak"

    def run(mask):
        all_addresses = address()
        active = all_addresses if mask is True else all_addresses[mask]
        threads = block.thread if mask is True else block.thread[mask]
        for region, where, which in resolve(block, space, active, text):
            first = region.places(where, total, size, text)
            here = threads if which is None else threads[which]
            touch(region, block, where, here, total, text, write=True, kind=STRONG if strong else PLAIN)
            for i, source in enumerate(sources):
                value = source
                if np.ndim(source):
                    value = source if mask is True else source[mask]
                    value = value if which is None else value[which]
                region.elements[size][first + i] = value
            if strong:
                release(block, order, region, where, block.warp_of[here])

    return run


def check_vector(items, vector, instruction) -> None:
    if len(items) != int((vector or "v1")[1:]):
        raise PtxError(f"{len(items)} registers: {instruction.text}")


# ---- synchronisation through memory (§8.8 causality order): a release is seen by whoever reads the value with acquire; relaxed
# accesses do the same together with fences
def acquire(block, order: str, region, addresses, warps) -> None:
    knowledge = block.knowledge
    for address, warp in set(zip(addresses.tolist(), warps.tolist(), strict=True)):
        snapshot = region_clock(block, region, address)
        knowledge.pending[:, warp] = np.maximum(knowledge.pending[:, warp], snapshot)
        if order.startswith(("acquire", "acq_rel")):
            knowledge.acquire(np.array([warp]), snapshot)


def release(block, order: str, region, addresses, warps) -> None:
    knowledge = block.knowledge
    for address, warp in set(zip(addresses.tolist(), warps.tolist(), strict=True)):
        one = np.array([warp])
        snapshot = knowledge.release(one) if order.startswith(("release", "acq_rel")) else knowledge.fenced[:, warp]
        np.maximum(region_clock(block, region, address), snapshot, out=region_clock(block, region, address))


def region_clock(block, region, address: int) -> np.ndarray:
    """The values released at an address in this launch. For shared memory, the block is part of the key."""
    key = (region.base, address, None if region.base else block.index)
    clocks = block.launch.clocks
    if key not in clocks:
        clocks[key] = np.zeros((block.knowledge.known.shape[0], block.launch.participants), np.int32)
    return clocks[key]


def bits(size: int):
    return UNSIGNED[size]

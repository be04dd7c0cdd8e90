"""A launch: the grid, its clusters and limits (CUDA C++ Programming Guide, "Technical specifications per compute capability"), and the
loop that runs blocks until all are done or none can go on."""

import numpy as np

from .block import Block
from .memory import GlobalMemory, Parameters
from .order import MBARRIERS
from .schedule import Schedule
from .text import Kernel
from .types import PtxError

LONGEST = 2_000_000  # instructions of groups; more is taken for a loop without end


class Device:
    """State that lasts between launches: memory, participants' numbers, blocks to be used again."""

    def __init__(self, capability: int = 90, shared_limit: int = 227 * 1024):
        self.capability, self.shared_limit = capability, shared_limit
        self.memory = GlobalMemory()
        self.participants = 1
        self.ordered = 0  # launches up to this participant are over, whatever overlaps
        self.pool: dict[tuple, list[Block]] = {}
        self.truncate = False  # tensor cores: see matrix.py
        self.traffic = None  # traffic.py: counts accesses
        self.orders_shared = True  # whether accesses to shared memory must be ordered, for the async proxy too


class Launch:
    def __init__(self, device: Device, kernel: Kernel, grid, block, cluster, shared_bytes: int, arguments: bytes, *,
                 shared_limit: int | None = None, overlapping: bool = False, seed: int = 0):  # fmt: skip
        self.device, self.kernel, self.memory = device, kernel, device.memory
        self.grid, self.block, self.cluster = tuple(grid), tuple(block), tuple(cluster)
        self.threads, self.blocks = int(np.prod(block)), int(np.prod(grid))
        self.cluster_size = int(np.prod(cluster))
        self.shared_bytes, self.parameters = shared_bytes, Parameters(arguments)
        self._check(arguments, shared_limit)
        self.overlapping = overlapping
        self.schedule = Schedule(seed)
        warps = -(-self.threads // 32)
        self.stride = warps + MBARRIERS
        self.participants = 1 + self.blocks * self.stride
        self.base = device.participants
        device.participants += self.participants
        if not overlapping:
            device.ordered = self.base - 1
        self.ordered = device.ordered
        self.clocks: dict = {}  # what was released at an address of memory
        self.in_flight: list = []  # asynchronous operations that any block has begun: objects with complete()
        # Boxes that TMA loaded, and those that it prefetched: pairs of tensor map and coordinates.
        self.loaded: set[tuple] = set()
        self.prefetched: set[tuple] = set()

    def _check(self, arguments: bytes, shared_limit: int | None) -> None:
        k, limit = self.kernel, self.device.shared_limit if shared_limit is None else shared_limit
        rules = [
            (len(arguments) == k.parameter_bytes, f"{len(arguments)} bytes of arguments for {k.parameter_bytes}"),
            (min(self.grid) >= 1 and self.grid[0] < 2**31 and max(self.grid[1:]) < 2**16, f"a grid of {self.grid}"),
            (1 <= self.threads <= min(k.max_threads, 1024), f"{self.threads} threads; at most {k.max_threads}"),
            (k.exact_threads in (None, self.threads), f"{self.threads} threads; the kernel wants {k.exact_threads}"),
            (1 <= self.cluster_size <= 8, f"a cluster of {self.cluster_size} blocks; at most 8"),
            (self.cluster_size == 1 or self.device.capability >= 90, "clusters exist from sm_90 on"),
            (all(g % c == 0 for g, c in zip(self.grid, self.cluster, strict=True)), "a grid of whole clusters"),
            (
                self.shared_bytes <= limit,
                f"{self.shared_bytes} bytes of dynamic shared memory; the kernel may have {limit}",
            ),
            (k.dynamic_at + self.shared_bytes <= self.device.shared_limit, "more shared memory than a block may have"),
            (k.parameter_bytes <= (4096 if self.device.capability < 70 else 32764), "too many bytes of parameters"),
        ]
        for holds, why in rules:
            if not holds:
                raise PtxError(f"launch of {k.name}: {why}")

    def first_participant(self, index: int) -> int:
        return 1 + index * self.stride

    def participant(self, number: int) -> str:
        """The participant's name, for messages."""
        index, place = divmod(number - 1, self.stride)
        warps = self.stride - MBARRIERS
        return f"block {index}, " + (f"warp {place}" if place < warps else f"mbarrier {place - warps}")

    def special(self, index: int, rank: int) -> dict[str, int]:
        """Special registers of a block (§10). Blocks of a cluster are numbered along x here: other clusters have no user."""
        if self.cluster[1:] != (1, 1):
            raise PtxError(f"launch of {self.kernel.name}: a cluster of {self.cluster}; only x is modelled")
        gx, gy, _ = self.grid
        position = (index % gx, index // gx % gy, index // (gx * gy))
        values = {"cluster_ctarank": rank, "cluster_nctarank": self.cluster_size, "smid": 0}
        for axis, at, size, c in zip("xyz", position, self.grid, self.cluster, strict=True):
            values |= {f"ctaid.{axis}": at, f"nctaid.{axis}": size, f"clusterid.{axis}": at // c}
            values |= {f"nclusterid.{axis}": size // c, f"cluster_ctaid.{axis}": at % c, f"cluster_nctaid.{axis}": c}
        return values

    def _block(self) -> Block:
        key = (self.kernel, self.block, self.shared_bytes)
        spare = self.device.pool.setdefault(key, [])
        return spare.pop() if spare else Block(self.kernel, self.threads, self.block, self.shared_bytes)

    def _start_cluster(self, number: int) -> list[Block]:
        blocks = [self._block() for _ in range(self.cluster_size)]
        for rank, block in enumerate(blocks):
            block.reset(self, number * self.cluster_size + rank, rank)
            block.peers, block.cluster_barrier = blocks, {"arrived": 0, "snapshot": None}
        for block in blocks:
            block.cluster_barrier = blocks[0].cluster_barrier
        return blocks

    def run(self) -> "Launch":
        with np.errstate(all="ignore"):
            self._run()
        return self

    def _run(self) -> None:
        clusters, number = self.blocks // self.cluster_size, 0
        active: list[list[Block]] = []
        order = list(range(clusters))
        if not self.schedule.plain:
            self.schedule.random.shuffle(order)
        self.executed = 0
        while number < clusters or active:
            while number < clusters and len(active) < self.schedule.resident:
                active.append(self._start_cluster(order[number]))
                number += 1
            blocks = [b for cluster in active for b in cluster]
            ran = [b.step(self.schedule) for b in self.schedule.blocks([b for b in blocks if not b.done()])]
            completed = self.schedule.now(list(self.in_flight))
            for operation in completed:
                self.complete(operation)
            if not any(ran) and not completed:
                if self.in_flight:
                    self.complete(self.in_flight[0])
                elif not all(b.done() for b in blocks):
                    lines = "; ".join(line for b in blocks for line in b.stuck())
                    raise PtxError(f"{self.kernel.name}: deadlock: {lines}")
            self.executed += sum(b.executed for b in blocks)
            if self.executed > LONGEST:
                raise PtxError(f"{self.kernel.name}: no end in sight")
            for b in blocks:
                b.executed = 0
            for cluster in [c for c in active if all(b.done() for b in c)]:
                self._end_cluster(cluster)
                active.remove(cluster)

    def _end_cluster(self, cluster: list[Block]) -> None:
        for block in cluster:
            touched = [o for o in self.in_flight if block in o.blocks]
            for operation in touched:
                if operation.must_be_waited_for:
                    raise PtxError(f"block {block.index} has ended before the copy: {operation.text}")
                self.complete(operation)
        for block in cluster:
            self.device.pool[self.kernel, self.block, self.shared_bytes].append(block)

    def begin(self, operation) -> None:
        """An asynchronous operation: completes now, later, or when nothing else can go on."""
        self.in_flight.append(operation)
        if self.schedule.at_once():
            self.complete(operation)

    def complete(self, operation) -> None:
        if operation in self.in_flight:
            self.in_flight.remove(operation)
            operation.complete()

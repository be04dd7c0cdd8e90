"""Knowledge of accesses: vector clocks over warps (PTX ISA 9.0, §8: causality order, proxies) and the shadow of a memory.

A participant is a warp of the launch, an mbarrier (for the bytes that asynchronous copies bring through it), or "earlier": all kernels
in front of this one. A warp's epoch grows with every release; an access is tagged with its warp and epoch, and a later conflicting
access of another warp must know that epoch.
"""

import numpy as np

from .types import PtxError

SEEN = 0  # ordered before, for accesses of the same proxy
PROXY_SHARED, PROXY_GLOBAL = 1, 2  # ordered before, with a proxy fence on the way (§8.6.1, §9.7.13.4 fence.proxy.async)
INITIALISED = 3  # mbarrier.init, made visible to the cluster and the async proxy (§9.7.13.4 fence.mbarrier_init)
VIEWS = 4
EARLIER = 0  # the participant
MBARRIERS = 64  # participants kept for the mbarriers of a block

PLAIN, STRONG, ASYNC = 0, 1, 2  # kinds of access: plain; atomic or relaxed; by the async proxy
NOBODY, IN_FLIGHT = 0, -1  # in place of a writer: never written; an asynchronous copy is about to write
GRANULE = 1  # bytes that one entry of a shadow stands for


class Knowledge:
    """The knowledge of a block's warps: [view, warp, participant] -> epoch."""

    def __init__(self, warps: int, participants: int, first: int):
        self.known = np.zeros((VIEWS, warps, participants), np.int32)
        self.first = first  # participant of warp 0; then the warps, then the mbarriers
        self.warps = warps
        self.epoch = np.ones(warps, np.int32)
        self.own = np.arange(warps)
        self.known[SEEN, self.own, first + self.own] = 1
        self.fenced = np.zeros((VIEWS, warps, participants), np.int32)  # at the warp's last fence
        self.pending = np.zeros((VIEWS, warps, participants), np.int32)  # read by relaxed loads, known after a fence

    def start(self, overlapping: bool) -> None:
        self.known[SEEN, :, EARLIER] = 0 if overlapping else 1

    def tick(self, warps) -> None:
        self.epoch[warps] += 1
        self.known[SEEN, warps, self.first + warps] = self.epoch[warps]

    def release(self, warps) -> np.ndarray:
        """The knowledge of these warps, for others to acquire."""
        snapshot = self.known[:, warps].max(axis=1)
        self.tick(warps)
        return snapshot

    def acquire(self, warps, snapshot: np.ndarray) -> None:
        self.known[:, warps] = np.maximum(self.known[:, warps], snapshot[:, None])

    def fence(self, warps) -> None:
        """§9.7.13.4, fence.acq_rel and membar: orders relaxed accesses around it."""
        self.known[:, warps] = np.maximum(self.known[:, warps], self.pending[:, warps])
        self.fenced[:, warps] = self.known[:, warps]
        self.tick(warps)

    def fence_view(self, warps, view: int) -> None:
        """A proxy fence: what is ordered before it is from now on visible in that view."""
        self.known[view, warps] = np.maximum(self.known[view, warps], self.known[SEEN, warps])
        self.tick(warps)


class Shadow:
    """Per granule of a memory: the last writer, and the last readers of two warps."""

    def __init__(self, size: int, view: int, name: str, must_be_written: bool):
        n = -(-size // GRANULE)
        self.view, self.name, self.must_be_written = view, name, must_be_written
        self.writer, self.write_epoch = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.kind = np.zeros(n, np.uint8)
        self.reader, self.read_epoch = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.reader2, self.read_epoch2 = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.being_read = np.zeros(n, np.int16)  # by asynchronous copies in flight
        self.quiet = True  # nothing was ever recorded

    def clear(self) -> None:
        for array in (self.writer, self.reader, self.reader2, self.being_read):
            array[:] = 0

    def _check(self, who, epoch, kind, block, warps, what: str, text: str, proxy: bool, strong: bool) -> None:
        if not who.any():
            return
        index = who - block.launch.base
        local = index > 0
        knowledge = block.knowledge.known
        slot = np.where(local, index, 0)
        known = knowledge[SEEN, warps, slot]
        if proxy:
            known = np.where(kind == ASYNC, known, knowledge[self.view, warps, slot])
        bad = local & (epoch > known)
        bad |= ~local & (who > block.launch.ordered) & (knowledge[SEEN, warps, EARLIER] == 0)
        if strong:
            bad &= kind != STRONG
        if self.must_be_written and not block.launch.device.orders_shared:
            bad &= False
        bad |= who == IN_FLIGHT
        if bad.any():
            self._report(bad, who, index, block, warps, what, text, proxy)

    def _report(self, bad, who, index, block, warps, what, text, proxy):
        place = tuple(axis[0] for axis in np.nonzero(bad))
        if who[place] == IN_FLIGHT:
            other = "an asynchronous copy in flight"
        elif index[place] <= 0:
            other = "a kernel in front of this one, which may still run"
        else:
            other = block.launch.participant(int(index[place]))
        how = "no barrier, fence or atomic with a proxy fence orders" if proxy else "no barrier, fence or atomic orders"
        warp = np.broadcast_to(warps, bad.shape)[place]
        raise PtxError(
            f"{self.name}: {how} {what} of {other} before this access of block {block.index}, warp {warp}: {text}"
        )

    def read(self, at: np.ndarray, block, warps, text: str, proxy: bool = False, strong: bool = False) -> None:
        """`at` are granules, of any shape; `warps` broadcasts with them."""
        writer = self.writer[at]
        if self.must_be_written and not writer.all():
            raise PtxError(f"{self.name}: bytes are read that nobody wrote, by block {block.index}: {text}")
        if not (self.quiet and not self.must_be_written):
            self._check(writer, self.write_epoch[at], self.kind[at], block, warps, "the write", text, proxy, strong)
        if not strong:
            self.quiet = False
            participant = block.participant + warps
            changed = self.reader[at] != participant
            self.reader2[at] = np.where(changed, self.reader[at], self.reader2[at])
            self.read_epoch2[at] = np.where(changed, self.read_epoch[at], self.read_epoch2[at])
            self.reader[at] = participant
            self.read_epoch[at] = block.knowledge.epoch[warps]

    def write(self, at: np.ndarray, block, warps, text: str, kind: int = PLAIN) -> None:
        strong = kind == STRONG
        if self.being_read[at].any():
            raise PtxError(f"{self.name}: overwritten while an asynchronous operation may still read it: {text}")
        if not self.quiet:
            plain = np.zeros((), np.uint8)
            self._check(
                self.writer[at], self.write_epoch[at], self.kind[at], block, warps, "the write", text, False, strong
            )
            self._check(self.reader[at], self.read_epoch[at], plain, block, warps, "the read", text, False, False)
            self._check(self.reader2[at], self.read_epoch2[at], plain, block, warps, "the read", text, False, False)
        self.quiet = False
        self.mark(at, block.participant + warps, block.knowledge.epoch[warps], kind)

    def mark(self, at, participant, epoch, kind: int) -> None:
        self.writer[at], self.write_epoch[at], self.kind[at] = participant, epoch, kind
        self.reader[at] = self.reader2[at] = 0

    def mark_in_flight(self, at) -> None:
        self.writer[at] = IN_FLIGHT
        self.quiet = False

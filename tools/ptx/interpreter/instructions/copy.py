"""Copies of threads that do not wait, PTX ISA §9.7.9.25.3 (cp.async): global to shared memory, in groups per thread."""

import numpy as np

from ..memory import granules
from ..order import PLAIN
from ..types import PtxError
from . import meaning
from .memory import resolve, touch


class Copy:
    """The copies of one instruction, of the threads whose groups have not been waited for."""

    must_be_waited_for = False

    def __init__(self, block, threads, to, source, sizes, size, text):
        self.block, self.blocks, self.threads, self.text = block, [block], threads, text
        self.to, self.source, self.sizes, self.size = to, source, sizes, size
        self.left = np.ones(len(threads), bool)

    def complete(self) -> None:
        self.move(self.left)
        self.left = np.zeros_like(self.left)

    def move(self, which) -> None:
        """Writes the bytes; they are visible to the thread that waits, and marked as its own then."""
        shared = self.block.shared.bytes
        for n in np.unique(self.sizes[which]):
            some = which & (self.sizes == n)
            to = self.to[some].astype(np.int64)[:, None]
            shared[to + np.arange(n, self.size)] = 0
            for region, part in self.block.launch.memory.split(self.source[some], self.text) if n else ():
                where = self.source[some] if part is None else self.source[some][part]
                source = (where - np.uint64(region.base)).astype(np.int64)[:, None] + np.arange(n)
                shared[(to if part is None else to[part]) + np.arange(n)] = region.bytes[source]

    def waited_for(self, threads) -> None:
        """These threads have waited: what they copied is written by them."""
        which = np.isin(self.threads, threads)
        self.move(which & self.left)
        self.left &= ~which
        at = granules(self.to[which], 0, self.size)
        warps = self.block.warp_of[self.threads[which]]
        epochs = self.block.knowledge.epoch[warps]
        self.block.shared.shadow.mark(at, (self.block.participant + warps)[:, None], epochs[:, None], PLAIN)


class Queue:
    """Per thread: the copies since the last commit, and the groups that are not waited for, oldest first."""

    def __init__(self, size: int):
        self.open: list[Copy] = []
        self.groups: list[tuple[np.ndarray, list[Copy]]] = []  # (threads still to wait, copies)


def queue(block) -> Queue:
    return block.state.setdefault("cp.async", Queue(block.size))


# cp.async: .cg copies 16 bytes, .ca also 4 and 8; bytes beyond src-size are zero
@meaning(r"cp\.async\.(?P<cache>ca|cg)\.shared(::cta)?\.global(\.L2::(64|128|256)B)?")
def copy(block, instruction, pc, cache):
    to, source, count, *rest = instruction.operands
    size, text = int(block.source(count, "u32")), instruction.text
    if size not in ((16,) if cache == "cg" else (4, 8, 16)):
        raise PtxError(f"{size} bytes: {text}")
    to_address, source_address = block.address(to), block.address(source)
    valid = block.source(rest[0], "u32") if rest else np.uint32(size)

    def run(mask):
        threads = np.flatnonzero(block.mask)
        to_at, from_at = to_address()[block.mask], source_address()[block.mask]
        sizes = block.per_thread(valid)[block.mask].astype(np.int64)
        if (sizes > size).any():
            raise PtxError(f"a source of {sizes.max()} bytes for {size}: {text}")
        if (from_at & np.uint64(size - 1)).any():
            raise PtxError(f"misaligned for {size} bytes in global memory: {text}")
        block.shared.places(to_at, size, 1, text)
        for n in np.unique(sizes[sizes > 0]):
            some = sizes == n
            for region, where, which in resolve(block, "global", from_at[some], text):
                inside = where - np.uint64(region.base) + np.uint64(n) <= np.uint64(region.size)
                if not inside.all():
                    raise PtxError(f"{region.name}: {n} bytes beyond its end: {text}")
                here = threads[some] if which is None else threads[some][which]
                touch(region, block, where, here, int(n), text, write=False)
        touch(block.shared, block, to_at, threads, size, text, write=True)
        block.shared.shadow.mark_in_flight(granules(to_at, 0, size))
        one = Copy(block, threads, to_at, from_at, sizes, size, text)
        queue(block).open.append(one)
        block.launch.begin(one)

    return run


@meaning(r"cp\.async\.commit_group")
def commit(block, instruction, pc):
    def run(mask):
        q = queue(block)
        mine = np.flatnonzero(block.mask)
        group = []
        for one in q.open:
            which = np.isin(one.threads, mine)
            if which.all():
                group.append(one)
            elif which.any():
                group.append(split(one, which))
        q.open = [one for one in q.open if one not in group and len(one.threads)]
        q.groups.append((block.mask.copy(), group))

    return run


def split(one: Copy, which) -> Copy:
    """Takes these threads' part out of a copy."""
    part = Copy(one.block, one.threads[which], one.to[which], one.source[which], one.sizes[which], one.size, one.text)
    part.left = one.left[which]
    rest = ~which
    one.threads, one.to, one.source = one.threads[rest], one.to[rest], one.source[rest]
    one.sizes, one.left = one.sizes[rest], one.left[rest]
    if part.left.any():
        one.block.launch.in_flight.append(part)
    return part


# wait_group n: all but the youngest n groups of the thread are complete
@meaning(r"cp\.async\.(wait_group|wait_all)")
def wait(block, instruction, pc):
    most = int(block.source(instruction.operands[0], "u32")) if instruction.operands else 0

    def run(mask):
        q = queue(block)
        younger = np.zeros(block.size, np.int64)
        for threads, group in reversed(q.groups):
            here = threads & block.mask
            due = here & (younger >= most)
            younger += here
            for one in group:
                one.waited_for(np.flatnonzero(due))
                if not one.left.any() and one in block.launch.in_flight:
                    block.launch.in_flight.remove(one)
            threads &= ~due
        q.groups = [(threads, group) for threads, group in q.groups if threads.any()]

    return run

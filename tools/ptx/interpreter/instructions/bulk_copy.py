"""Copies of tensors by TMA, PTX ISA §9.7.9.27.1.2 (cp.async.bulk.tensor), .1.3 (cp.reduce.async.bulk.tensor), and bulk groups."""

import numpy as np

from ..memory import granules_of
from ..order import ASYNC, STRONG
from ..tensor_map import tensor_map
from ..text import TensorAddress
from ..types import UNSIGNED, PtxError, from_bf16, from_f16, to_bf16, to_f16
from . import meaning
from .mbarrier import barrier_at, check_for_async
from .memory import peer

NEVER_KNOWN = 2**31 - 1  # an epoch that nobody knows


def places(region, map_, coordinates, text: str):
    """(element numbers in the buffer, which elements of the box are inside of the tensor)"""
    offset, inside = map_.global_places(coordinates)
    addresses = np.uint64(map_.base) + offset[inside].astype(np.uint64)
    return region.places(addresses, map_.element, map_.element, text), inside


def count(block, kind: str, map_, coordinates, text: str) -> None:
    if traffic := block.launch.device.traffic:
        traffic.box(block, kind, map_, coordinates, text)


class Load:
    """A box on its way into shared memory of one or more blocks."""

    must_be_waited_for = True

    def __init__(self, block, warp, map_, coordinates, to, barrier, ranks, text):
        self.block, self.warp, self.map, self.to, self.at_barrier, self.text = block, warp, map_, to, barrier, text
        self.blocks = [block.peers[rank] for rank in ranks]
        self.region = block.launch.memory.at(map_.base, text)
        self.elements, self.inside = places(self.region, map_, coordinates, text)
        self.where = map_.shared_places(to, text)
        if self.region.shadow is not None and self.elements.size:
            self.region.shadow.read(granules_of(self.elements, map_.element), block, warp, text, proxy=True)
        for other in self.blocks:
            other.shared.places(self.where.astype(np.uint64), map_.element, map_.element, text)
            at = granules_of(self.where // map_.element, map_.element)
            check_for_async(block, barrier_at(other, barrier, text), warp, text)
            other.must_live(block, text)
            other.shared.shadow.write(at, block, warp, text, ASYNC)
            other.shared.shadow.mark_in_flight(at)

    def complete(self) -> None:
        element = self.map.element
        values = np.zeros(self.where.size, UNSIGNED[element])
        values[self.inside] = self.region.elements[element][self.elements]
        at = self.where // element
        for other in self.blocks:
            other.shared.elements[element][at] = values
            barrier = barrier_at(other, self.at_barrier, self.text)
            other.shared.shadow.mark(granules_of(at, element), barrier.slot, barrier.phase + 1, ASYNC)
            barrier.bring(values.size * element, self.text)


ADD = {"f32": (lambda bits: bits.view(np.float32), lambda values: values.view(np.uint32))}
ADD |= {"f16": (from_f16, to_f16), "bf16": (from_bf16, to_bf16)}


class Store:
    """A box on its way out of shared memory; first it is read, then it is written."""

    def __init__(self, block, warp, map_, coordinates, source, adds, text):
        self.block, self.blocks, self.warp, self.map, self.adds, self.text = block, [block], warp, map_, adds, text
        self.region = block.launch.memory.at(map_.base, text)
        self.elements, self.inside = places(self.region, map_, coordinates, text)
        where = map_.shared_places(source, text)
        block.shared.places(where.astype(np.uint64), map_.element, map_.element, text)
        self.where = where // map_.element
        self.granules = granules_of(self.where, map_.element)
        block.shared.shadow.read(self.granules, block, warp, text, proxy=True)
        block.shared.shadow.being_read[self.granules] += 1
        self.values = None
        self.out = granules_of(self.elements, map_.element)
        if self.region.shadow is not None:
            kind = STRONG if adds else ASYNC
            self.region.shadow.write(self.out, block, warp, text, kind)
            self.mark(NEVER_KNOWN)

    def mark(self, epoch: int) -> None:
        if self.region.shadow is not None:
            kind = STRONG if self.adds else ASYNC
            self.region.shadow.mark(self.out, self.block.participant + self.warp, epoch, kind)

    @property
    def must_be_waited_for(self) -> bool:
        return self.values is None

    def read(self) -> None:
        if self.values is None:
            self.values = self.block.shared.elements[self.map.element][self.where][self.inside]
            self.block.shared.shadow.being_read[self.granules] -= 1

    def complete(self) -> None:
        self.read()
        data = self.region.elements[self.map.element]
        if self.adds:
            unpack, pack = ADD[self.map.kind]
            data[self.elements] = pack(unpack(data[self.elements]) + unpack(self.values))
        else:
            data[self.elements] = self.values


# tensor to shared memory; completes on an mbarrier, with multicast on that of every block named by the mask
@meaning(
    r"cp\.async\.bulk\.tensor\.(?P<rank>[1-5])d\.shared::(?P<where>cluster|cta)\.global(\.tile)?\.mbarrier::complete_tx::bytes"
    r"(?P<multicast>\.multicast::cluster)?"
)
def load(block, instruction, pc, rank, where, multicast):
    to, tensor, bar, *rest = instruction.operands
    text, to_at, bar_at = instruction.text, block.address(to), block.address(bar)
    map_at, coordinates = tensor_operand(block, tensor, rank, text)
    mask_of = block.source(rest[0], "u16") if multicast else None

    def run(mask):
        for thread in np.flatnonzero(block.mask):
            at = lambda values, thread=thread: int(block.per_thread(values)[thread])  # noqa: E731
            map_ = tensor_map(block, at(map_at), int(rank), text)
            owner, destination = peer(block, at(to_at()), text)
            owner_of_barrier, barrier = peer(block, at(bar_at()), text)
            if owner is not block or owner_of_barrier is not block:
                raise PtxError(f"a destination or mbarrier of another block has no meaning here: {text}")
            ranks = [block.rank]
            if multicast:
                ranks = [r for r in range(16) if at(mask_of) >> r & 1]
                if not ranks or max(ranks) >= len(block.peers):
                    raise PtxError(f"multicast mask {at(mask_of):#x} in a cluster of {len(block.peers)}: {text}")
            warp = int(block.warp_of[thread])
            place = tuple(at(c) for c in coordinates)
            block.launch.loaded.add((map_, place))
            count(block, "boxes in", map_, place, text)
            block.launch.begin(Load(block, warp, map_, place, destination, barrier, ranks, text))

    return run


# §9.7.9.27.1.4 prefetch: a box on its way to L2, for which nobody waits. It must be one that can be loaded
@meaning(r"cp\.async\.bulk\.prefetch\.tensor\.(?P<rank>[1-5])d\.L2\.global(\.tile)?")
def prefetch(block, instruction, pc, rank):
    text = instruction.text
    map_at, coordinates = tensor_operand(block, instruction.operands[0], rank, text)

    def run(mask):
        for thread in np.flatnonzero(block.mask):
            at = lambda values, thread=thread: int(block.per_thread(values)[thread])  # noqa: E731
            map_ = tensor_map(block, at(map_at), int(rank), text)
            place = tuple(at(c) for c in coordinates)
            places(block.launch.memory.at(map_.base, text), map_, place, text)
            block.launch.prefetched.add((map_, place))

    return run


# shared memory to tensor, or added to it
@meaning(
    r"cp\.(?P<reduce>reduce\.)?async\.bulk\.tensor\.(?P<rank>[1-5])d\.global\.shared::cta(?P<add>\.add)?(\.tile)?\.bulk_group"
)
def store(block, instruction, pc, reduce, rank, add):
    tensor, source = instruction.operands
    text, source_at = instruction.text, block.address(source)
    if bool(reduce) != bool(add):
        raise PtxError(f"a reduction has an operation: {text}")
    map_at, coordinates = tensor_operand(block, tensor, rank, text)

    def run(mask):
        for thread in np.flatnonzero(block.mask):
            at = lambda values, thread=thread: int(block.per_thread(values)[thread])  # noqa: E731
            map_ = tensor_map(block, at(map_at), int(rank), text)
            place = tuple(at(c) for c in coordinates)
            count(block, "boxes out", map_, place, text)
            one = Store(block, int(block.warp_of[thread]), map_, place, at(source_at()), bool(add), text)
            groups(block, int(thread))[0].append(one)
            block.launch.begin(one)

    return run


def tensor_operand(block, operand, rank: str, text: str):
    if not isinstance(operand, TensorAddress) or len(operand.coordinates) != int(rank):
        raise PtxError(f"{rank} coordinates: {text}")
    return block.source(operand.map, "u64"), [block.source(c, "s32") for c in operand.coordinates]


def groups(block, thread: int) -> tuple[list, list]:
    """The stores of a thread since its last commit, and its groups, oldest first."""
    return block.state.setdefault("bulk", {}).setdefault(thread, ([], []))


# §9.7.9.27.2.1 commit_group, §9.7.9.27.2.2 wait_group: all but the youngest n groups have been read (.read), or written
@meaning(r"cp\.async\.bulk\.commit_group")
def commit(block, instruction, pc):
    def run(mask):
        for thread in np.flatnonzero(block.mask):
            begun, done = groups(block, int(thread))
            done.append(begun.copy())
            begun.clear()

    return run


@meaning(r"cp\.async\.bulk\.wait_group(?P<read>\.read)?")
def wait(block, instruction, pc, read):
    most = int(block.source(instruction.operands[0], "u32"))

    def run(mask):
        for thread in np.flatnonzero(block.mask):
            _, committed = groups(block, int(thread))
            for group in committed[: max(0, len(committed) - most)]:
                for one in group:
                    if read:
                        one.read()
                    else:
                        block.launch.complete(one)
                        one.mark(int(block.knowledge.epoch[one.warp]))
            if not read:
                del committed[: max(0, len(committed) - most)]

    return run

"""mbarrier objects, PTX ISA §9.7.13.16: 8 bytes of shared memory with a phase, pending and expected arrivals, and a count of bytes that
asynchronous copies still have to bring (tx-count)."""

import numpy as np

from ..memory import granules
from ..order import ASYNC, INITIALISED, MBARRIERS, PLAIN, SEEN, VIEWS
from ..text import Vector
from ..types import GONE, PtxError
from . import meaning, thread_values
from .memory import check_vector, peer


class Barrier:
    def __init__(self, block, slot: int, count: int, participant: int, epoch: int):
        self.block, self.expected, self.pending = block, count, count
        self.phase, self.bytes = 0, 0
        self.slot = block.participant + block.warps + slot  # the participant that stands for bytes that come through it
        self.made_by, self.made_at = participant, epoch
        self.known = np.zeros((VIEWS, block.launch.participants), np.int32)  # by those who arrived
        self.released = self.known.copy()

    def settle(self) -> None:
        """The phase ends when nothing is pending, neither arrivals nor bytes."""
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.expected
            self.known[SEEN, self.slot - self.block.launch.base] = self.phase
            self.released = self.known.copy()

    def arrive(self, snapshot, text: str) -> None:
        if self.pending == 0:
            raise PtxError(
                f"block {self.block.index}: one arrival more than the {self.expected} of the mbarrier: {text}"
            )
        self.known = np.maximum(self.known, snapshot)
        self.pending -= 1
        self.settle()

    def bring(self, count: int, text: str) -> None:
        self.bytes -= count
        if self.bytes < -(2**20) + 1:
            raise PtxError(f"block {self.block.index}: tx-count below its range: {text}")
        self.settle()

    def state(self) -> str:
        return f"phase {self.phase}, {self.pending} of {self.expected} arrivals and {self.bytes} bytes pending"


def barrier_at(block, address: int, text: str, *, user=None, warps=None) -> Barrier:
    """The mbarrier at an address of `block`, whose initialisation the warps of its user must know of; a user of another block must have
    seen it made visible to the cluster."""
    found = block.state.get("mbarriers", {}).get(address)
    if found is None:
        raise PtxError(f"there is no mbarrier at {address:#x} of block {block.index}: {text}")
    user = user or block
    if warps is not None:
        view = INITIALISED if user is not block else SEEN
        known = user.knowledge.known[view, warps, found.made_by - block.launch.base]
        if (known < found.made_at).any():
            raise PtxError(
                f"no fence and barrier orders the initialisation of the mbarrier at {address:#x} before: {text}"
            )
    return found


def check_for_async(block, barrier: Barrier, warp: int, text: str) -> None:
    visible = block.knowledge.known[INITIALISED, warp, barrier.made_by - block.launch.base] >= barrier.made_at
    if block.launch.device.orders_shared and not visible:
        raise PtxError(
            f"the initialisation of the mbarrier is not visible to the async proxy (fence.mbarrier_init): {text}"
        )


# §9.7.13.16.9 init
@meaning(r"mbarrier\.init(\.shared(::cta)?)?\.b64")
def init(block, instruction, pc):
    address = block.address(instruction.operands[0])
    count = block.source(instruction.operands[1], "u32")
    text = instruction.text

    def run(mask):
        for (thread, at), (_, n) in zip(thread_values(block, address()), thread_values(block, count), strict=True):
            where, warp = np.array([at], np.uint64), block.warp_of[thread : thread + 1]
            block.shared.places(where, 8, 8, text)
            if not 1 <= n < 2**20:
                raise PtxError(f"an mbarrier for {n} arrivals: {text}")
            block.shared.shadow.write(granules(where, 0, 8), block, warp[:, None], text, ASYNC)
            barriers = block.state.setdefault("mbarriers", {})
            slot = block.mbarrier_slots.setdefault(at, len(block.mbarrier_slots))
            if slot >= MBARRIERS:
                raise PtxError(f"more than {MBARRIERS} mbarriers: {text}")
            epoch = int(block.knowledge.epoch[warp[0]])
            barriers[at] = Barrier(block, slot, n, block.participant + int(warp[0]), epoch)

    return run


# §9.7.13.16.10 inval
@meaning(r"mbarrier\.inval(\.shared(::cta)?)?\.b64")
def inval(block, instruction, pc):
    address = block.address(instruction.operands[0])

    def run(mask):
        for _, at in thread_values(block, address()):
            barrier_at(block, at, instruction.text)
            del block.state["mbarriers"][at]

    return run


# §9.7.13.16.13 arrive, with expect_tx (§9.7.13.16.11): the bytes are announced, then one arrival counted. Release by default; of
# another block's mbarrier only without a result
@meaning(
    r"mbarrier\.arrive(?P<tx>\.expect_tx)?(\.(?P<order>release|relaxed)\.(cta|cluster))?(\.shared(::(?P<where>cta|cluster))?)?\.b64"
)
def arrive(block, instruction, pc, tx, order, where):
    _, address, *count = instruction.operands
    at, n, text = block.address(address), block.source(count[0], "u32") if count else np.uint32(1), instruction.text

    def run(mask):
        counts = block.per_thread(n)
        for thread, place in thread_values(block, at()):
            owner, local = peer(block, place, text) if where == "cluster" else (block, place)
            warp = int(block.warp_of[thread])
            barrier = barrier_at(owner, local, text, user=block, warps=warp)
            if owner is not block:
                owner.touched_by(block, warp, text)
            none = np.zeros_like(barrier.known)
            snapshot = none if order == "relaxed" else block.knowledge.release(np.array([warp]))
            if tx:
                barrier.bytes += int(counts[thread])
                if barrier.bytes >= 2**20:
                    raise PtxError(f"tx-count above 2^20 - 1: {text}")
            for _ in range(1 if tx else int(counts[thread])):
                barrier.arrive(snapshot, text)

    return run


# §9.7.13.16.16 test_wait and try_wait: whether the phase of that parity is over; try_wait may sleep, and may give up
@meaning(
    r"mbarrier\.(?P<mode>test_wait|try_wait)\.parity(\.(?P<order>acquire|relaxed)\.(cta|cluster))?(\.shared(::cta)?)?\.b64"
)
def wait(block, instruction, pc, mode, order):
    d, address, parity = instruction.operands[:3]
    write = block.writer(d, "pred")
    at = block.address(address)
    parities = block.source(parity, "u32")
    text = instruction.text

    def run(mask):
        addresses, wanted = block.per_thread(at()), block.per_thread(parities)
        chosen = block.mask
        for place, phase in sorted({(int(a), int(p)) for a, p in zip(addresses[chosen], wanted[chosen], strict=True)}):
            if phase > 1:
                raise PtxError(f"a phase parity of {phase}: {text}")
            mine = chosen & (addresses == place) & (wanted == phase)
            warps = np.unique(block.warp_of[mine])
            barrier = barrier_at(block, place, text, warps=warps)
            over = lambda barrier=barrier, phase=phase: barrier.phase & 1 != phase  # noqa: E731

            def go_on(barrier=barrier, warps=warps, mine=mine):
                if order != "relaxed":
                    block.knowledge.acquire(warps, barrier.released)
                write(np.True_, mine)

            if over() or (mode == "try_wait" and not block.launch.schedule.gives_up()):
                block.wait(over, pc + 1, mine, barrier.state, text, go_on)
            else:
                write(np.False_, mine)
                block.join(pc + 1, mine)
        return GONE

    return run


class RemoteStore:
    """Words on their way to shared memory of a block of the cluster, whose mbarrier counts their bytes."""

    must_be_waited_for = True

    def __init__(self, block, warp: int, owner, to: int, barrier: int, words: np.ndarray, text: str):
        self.blocks, self.owner, self.at_barrier, self.words, self.text = [owner], owner, barrier, words, text
        self.first = int(owner.shared.places(np.array([to], np.uint64), words.nbytes, 4, text)[0])
        self.granules = granules(np.array([to], np.uint64), 0, words.nbytes)[0]
        barrier_at(owner, barrier, text, user=block, warps=warp)
        if owner is not block:
            owner.touched_by(block, warp, text)
        owner.shared.shadow.write(self.granules, block, warp, text)
        owner.shared.shadow.mark_in_flight(self.granules)
        self.snapshot = block.knowledge.release(np.array([warp]))

    def complete(self) -> None:
        self.owner.shared.elements[4][self.first : self.first + self.words.size] = self.words
        barrier = barrier_at(self.owner, self.at_barrier, self.text)
        self.owner.shared.shadow.mark(self.granules, barrier.slot, barrier.phase + 1, PLAIN)
        barrier.known = np.maximum(barrier.known, self.snapshot)
        barrier.bring(self.words.nbytes, self.text)


# §9.7.9.12 st.async: a store whose bytes complete, with release semantics, on an mbarrier of the block that they go to
@meaning(r"st\.async(\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(\.(?P<vector>v2|v4))?\.[bsuf]32")
def store_async(block, instruction, pc, vector):
    to, values, bar = instruction.operands
    items = values.items if isinstance(values, Vector) else (values,)
    check_vector(items, vector, instruction)
    text, to_at, bar_at = instruction.text, block.address(to), block.address(bar)
    sources = [block.source(item, "b32") for item in items]

    def run(mask):
        for thread in np.flatnonzero(block.mask):
            at = lambda numbers, thread=thread: int(block.per_thread(numbers)[thread])  # noqa: E731
            (owner, local), (owner_of_barrier, barrier) = (
                peer(block, at(to_at()), text),
                peer(block, at(bar_at()), text),
            )
            if owner is not owner_of_barrier:
                raise PtxError(f"the mbarrier is of another block than the destination: {text}")
            words = np.array([at(source) for source in sources], np.uint32)
            block.launch.begin(RemoteStore(block, int(block.warp_of[thread]), owner, local, barrier, words, text))

    return run

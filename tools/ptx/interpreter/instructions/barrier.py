"""Barriers, fences and dependent launches, PTX ISA §9.7.13.1 (bar, barrier), §9.7.13.3 (barrier.cluster), §9.7.13.4 (fence, membar),
§9.7.13.13 (griddepcontrol)."""

from dataclasses import dataclass, field

import numpy as np

from ..order import EARLIER, INITIALISED, PROXY_GLOBAL, PROXY_SHARED, SEEN
from ..types import GONE, WARP, PtxError
from . import meaning, nothing


@dataclass
class NamedBarrier:
    expected: int = 0
    arrived: int = 0
    generation: int = 0
    snapshot: np.ndarray | None = None  # what those know who have come
    released: dict = field(default_factory=dict)  # by generation
    predicate: list = field(default_factory=list)
    results: dict = field(default_factory=dict)


# §9.7.13.1: threads are counted by warps; the count is a multiple of the warp size, the number below 16
@meaning(r"(bar|barrier)(\.cta)?\.(?P<mode>sync|arrive|red\.(or|and|popc)\.(pred|u32))(\.aligned)?")
def bar(block, instruction, pc, mode):
    operands = list(instruction.operands)
    reduces = mode.startswith("red")
    write = block.writer(operands.pop(0), mode.split(".")[2]) if reduces else None
    predicate = operands.pop() if reduces else None
    number = block.source(operands[0], "u32")
    count = block.source(operands[1], "u32") if len(operands) > 1 else np.uint32(block.size)
    text = instruction.text

    def run(mask):
        if not block.gather(instruction, pc):
            return GONE
        numbers, counts = block.per_thread(number), block.per_thread(count)
        votes = block.per_thread(block.source(predicate, "pred")) if reduces else None
        for which in np.unique(numbers[block.mask]):
            mine = block.mask & (numbers == which)
            arrive(int(which), mine, int(counts[mine][0]), (counts[mine] == counts[mine][0]).all(), votes)
        return GONE

    def arrive(which, mine, expected, agreed, votes):
        if which > 15 or expected % WARP or not agreed or expected == 0:
            raise PtxError(f"barrier {which} for {expected} threads: {text}")
        b = block.state.setdefault(("barrier", which), NamedBarrier())
        if b.arrived and b.expected != expected:
            raise PtxError(f"barrier {which} is for {b.expected} threads, now for {expected}: {text}")
        b.expected = expected
        warps = np.unique(block.warp_of[mine])
        b.arrived += WARP * len(warps)
        if b.arrived > expected:
            raise PtxError(f"{b.arrived} threads at barrier {which} for {expected}: {text}")
        snapshot = block.knowledge.release(warps)
        b.snapshot = snapshot if b.snapshot is None else np.maximum(b.snapshot, snapshot)
        if reduces:
            b.predicate += votes[mine].tolist()
        generation = b.generation
        if b.arrived == expected:
            b.released[generation], b.results[generation] = b.snapshot, b.predicate
            b.snapshot, b.predicate, b.arrived = None, [], 0
            b.generation += 1
        if mode == "arrive":
            block.join(pc + 1, mine)
            return

        def go_on():
            block.knowledge.acquire(warps, b.released[generation])
            if reduces:
                votes = b.results[generation]
                result = {"or": any, "and": all, "popc": sum}[mode.split(".")[1]](votes)
                write(result, mine)

        missing = lambda: f"barrier {which} has {b.arrived} of {expected} threads"  # noqa: E731
        block.wait(lambda: b.generation > generation, pc + 1, mine, missing, text, go_on)

    return run


# §9.7.13.3 barrier.cluster: all threads of all blocks; arrive releases unless it is relaxed, wait acquires
@meaning(r"barrier\.cluster\.(?P<mode>arrive|wait)(\.(?P<order>release|relaxed|acquire))?(\.aligned)?")
def cluster_barrier(block, instruction, pc, mode, order):
    text = instruction.text

    def arrive(mask):
        if not block.gather(instruction, pc):
            return GONE
        shared = block.cluster_barrier
        waiting = block.state.setdefault("cluster arrived", np.zeros(block.size, np.int64))
        if (waiting[block.mask] % 2).any():
            raise PtxError(f"a second arrival without a wait: {text}")
        waiting[block.mask] += 1
        if order != "relaxed":
            snapshot = block.knowledge.release(block.active_warps())
            shared["snapshot"] = snapshot if shared["snapshot"] is None else np.maximum(shared["snapshot"], snapshot)
        shared["arrived"] += int(block.mask.sum())
        return None

    def wait(mask):
        if not block.gather(instruction, pc):
            return GONE
        shared = block.cluster_barrier
        phase = block.state.setdefault("cluster arrived", np.zeros(block.size, np.int64))
        if (phase[block.mask] % 2 == 0).any():
            raise PtxError(f"a wait without an arrival: {text}")
        phase[block.mask] += 1
        need = sum(b.threads for b in block.peers) * int(phase[block.mask].max() // 2)
        warps = block.active_warps()

        def go_on():
            if shared["snapshot"] is not None:
                block.knowledge.acquire(warps, shared["snapshot"])

        what = lambda: f"{shared['arrived']} of {need} threads of the cluster have come"  # noqa: E731
        return block.wait(lambda: shared["arrived"] >= need, pc + 1, block.mask, what, text, go_on)

    return arrive if mode == "arrive" else wait


# §9.7.13.4 fence.acq_rel, fence.sc and the older membar; of every scope
@meaning(r"fence(\.(acq_rel|sc))?\.(cta|cluster|gpu|sys)|membar\.(cta|gl|sys)")
def fence(block, instruction, pc):
    return lambda mask: block.knowledge.fence(block.active_warps())


# §9.7.13.4 fence.proxy.async: between the generic proxy and the async proxy
@meaning(r"fence\.proxy\.async(\.(?P<space>global|shared::(cta|cluster)))?")
def fence_proxy(block, instruction, pc, space):
    views = {"global": [PROXY_GLOBAL], None: [PROXY_SHARED, PROXY_GLOBAL, INITIALISED]}.get(
        space, [PROXY_SHARED, INITIALISED]
    )

    def run(mask):
        for view in views:
            block.knowledge.fence_view(block.active_warps(), view)

    return run


# §9.7.13.4 fence.mbarrier_init: prior mbarrier.init of this thread, visible to the cluster
@meaning(r"fence\.mbarrier_init\.release\.cluster")
def fence_init(block, instruction, pc):
    return lambda mask: block.knowledge.fence_view(block.active_warps(), INITIALISED)


# §9.7.13.13 griddepcontrol: wait until the kernels in front are over and their memory is visible
@meaning(r"griddepcontrol\.wait")
def wait_for_earlier(block, instruction, pc):
    def run(mask):
        block.knowledge.known[SEEN, block.active_warps(), EARLIER] = 1

    return run


# launch_dependents is a hint: what follows may start, and knows nothing before it waits
meaning(r"griddepcontrol\.launch_dependents")(nothing)

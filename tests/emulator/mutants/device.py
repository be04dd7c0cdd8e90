"""Bugs in the parts of csrc/device that are written once, over the vocabulary itself: reductions and the last block."""

from . import Mutant

TEST = "test_memory"
BLOCK = "device/block.cuh"
WARP = "device/warp.cuh"

MUTANTS = [
    Mutant(BLOCK, "block_sync();  // all threads have read the result of an earlier call", "", "a second reduction overwrites the first one's array"),
    Mutant(BLOCK, "if (lane_index() == 0) of_warp[warp_index()] = value; block_sync();", "if (lane_index() == 0) of_warp[warp_index()] = value;",
           "warps read the array before all have written"),
    Mutant(BLOCK, "if (lane_index() == 0) of_warp", "of_warp", "all lanes write one place"),
    Mutant(BLOCK, "for (int i = 1; i < kWarps; i++)", "for (int i = 1; i < kWarps - 1; i++)", "the last warp is left out"),
    Mutant(BLOCK, "T total = of_warp[0];", "T total = value;", "every warp starts from its own sum"),
    Mutant(BLOCK, "block_sync();  // every thread's writes are ordered before thread 0's release", "", "thread 0 counts before the others have written"),
    Mutant(BLOCK, "atomic_count_acq_rel(counter, last) == last ? 1u : 0u; block_sync();", "atomic_count_acq_rel(counter, last) == last ? 1u : 0u;",
           "threads do not wait for the verdict"),
    Mutant(BLOCK, "static_cast<uint32_t>(grid_blocks()) - 1;", "static_cast<uint32_t>(grid_blocks()) - 2;", "the last block but one believes it is the last"),
    Mutant(BLOCK, "atomic_count_acq_rel(counter, last) == last", "atomic_add(counter, 1u) == last", "a relaxed count orders nothing and does not wrap"),
    Mutant(WARP, "mask = kWarpThreads / 2;", "mask = kWarpThreads / 4;", "half of the lanes are left out"),
    Mutant(WARP, "mask > 0; mask /= 2", "mask > 1; mask /= 2", "neighbours are left out"),
    Mutant(WARP, "return ballot(predicate) != 0;", "return predicate;", "a lane knows only its own vote"),
]  # fmt: skip

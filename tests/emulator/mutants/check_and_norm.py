"""Bugs in the check-and-norm kernel, in the list of tensors it walks over, and in the block operations it stands on."""

from . import Mutant

TEST = "test_check_and_norm"
KERNEL = "kernels/check_and_norm.cu"
BLOCK = "device/block.cuh"
LIST = "device/tensor_list.cuh"

MUTANTS = [
    # ---- elements
    Mutant(KERNEL, "if (thread < head)", "if (thread <= head)", "one element too many before the first boundary"),
    Mutant(KERNEL, "if (thread < count - tail)", "if (thread < count - tail - 1)", "the last element is left out"),
    Mutant(KERNEL, "(kWide - misaligned) % kWide", "kWide - misaligned", "an aligned chunk has a head"),
    Mutant(KERNEL, "to_boundary < count ? to_boundary : count", "to_boundary", "a short chunk is read past its end"),
    Mutant(KERNEL, "/ sizeof(T) % kWide", "% kWide", "the alignment is counted in bytes"),
    Mutant(KERNEL, "const T* aligned = grads + head;", "const T* aligned = grads;", "vectors start before the boundary"),
    Mutant(KERNEL, "i += kInFlight * kThreads", "i += kThreads", "vectors are added several times"),
    Mutant(KERNEL, "for (; i < vectors; i += kThreads)", "for (; i < vectors - 1; i += kThreads)", "the last vector is left out"),
    Mutant(KERNEL, "finite = finite && is_finite(x);", "finite = is_finite(x);", "only the last element is checked"),
    Mutant(KERNEL, "finite = finite && is_finite(x);", "finite = finite && is_finite(widen(grad));", "the scaled value is checked"),
    Mutant(KERNEL, "const auto x = unscale(widen(grad), inv_scale);", "const auto x = widen(grad);", "not unscaled"),
    # ---- chunks and launches
    Mutant(KERNEL, "index += grid_blocks()", "index += 1", "every block reads every chunk"),
    Mutant(KERNEL, "uint32_t index = block_index();", "uint32_t index = 0;", "every block starts with the first chunk"),
    Mutant(KERNEL, "launch * grid_blocks() + block_index()", "block_index()", "a launch overwrites the slots of the one before"),
    Mutant(KERNEL, "launch + 1 < slots.launches ||", "", "every launch reduces: the slots of later ones are not there yet"),
    Mutant(KERNEL, "slot < slots.launches * grid_blocks()", "slot < grid_blocks()", "the slots of the first launch alone are added"),
    Mutant(KERNEL, "any = any || load(slots.not_finite + slot) != 0;", "any = load(slots.not_finite + slot) != 0;", "only a thread's last slot is looked at"),
    Mutant(KERNEL, "const bool found = block_any(!finite);", "const bool found = !finite;", "only thread 0's elements are checked"),
    Mutant(KERNEL, "if (thread_index() == 0) { const int slot", "if (thread_index() <= 1) { const int slot", "two threads write one slot"),
    Mutant(KERNEL, "sum = block_sum<kThreads>(sum);", "", "a block's sum is that of its first thread"),
    # ---- what it stands on
    Mutant(BLOCK, "block_sync();  // whoever still reads the result of an earlier call is done", "", "a second reduction overwrites the first one's array"),
    Mutant(BLOCK, "if (lane_index() == 0) of_warp[warp_index()] = value; block_sync();",
           "if (lane_index() == 0) of_warp[warp_index()] = value;", "warps read the array before all have written"),
    Mutant(BLOCK, "if (lane_index() == 0) of_warp", "of_warp", "all lanes write one place"),
    Mutant(BLOCK, "for (int i = 1; i < kWarps; i++)", "for (int i = 1; i < kWarps - 1; i++)", "the last warp is left out"),
    Mutant(BLOCK, "block_sync();  // every thread's writes come before thread 0's release", "", "thread 0 counts before the others have written",
           missed="thread 0 alone writes what the last block reads, so nothing is lost in this kernel"),
    Mutant(BLOCK, "atomic_count_acq_rel(counter, last) == last ? 1u : 0u; block_sync();", "atomic_count_acq_rel(counter, last) == last ? 1u : 0u;",
           "threads do not wait for the verdict"),
    Mutant(BLOCK, "static_cast<uint32_t>(grid_blocks()) - 1;", "static_cast<uint32_t>(grid_blocks()) - 2;", "the last block but one believes it is the last"),
    Mutant(BLOCK, "atomic_count_acq_rel(counter, last) == last", "atomic_add(counter, 1u) == last", "a relaxed count orders nothing"),
    Mutant("device/warp.cuh", "mask = kWarpThreads / 2; mask > 0; mask /= 2", "mask = kWarpThreads / 4; mask > 0; mask /= 2", "half of the lanes are left out"),
]

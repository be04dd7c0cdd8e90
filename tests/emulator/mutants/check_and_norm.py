"""Bugs in the check-and-norm kernel and in the walk over a run of elements that it shares with unscale."""

from . import Mutant

TEST = "test_check_and_norm"
KERNEL = "kernels/check_and_norm.cu"
WALK = "kernels/vector_walk.cuh"
PLAN = "kernels/tensor_list.h"

MUTANTS = [
    # ---- elements
    Mutant(WALK, "if (thread < head)", "if (thread <= head)", "one element too many before the first boundary"),
    Mutant(WALK, "if (thread < count - tail)", "if (thread < count - tail - 1)", "the last element is left out"),
    Mutant(WALK, "(kWide - misaligned) % kWide", "kWide - misaligned", "an aligned chunk has a head"),
    Mutant(WALK, "to_boundary < count ? to_boundary : count", "to_boundary", "a short chunk is read past its end"),
    Mutant(WALK, "/ sizeof(T) % kWide", "% kWide", "the alignment is counted in bytes"),
    Mutant(WALK, "data + head + thread * kWide;", "data + thread * kWide;", "vectors start before the boundary"),
    Mutant(WALK, "left -= kInFlight * kThreads", "left -= kThreads", "more vectors than there are"),
    Mutant(
        WALK,
        "left > (kInFlight - 1) * kThreads",
        "left >= (kInFlight - 1) * kThreads",
        "the unrolled loop takes a vector too many",
    ),
    Mutant(
        WALK, "for (; left > 0; left -= kThreads", "for (; left > 1; left -= kThreads", "the last vector is left out"
    ),
    Mutant(
        WALK,
        "left -= kThreads, at += kStride",
        "left -= kThreads, at += kWide",
        "threads run into each other's vectors",
    ),
    Mutant(WALK, "f(at + k * kStride, v[k]);", "f(at, v[0]);", "the first of four vectors counts four times"),
    Mutant(KERNEL, "finite = finite && is_finite(x);", "finite = is_finite(x);", "only the last element is checked"),
    Mutant(
        KERNEL,
        "finite = finite && is_finite(x);",
        "finite = finite && is_finite(widen(grad));",
        "the scaled value is checked",
    ),
    Mutant(KERNEL, "const auto x = unscale(widen(grad), inv_scale);", "const auto x = widen(grad);", "not unscaled"),
    # ---- chunks and launches
    Mutant(
        PLAN, "if (entry.numel == 0) continue;", "", "an empty tensor takes a place, and the last ones get no launch"
    ),
    Mutant(KERNEL, "index += grid_blocks()", "index += 1", "every block reads every chunk"),
    Mutant(KERNEL, "uint32_t index = block_index();", "uint32_t index = 0;", "every block starts with the first chunk"),
    Mutant(
        KERNEL,
        "launch * grid_blocks() + block_index()",
        "block_index()",
        "a launch overwrites the slots of the one before",
    ),
    Mutant(
        KERNEL, "launch + 1 < slots.launches ||", "", "every launch reduces: the slots of later ones are not there yet"
    ),
    Mutant(
        KERNEL,
        "slot < slots.launches * grid_blocks()",
        "slot < grid_blocks()",
        "only the first launch's slots are added",
    ),
    Mutant(
        KERNEL,
        "any = any || load(slots.not_finite + slot) != 0;",
        "any = load(slots.not_finite + slot) != 0;",
        "only a thread's last slot is looked at",
    ),
    Mutant(
        KERNEL,
        "const bool found = block_any(!finite);",
        "const bool found = !finite;",
        "only thread 0's elements are checked",
    ),
    Mutant(
        KERNEL,
        "if (thread_index() == 0) { const int slot",
        "if (thread_index() <= 1) { const int slot",
        "two threads write one slot",
    ),
    Mutant(KERNEL, "sum = block_sum<kThreads>(sum);", "", "a block's sum is that of its first thread"),
    Mutant(KERNEL, "total = block_sum<kThreads>(total);", "", "the total is that of the first thread's slots"),
]

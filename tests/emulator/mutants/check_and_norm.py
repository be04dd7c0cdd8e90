"""Bugs in the check-and-norm kernel and in the walk over a run of elements that it shares with unscale."""

from . import Mutant

TEST = "test_check_and_norm"
KERNEL = "gradients/check_and_norm.cu"
WALK = "base/vector_walk.cuh"
PLAN = "base/tensor_list.h"
SHARES = "device/tensor_list.cuh"
NORM = "gradients/grad_norm.h"
LIST = "gradients/list.h"

MUTANTS = [
    # ---- elements
    Mutant(WALK, "if (thread < head)", "if (thread <= head)", "one element too many before the first boundary"),
    Mutant(WALK, "if (thread < count - tail)", "if (thread < count - tail - 1)", "the last element is left out"),
    Mutant(WALK, "(kWide - misaligned) % kWide", "kWide - misaligned", "an aligned span has a head"),
    Mutant(WALK, "to_boundary < count ? to_boundary : count", "to_boundary", "a short span is read past its end"),
    Mutant(WALK, "/ sizeof(T) % kWide", "% kWide", "the alignment is counted in bytes"),
    Mutant(WALK, "data + head + thread * kWide;", "data + thread * kWide;", "vectors start before the boundary"),
    Mutant(WALK, "left = vectors - thread;", "left = vectors - thread - 1;", "the last vector is left out"),
    Mutant(WALK, "left -= kInFlight * kThreads", "left -= kThreads", "more vectors than there are"),
    Mutant(WALK, "left > (kInFlight - 1) * kThreads", "left >= (kInFlight - 1) * kThreads", "the rounds of eight take a vector too many"),
    Mutant(WALK, "if (left > 0) together(std::false_type{});", "", "the last vectors are left out"),
    Mutant(WALK, "kAll || left > k * kThreads ? k * kStride : 0", "k * kStride", "the last vectors are loaded past the end"),
    Mutant(WALK, "if (!kAll && left <= k * kThreads) break;", "", "the first vector is added again in place of those past the end"),
    Mutant(WALK, "at += kInFlight * kStride", "at += kStride", "vectors of the next round that were had in this one"),
    Mutant(WALK, "? k * kStride : 0", "? 0 : 0", "one vector counts for all"),
    Mutant(WALK, "f(at + k * kStride, v[k]);", "f(at, v[0]);", "the first of the vectors in flight counts for all"),
    Mutant(KERNEL, "Larger{}(largest, magnitude_bits(x))", "magnitude_bits(x)", "only the last element's magnitude is kept"),
    Mutant(KERNEL, "magnitude_bits(x));", "magnitude_bits(widen(v[j])));", "the scaled value is checked"),
    Mutant(KERNEL, "unscale(widen(v[j]), factor)", "widen(v[j])", "not unscaled"),
    Mutant(NORM, "bits_of(x) & 0x7fffffffu", "bits_of(x)", "a negative element is larger than infinity"),
    Mutant(NORM, "magnitude >= 0x7f800000u", "magnitude > 0x7f800000u", "infinity is finite"),
    Mutant(NORM, "return magnitude >= 0x7ff0000000000000u", "return rounded >= 0x7f800000u", "a double above fp32's range is no number"),
    # ---- small values
    Mutant(KERNEL, "sum < kSmallSum && largest != 0", "false", "small squares vanish"),
    Mutant(KERNEL, "factor = inv_scale * kLift;", "", "the second reading is like the first"),
    Mutant(KERNEL, "static_cast<double>(sum) * kUnlift", "static_cast<double>(sum)", "lifted squares count as they are"),
    Mutant(KERNEL, "&& largest != 0;", ";", "zeros are read twice",
           missed="the result is the same; it costs time where gradients are zero, which nothing on a CPU shows"),
    Mutant(NORM, "0x1p-120f", "0x1p-149f", "only sums of zero are read again, not those that lost bits"),
    # ---- spans and launches
    Mutant(PLAN, "if (!takes<Args>(entry)) continue;", "", "an empty tensor takes a place, and the last ones get no launch"),
    Mutant(KERNEL, "walk(block_index(), grid_blocks())", "walk(0, 1)", "every block reads the whole list"),
    Mutant(KERNEL, "launch.first_slot + block_index()", "block_index()", "a launch overwrites the slots of the one before"),
    Mutant(KERNEL, "!launch.last ||", "", "every launch reduces the slots so far",
           missed="the last launch overwrites what the others make of their slots; it costs time"),
    Mutant(KERNEL, "count = launch.first_slot + grid_blocks()", "count = grid_blocks()", "only as many slots are added as the last launch has"),
    Mutant(KERNEL, "found.peak = Larger{}(found.peak, load(slots.peak + slot));", "found.peak = load(slots.peak + slot);", "only a thread's last slot is looked at"),
    Mutant(KERNEL, "block_reduce<kThreads>(found.peak, Larger{})", "found.peak", "only thread 0's elements are checked"),
    Mutant(KERNEL, "if (thread_index() == 0) store_slot(slots, launch", "if (thread_index() <= 1) store_slot(slots, launch", "two threads write one slot"),
    Mutant(KERNEL, "{block_sum<kThreads>(found.sum),", "{found.sum,", "a block's sum is that of its first thread"),
    Mutant(KERNEL, "total = block_total<kThreads>(total);", "", "the total is that of the first thread's slots"),
    Mutant(KERNEL, "results.kind == Norm::kLargest", "false", "the largest magnitude is never returned"),
    Mutant(LIST, "launch_count<Short>(grads) <= 1", "launch_count<Short>(grads) <= 2", "two short launches for one long"),
    Mutant(LIST, "launch_count<Short>(grads) <= 1", "false", "few tensors cost the arguments of many"),
    Mutant(KERNEL, "return slots * NormSlots::kBytes;", "return slots * sizeof(double);", "scratch without a place for the peaks"),
    Mutant(KERNEL, "NormSlots::in(scratch, static_cast<size_t>(resident_blocks) * launches)", "NormSlots::in(scratch, static_cast<size_t>(resident_blocks))",
           "the peaks of one launch lie on the sums of the next"),
    Mutant(KERNEL, "detail::check_and_norm_on<kNormThreads, Args>(device_sm_count() * kNormBlocksPerSm",
           "detail::check_and_norm_on<kNormThreads, Args>(device_sm_count()", "a quarter of the blocks, and of the bytes in flight"),
    Mutant(KERNEL, "{first_slot, i + 1 == launches, blocks_done}", "{first_slot, i + 1 == launches, static_cast<uint32_t*>(scratch)}",
           "blocks are counted in memory that holds anything"),
    # ---- each tensor
    Mutant(KERNEL, "store_slot(slots, slot, found)", "store_slot(slots, tensor, found)", "blocks share a tensor's slot"),
    Mutant(KERNEL, "while (more && span.tensor == tensor)", "while (more)", "spans of the next tensors, too"),
    Mutant(KERNEL, "while (more && span.tensor == tensor)", "while (false)", "a slot that the block's next run takes, too"),
    Mutant(KERNEL, "return run + static_cast<uint32_t>(tensor);", "return run;", "tensors of one run share a slot"),
    Mutant(KERNEL, "run_of(args.map.begin_of(tensor))", "run_of(0)", "every tensor begins with the first slot"),
    Mutant(KERNEL, "run_of(args.map.end[tensor] - 1)", "run_of(args.map.end[tensor])", "slots of the next tensor, too"),
    Mutant(KERNEL, "runs < static_cast<uint32_t>(blocks) ? runs :", "", "slots of the next tensors, too"),
    Mutant(KERNEL, ": static_cast<uint32_t>(blocks);", ": runs;", "slots that nobody wrote"),
    Mutant(KERNEL, "add_slot(found, slots, begin + slot)", "add_slot(found, slots, slot)", "another tensor's slots"),
    Mutant(KERNEL, "{warp_sum(found.sum),", "{found.sum,", "a tensor's sum is that of the first lane"),
    Mutant(KERNEL, "warp_reduce(found.peak, Larger{})", "found.peak", "only the first lane's slots are checked"),
    Mutant(KERNEL, "args.position[tensor], found", "tensor, found", "empty tensors shift the results"),
    Mutant(LIST, "position[place] = static_cast<int32_t>(number);", "position[place] = place;", "places of one launch"),
    Mutant(KERNEL, "tensor += grid_blocks() * kWarps", "tensor += 1 << 20", "only as many tensors as the grid has warps get a result"),
    Mutant(PLAN, "most = std::max(most, static_cast<size_t>(", "most = ((", "slots of the last launch"),
    Mutant(SHARES, "run_ += blocks_", "run_ += 1", "the last block takes all runs"),
    # ---- the kernel in front
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "gradients are read before they are written"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "the same, each tensor", 2),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "slots are read before they are written", 3),
]  # fmt: skip

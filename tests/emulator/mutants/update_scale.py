"""Bugs in the kernel that moves the loss scale."""

from . import Mutant

TEST = "test_update_scale"
KERNEL = "gradients/update_scale.cu"

MUTANTS = [
    # ---- flags
    Mutant(KERNEL, "i += kWarpThreads)", "i += 2 * kWarpThreads)", "every other 32 flags are left out"),
    Mutant(KERNEL, "i < args.count;", "i < args.count - 1;", "the last flag is left out"),
    Mutant(KERNEL, "int i = thread_index(); i < args.count", "int i = thread_index(); i < kWarpThreads", "a list shorter than a warp is read past its end"),
    Mutant(KERNEL, "overflow = overflow || found(load(args.flags[i]));", "overflow = found(load(args.flags[i]));", "a lane's last flag counts alone"),
    Mutant(KERNEL, "found(load(args.flags[i]))", "load(args.flags[i]) != 0.0f", "a negative flag or a NaN counts"),
    Mutant(KERNEL, "overflow = warp_any(overflow);", "", "only the first lane's flags count"),
    Mutant(KERNEL, "if (thread_index() != 0) return;", "", "all lanes write"),
    # ---- the chain
    Mutant(KERNEL, "if (!args.first) overflow = overflow || load(found_before) != 0;", "", "only the last launch's flags count"),
    Mutant(KERNEL, "if (!args.first)", "", "the first launch reads what nobody wrote"),
    Mutant(KERNEL, "overflow = overflow || load(found_before) != 0;", "overflow = load(found_before) != 0;", "the last launch's flags do not count"),
    Mutant(KERNEL, "store(found_before, overflow ? 1u : 0u);", "store(found_before, 1u);", "every chain has an overflow"),
    Mutant(KERNEL, "if (!args.last) {", "if (!args.last && !overflow) {", "every launch that knows of an overflow moves the scale"),
    Mutant(KERNEL, "found_infs.begin() + begin, count", "found_infs.begin(), count", "every launch looks at the first flags"),
    Mutant(KERNEL, "args.first = begin == 0;", "args.first = true;", "a later launch forgets the ones before"),
    Mutant(KERNEL, "args.last = begin + count == found_infs.size();", "args.last = true;", "every launch moves the scale"),
    Mutant(KERNEL, "found_infs > kFlags ?", "found_infs > 2 * kFlags ?", "a short chain gets no scratch memory"),
    # ---- the rule
    Mutant(KERNEL, "update_loss_scale(before, overflow, options)", "update_loss_scale(before, !overflow, options)", "overflow and success are swapped"),
    Mutant(KERNEL, "store(at.scale, after.scale);", "", "the scale is not stored"),
    Mutant(KERNEL, "store(at.growth_tracker, after.growth_tracker);", "", "the growth tracker is not stored"),
    Mutant(KERNEL, "store(at.hysteresis_tracker, after.hysteresis_tracker);", "", "the hysteresis tracker is not stored"),
    # ---- counting skips
    Mutant(KERNEL, "count_skips(load(at.skipped_steps), overflow)", "count_skips(load(at.skipped_steps), true)", "every step counts"),
    Mutant(KERNEL, "count_consecutive_skips(load(at.consecutive_skips), overflow)", "count_skips(load(at.consecutive_skips), overflow)", "a run of skips does not end"),
    Mutant(KERNEL, "if (at.skipped_steps != nullptr) store", "store", "a counter that is not there"),
    Mutant("gradients/loss_scale.h", "AK_HD int64_t count_skips(int64_t before, bool overflow) { return overflow ? before + 1 : before; }",
           "AK_HD int64_t count_skips(int64_t before, bool overflow) { return overflow ? static_cast<int32_t>(before) + 1 : before; }", "a counter of 32 bits"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "flags are read before they are written"),
]  # fmt: skip

"""Bugs in the gradient of an activation."""

from . import Mutant

TEST = "test_activation_backward"
KERNEL = "activation/backward.cu"
WALK = "base/elementwise.cuh"

MUTANTS = [
    Mutant(WALK, "rest = vectors * kVec +", "rest = vectors * kVec + 1 +", "an element of the tail is left out"),
    Mutant(WALK, "if (rest < count)", "if (rest <= count)", "an element beyond the last is touched"),
    Mutant(WALK, "if (i < vectors)", "if (i + 1 < vectors)", "the last vector is left out"),
    Mutant(KERNEL, "at = row * columns + i * kVec", "at = i * kVec", "rows of z are taken to be as long as those of grad"),
    Mutant(KERNEL, "load_vec<kVec, Cache::kStreaming>(z + at + columns)", "load_vec<kVec, Cache::kStreaming>(z + at)", "the gate is read as the value"),
    Mutant(KERNEL, "gate_out[j] = round_to<Z>(d.gate);", "gate_out[j] = round_to<Z>(d.up);", "the gate gets the value's gradient"),
    Mutant(KERNEL, "vector_aligned(p.grad) && vector_aligned(p.z)", "vector_aligned(p.z)", "an unaligned grad is read in vectors"),
    Mutant(KERNEL, "&& vector_aligned(p.out);", ";", "an unaligned result is written in vectors"),
    Mutant(KERNEL, "aligned && (!gated || p.columns / 2 % kVec == 0)", "aligned", "rows that are no whole vectors are read in vectors"),
    Mutant(KERNEL, "p.sums != nullptr && p.columns > 0 ? column_sums(sums_of(p), stream) : Status{}", "Status{}", "sums over no rows stay unwritten"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written", nth=2),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written", nth=3),
    Mutant(KERNEL, "if (inside) store_vec", "store_vec", "gradients out of bounds are written"),
    Mutant(KERNEL, "p.sums != nullptr && aligned && !gated", "p.sums != nullptr && aligned", "rows of gates and values are taken for plain ones"),
    Mutant(KERNEL, "&& !gated && p.columns % kVec == 0", "&& !gated", "rows that are no whole vectors are summed in vectors"),
    Mutant(KERNEL, "p.sums != nullptr && aligned", "p.sums != nullptr", "unaligned operands are summed in vectors"),
    Mutant(KERNEL, "status.ok() && p.sums != nullptr ? column_sums(sums_of(p), stream) : status", "status", "sums of another way stay unwritten"),
    Mutant(KERNEL, "{load_vec<kVec, Cache::kStreaming>(grad + at), load_vec<kVec, Cache::kStreaming>(z + at)}",
           "{load_vec<kVec, Cache::kStreaming>(z + at), load_vec<kVec, Cache::kStreaming>(grad + at)}", "the gradient is taken for z"),
    Mutant("activation/call.h", "{p.out, p.sums", "{p.grad, p.sums", "the sums of the incoming gradient"),
]  # fmt: skip

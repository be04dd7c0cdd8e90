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
    Mutant(KERNEL, "&& vector_aligned(p.out) && rows_aligned", "&& rows_aligned", "an unaligned result is written in vectors"),
    Mutant(KERNEL, "vector_aligned(p.out) && rows_aligned", "vector_aligned(p.out)", "rows that are no whole vectors are read in vectors"),
    Mutant(KERNEL, "if (p.rows * p.columns == 0) return {};", "", "an empty tensor is launched",
           missed="the kernel has nothing to do then; only a launch is saved"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written", nth=2),
]  # fmt: skip

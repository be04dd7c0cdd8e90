"""Bugs in an activation on its own."""

from . import Mutant

TEST = "test_activation_forward"
KERNEL = "activation/forward.cu"
WALK = "base/elementwise.cuh"
BASE = "base/config.h"

MUTANTS = [
    Mutant(WALK, "f.template operator()<1>(rest);", ";", "the tail is left out"),
    Mutant(WALK, "operator()<kVec>(i * kVec)", "operator()<kVec>(i)", "vectors overlap"),
    Mutant(WALK, "block_index()) * kElementThreads + thread_index(); }", "block_index()) + thread_index(); }", "blocks overlap"),
    Mutant(KERNEL, "at = row * columns + i * kVec", "at = i * kVec", "rows of z are taken to be as long as those of out"),
    Mutant(KERNEL, "i / per_row, at", "i / columns, at", "a row has as many vectors as columns"),
    Mutant(KERNEL, "(z + at + columns)", "(z + at)", "the gate is read as the value"),
    Mutant(KERNEL, "swiglu(to_float(gate[j]), to_float(up[j]))", "swiglu(to_float(up[j]), to_float(gate[j]))", "gate and value exchanged"),
    Mutant(KERNEL, "gated ? p.columns / 2 : p.columns", "p.columns", "a gated row is as long as z's"),
    Mutant(KERNEL, "activate(Activation::gelu_tanh, v)", "activate(Activation::gelu, v)", "one form of GELU is the other"),
    Mutant(KERNEL, "return vector_aligned(p.z) &&", "return", "an unaligned z is read in vectors"),
    Mutant(KERNEL, "vector_aligned(p.out) && rows_aligned", "rows_aligned", "an unaligned result is written in vectors"),
    Mutant(KERNEL, "&& rows_aligned ?", "?", "rows that are no whole vectors are read in vectors"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written", nth=2),
    Mutant(BASE, "b < a || is_nan(b)", "b < a", "the smaller of a number and NaN is the number"),
    Mutant(BASE, "a < b || is_nan(b)", "a < b", "the larger of a number and NaN is the number"),
]  # fmt: skip

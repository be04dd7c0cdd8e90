"""Bugs in dropout."""

from . import Mutant

TEST = "test_dropout"
KERNEL = "dropout/dropout.cu"
FORMULA = "dropout/formula.h"

MUTANTS = [
    Mutant(KERNEL, "left >= kVec", "left > 0", "the tail is moved as a vector"),
    Mutant(KERNEL, "aligned && left", "left", "what lies between boundaries is moved in vectors"),
    Mutant(KERNEL, "j < left ? to_float(load(from + j)) : 0.0f", "to_float(load(from + j))", "what is past the end is read"),
    Mutant(KERNEL, "if (j < left) store", "store", "what is past the end is written"),
    Mutant(KERNEL, "at + j) / kDropoutGroup", "at) / kDropoutGroup", "both groups of a thread share their bits"),
    Mutant(KERNEL, "at + j) / kDropoutGroup", "at + j)", "groups are numbered by their first element"),
    Mutant(KERNEL, "bits.word[k]", "bits.word[0]", "a group shares one word"),
    Mutant(KERNEL, "p.rate) + added[j + k]", "p.rate)", "nothing is added"),
    Mutant(KERNEL, "if (p.residual != nullptr) load_vector(added", "load_vector(added", "an absent residual is read"),
    Mutant(KERNEL, "load_vector(added, p.residual, p.residual_type", "load_vector(added, p.residual, p.x_type", "the residual has the type of x"),
    Mutant(KERNEL, "store_vector(v, p.out, p.out_type", "store_vector(v, p.out, p.x_type", "the result has the type of x"),
    Mutant(KERNEL, "vector_aligned(p.x) &&", "", "an unaligned x is read in vectors"),
    Mutant(KERNEL, "&& vector_aligned(p.residual)", "", "an unaligned residual is read in vectors"),
    Mutant(KERNEL, "&& vector_aligned(p.out)", "", "an unaligned result is written in vectors"),
    Mutant(KERNEL, "if (left <= 0) return;", "if (left < kVec) return;", "the tail is left out"),
    Mutant(KERNEL, "at = grid_thread() * kVec", "at = grid_thread()", "threads overlap"),
    Mutant(FORMULA, "(word >> 8) < rate.threshold", "(word >> 8) <= rate.threshold", "one number too many is dropped: p = 0 drops some"),
    Mutant(FORMULA, "< rate.threshold ? 0.0f : x * rate.scale", "< rate.threshold ? x * rate.scale : 0.0f", "what should be dropped is kept"),
    Mutant(FORMULA, "x * rate.scale;", "x;", "what is kept is not scaled"),
    Mutant(FORMULA, "1.0 / (1.0 - p)", "1.0 / p", "the scale is that of what is dropped"),
    Mutant(FORMULA, "static_cast<uint32_t>(group >> 32), 0, 0", "0, 0, 0", "the high word of a place is forgotten"),
    Mutant(FORMULA, "0, 0}}, seed)", "0, 0}}, static_cast<uint32_t>(seed))", "half of the seed is forgotten"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written"),
]  # fmt: skip

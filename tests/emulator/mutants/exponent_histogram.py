"""Bugs in exponent_histogram: the bin of a value, the counters of a block, and what of them reaches the tensor's."""

from . import Mutant

TEST = "test_exponent_histogram"
KERNEL = "gradients/exponent_histogram.cu"
FORMULA = "gradients/exponent.h"
LIST = "gradients/list.h"

MUTANTS = [
    # ---- the bin
    Mutant(FORMULA, ">> 23) - 126;", ">> 23) - 127;", "subnormals are one bin low"),
    Mutant(FORMULA, "exponent + 23;", "exponent + 22;", "normal numbers are one bin low"),
    Mutant(FORMULA, "magnitude == 0 ? 0u : of_finite", "of_finite", "zero is a number like others"),
    Mutant(FORMULA, "magnitude > 0x7f800000u", "magnitude >= 0x7f800000u", "infinity is counted as NaN"),
    Mutant(FORMULA, "exponent == 0xff ?", "exponent == 0x100 ?", "infinity is counted as 2^128"),
    # ---- the counters of a block
    Mutant(KERNEL, "counters[bin] = 0u;", "", "counters are not cleared"),
    Mutant(KERNEL, "counters[bin] = 0u; block_sync();", "counters[bin] = 0u;", "threads count while others still clear"),
    Mutant(KERNEL, "atomic_add(counters + static_cast<int>(bin), 1u);", "counters[static_cast<int>(bin)] = counters[static_cast<int>(bin)] + 1u;",
           "counted without an atomic"),
    Mutant(KERNEL, "block_sync(); const int64_t position", "const int64_t position", "counters are read too early"),
    Mutant(KERNEL, "const uint32_t magnitude = magnitude_bits(narrowed(v[j]));", "const uint32_t magnitude = magnitude_bits(narrowed(v[0]));",
           "one element of a vector counts for all"),
    Mutant(KERNEL, "AK_DEVICE float narrowed(double x) { return static_cast<float>(x); }",
           "AK_DEVICE float narrowed(double x) { return static_cast<float>(x * 1.0001); }", "doubles are not what they are"),
    # ---- what reaches the tensor
    Mutant(KERNEL, "atomic_add(counts + position", "store(counts + position", "a block overwrites the others' counts"),
    Mutant(KERNEL, "counts + position * kExponentBins + bin", "counts + bin", "all tensors share one histogram"),
    Mutant(LIST, "position[place] = static_cast<int32_t>(number);", "position[place] = place;", "empty tensors shift the rows"),
    Mutant(KERNEL, "if (count != 0) atomic_add", "if (count > 1) atomic_add", "single values are dropped"),
    Mutant(KERNEL, "bin < static_cast<uint32_t>(kInfinityBin) && ", "", "infinity is the largest finite magnitude"),
    Mutant(KERNEL, "atomic_max(largest + position, most);", "store(largest + position, most);", "the last block's largest wins"),
    Mutant(KERNEL, "return a > b ? a : b;", "return a;", "only the first thread's largest counts"),
    Mutant(KERNEL, "walk(block_index(), grid_blocks())", "walk(0, 1)", "every block counts the whole list"),
    Mutant(KERNEL, "while (more && span.tensor == tensor)", "while (more)", "all tensors of a block are counted as one"),
    Mutant(KERNEL, "(values, span.count,", "(values, kUnit,", "every span is a unit"),
    Mutant(KERNEL, "static_cast<const T*>(args.data[tensor]) + span.begin", "static_cast<const T*>(args.data[tensor])", "every span is the first"),
    # ---- the emulator's word itself
    Mutant("emulator/atomic.h", "*p = *p < value ? value : *p;", "*p = value;", "atomic_max stores whatever comes"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "values are read before they are written"),
]  # fmt: skip

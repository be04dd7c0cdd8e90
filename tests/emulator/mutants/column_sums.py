"""Bugs in the sums of a matrix's columns."""

from . import Mutant

TEST = "test_column_sums"
KERNEL = "column_sums/column_sums.cu"
STRIP = "column_sums/strip.cuh"
CALL = "column_sums/call.h"
SLOTS = "gemm/column_sums.cu"

MUTANTS = [
    Mutant(CALL, "lanes = (held - 1) / count + 1", "lanes = held / count", "the last columns are in no strip"),
    Mutant(STRIP, "share * strips.teams + team", "share + team", "shares have rows in common"),
    Mutant(STRIP, "step = strips.shares * strips.teams", "step = strips.shares * (strips.teams + 1)", "rows between rounds are left out"),
    Mutant(STRIP, "row += kRows * step, at += kRows * stride", "row += step, at += stride", "rows count again in the next round"),
    Mutant(STRIP, "row + i * step < p.rows && ", "", "rows out of bounds are read"),
    Mutant(STRIP, " && column < columns", "", "columns out of bounds are read"),
    Mutant(STRIP, "first * p.pitch", "first * p.columns", "rows lie without a gap"),
    Mutant(STRIP, "first * p.pitch", "static_cast<int>(first * p.pitch)", "places are counted in 32 bits"),
    Mutant(STRIP, "team < strips.teams", "true", "the threads past the last team take rows"),
    Mutant(STRIP, "stride = step * p.pitch", "stride = step * p.columns", "the next rows lie without a gap"),
    Mutant(STRIP, "at + i * stride + column", "at + column", "the first row of a round counts for all"),
    Mutant(STRIP, "(j / kVec * lanes + lane) * kVec + j % kVec", "lane * kColumns + j", "columns in the order of threads"),
    Mutant(STRIP, "column += lanes * kVec", "column += kVec", "a thread's vectors are adjacent"),
    Mutant(STRIP, "block_sync();", "", "the teams do not wait for each other"),
    Mutant(STRIP, "t < strips.teams; t++", "t + 1 < strips.teams; t++", "the last team's sums are left out"),
    Mutant(STRIP, "strips.shares == 1 ? p.sums : p.slots", "p.sums", "all shares leave their sums in one place"),
    Mutant(STRIP, "p.slots + share * p.columns", "p.slots", "all shares leave their sums in one slot"),
    Mutant(STRIP, "block_index() % strips.count * int64_t{width}", "block_index() % strips.count * int64_t{256}", "strips as wide as the widest"),
    Mutant(KERNEL, "vector_aligned(p.x) && ", "", "the first row is not aligned"),
    Mutant(KERNEL, "p.pitch % kVec == 0 && ", "", "the second row is not aligned"),
    Mutant(KERNEL, " && p.columns % kVec == 0", "", "the last vector ends in the gap"),
    Mutant(STRIP, "strips.shares > 1 ? add_slots", "strips.shares > 2 ? add_slots", "two shares are not added"),
    Mutant(SLOTS, "row < rows ? load(sums + row * columns + x) : 0.0f", "load(sums + (row < rows ? row : rows - 1) * columns + x)",
           "the last slot counts again"),
    Mutant(SLOTS, "wait_for_previous_kernel();", "", "sums are added before they are written"),
]  # fmt: skip

"""Bugs in unit_matrices."""

from . import Mutant

TEST = "test_unit_matrices"
KERNEL = "newton_schulz/unit_matrices.cu"

MUTANTS = [
    Mutant(KERNEL, "row % call.rows * call.row_stride", "row * call.row_stride", "rows of all matrices are counted from the first"),
    Mutant(KERNEL, "first < columns; first += kAhead", "first < kWarpThreads; first += kAhead", "one column a lane"),
    Mutant(KERNEL, "load(call.row_sums + batch * call.rows + row)", "load(call.row_sums + row)", "every matrix has the norm of the first"),
    Mutant(KERNEL, "row < call.rows ? call.columns : 0", "call.columns", "rows of padding are read"),
    Mutant(KERNEL, "strip % blocks * kRowsPerBlock", "strip % blocks * kWarps", "blocks share rows"),
    Mutant(KERNEL, "grid_blocks() - 1 - block_index()", "grid_blocks() - block_index()", "the last strip is left out"),
    Mutant(KERNEL, "(int, double x)", "(int, float x)", "squares in fp32"),
    Mutant(KERNEL, "if (row >= call.out_rows) return;", "", "rows beyond the result are written"),
    Mutant(KERNEL, "step = kWarpThreads * call.column_stride", "step = kWarpThreads", "columns are taken as adjacent"),
]  # fmt: skip

"""Bugs in unit_matrices."""

from . import Mutant

TEST = "test_unit_matrices"
KERNEL = "newton_schulz/unit_matrices.cu"

MUTANTS = [
    Mutant(KERNEL, "row % call.rows * call.row_stride", "row * call.row_stride", "rows of all matrices are counted from the first"),
    Mutant(KERNEL, "column < call.columns; column += kWarpThreads", "column < kWarpThreads; column += kWarpThreads", "one column a lane"),
    Mutant(KERNEL, "load(call.row_sums + batch * call.rows + row)", "load(call.row_sums + row)", "every matrix has the norm of the first"),
    Mutant(KERNEL, "row < call.rows && column < call.columns", "column < call.columns", "rows of padding are read"),
    Mutant(KERNEL, "strip % blocks * kRowsPerBlock", "strip % blocks * kWarps", "blocks share rows"),
    Mutant(KERNEL, "grid_blocks() - 1 - block_index()", "grid_blocks() - block_index()", "the last strip is left out"),
    Mutant(KERNEL, "const double x = element_of", "const float x = element_of", "squares in fp32"),
    Mutant(KERNEL, "if (row >= call.out_rows) return;", "", "rows beyond the result are written"),
    Mutant(KERNEL, "column * call.column_stride", "column", "columns are taken as adjacent"),
]  # fmt: skip

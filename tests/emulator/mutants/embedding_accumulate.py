"""Bugs in the kernels that add gradients to the rows of an embedding."""

from . import Mutant

TEST = "test_embedding_accumulate"
KERNEL = "embedding/accumulate.cu"
LIST = "embedding/call.h"

MUTANTS = [
    # ---- runs
    Mutant(KERNEL, "if (rows[k] != row) leave_run(i + k, rows[k]);", "", "all runs of a piece are one"),
    Mutant(KERNEL, "if (i + k >= end) break;", "", "the last entry of a piece counts again"),
    Mutant(KERNEL, "begun_before || next == row", "begun_before", "a run that goes on is finished in its first piece"),
    Mutant(KERNEL, "begun_before || next == row", "next == row", "a run that began before is finished in its last piece"),
    Mutant(KERNEL, "!begun_before, column), v", "true, column), v", "both partial sums go to one place"),
    Mutant(KERNEL, "bool begun_before = begin > 0 &&", "bool begun_before = begin > 0 ||", "every piece begins within a run"),
    Mutant(KERNEL, "for (int j = 0; j < V; j++) sum[j] = 0.0f;", ";", "a run begins with the sum of the one before"),
    Mutant(KERNEL, "begun_before = false;", "", "all runs of a piece began before it"),
    Mutant(KERNEL, "first = run_end;", "", "the count of a run is that of the piece"),
    Mutant(KERNEL, "row = next; first", "first", "a run keeps the row of the one before"),
    Mutant(KERNEL, "leave_run(end, end < p.entries ? load(p.sorted + end) : -1);", "", "the last run of a piece is lost"),
    Mutant(KERNEL, "end < p.entries ? load(p.sorted + end) : -1", "-1", "no run continues past its piece"),
    # ---- joints
    Mutant(KERNEL, "load(p.sorted + end - 1) != row", "false", "every piece is joined with the next one"),
    Mutant(KERNEL, "if (begin > 0 && load(p.sorted + begin - 1) == row) return;", "", "a run of three pieces is finished twice"),
    Mutant(KERNEL, "(run_end - 1) / pieces.size", "run_end / pieces.size", "a run that ends with a piece takes one more"),
    Mutant(KERNEL, "next <= last; next += kInFlight", "next < last; next += kInFlight", "the last piece is left out"),
    Mutant(KERNEL, "next + k <= last ?", "next <= last ?", "pieces past the run are added"),
    Mutant(KERNEL, "add_to(sum, load_vec<V>(partial_of(p, piece, true, column)));", "", "the first piece of a run is left out"),
    Mutant(KERNEL, "first_above(p, begin, end, row, true) : begin", "begin : begin", "a run counts from its piece on"),
    Mutant(KERNEL, "inclusive ? value < row : value <= row", "value <= row", "the run has no beginning"),
    # ---- in order
    Mutant(KERNEL, "for (int j = 0; j < V; j++) sum[j] = held[j];", "for (int j = 0; j < V; j++) sum[j] = 0.0f;", "a run starts from zero"),
    Mutant(KERNEL, "(i == 0 || load(p.sorted + i - 1) != row)", "true", "a run is added again by each piece"),
    Mutant(KERNEL, "first + k < run_end ? load(p.order + first + k) : -1", "load(p.order + (first + k < p.entries ? first + k : i))", "the next run is added as well"),
    Mutant(KERNEL, "for (int64_t first = i; first < run_end; first += kInFlight)", "for (int64_t first = i; first < i + kInFlight; first += kInFlight)", "a long run is cut short"),
    Mutant(KERNEL, "if (exists[k]) add_to(sum, fetched[k]);", "if (exists[kInFlight - 1 - k]) add_to(sum, fetched[kInFlight - 1 - k]);", "entries are added backwards"),
    Mutant(KERNEL, "first_above(p, i + 1, p.entries, row, false)", "first_above(p, i + 1, end, row, false)", "a run ends with its piece"),
    # ---- which entries, rows and columns
    Mutant(KERNEL, "work += grid_blocks()", "work += 1", "several blocks add one piece"),
    Mutant(KERNEL, "&& row != p.padding_idx", "", "padding counts"),
    Mutant(KERNEL, "row < p.rows &&", "", "a row that is not there is written"),
    Mutant(KERNEL, "grad + at[k] * p.columns", "grad + (i + k) * p.columns", "the order is forgotten"),
    Mutant(KERNEL, "if (column < columns) f(", "f(", "threads beyond the columns go on"),
    Mutant(KERNEL, "f(work / tiles,", "f(work % tiles,", "tiles and pieces are mixed up"),
    Mutant(KERNEL, "row * p.columns + column;", "row * p.columns;", "all threads add to the first columns"),
    Mutant(KERNEL, "p.columns % kEmbeddingWide ||", "", "odd rows are read in vectors"),
    Mutant(KERNEL, "!vector_aligned(p.out) ||", "", "the table's address is not looked at"),
    Mutant(KERNEL, "|| !vector_aligned(p.grad))", ")", "the gradient's address is not looked at"),
    # ---- values
    Mutant(KERNEL, "to_float(v[j]) + mean", "mean", "the table is overwritten"),
    Mutant(KERNEL, "p.by_frequency ? div(sum[j]", "false ? div(sum[j]", "frequency is ignored"),
    Mutant(LIST, "* 2 * sizeof(float)", "* sizeof(float)", "the scratch is half of what is needed"),
]  # fmt: skip

"""Bugs in the sums over rows whose order no split of the rows changes."""

from . import Mutant

TEST = "test_unit_sums"
KERNEL = "unit_sums/unit_sums.cu"
CALL = "unit_sums/call.h"

MUTANTS = [
    Mutant(CALL, "kUnitRows = 64", "kUnitRows = 128", "a unit has twice the rows"),
    Mutant(CALL, "(rows + kUnitRows - 1) / kUnitRows", "rows / kUnitRows", "the last unit is lost"),
    Mutant(KERNEL, "p.rows - begin < kUnitRows ? static_cast<int>(p.rows - begin) : static_cast<int>(kUnitRows)",
           "static_cast<int>(kUnitRows)", "the last unit goes beyond the rows"),
    Mutant(KERNEL, "first + i < rows ? first + i : rows - 1", "first + i", "rows out of bounds are read"),
    Mutant(KERNEL, "if (first + i < rows) sum +=", "sum +=", "the last row counts again"),
    Mutant(KERNEL, "if (first + i < units) sum += value[i];", "sum += value[i];", "the last unit counts again"),
    Mutant(KERNEL, "p.fresh ? 0.0f : load(p.sums + column)", "load(p.sums + column)", "a fresh start reads the sums"),
    Mutant(KERNEL, "p.fresh ? 0.0f : load(p.sums + column)", "0.0f", "the sums are overwritten"),
    Mutant(KERNEL, "store(p.sums + column, sum);", "store(p.sums + column, p.fresh ? sum : sum + load(p.sums + column));",
           "what the sums held counts twice"),
    Mutant(KERNEL, "p.mean == nullptr ? 0.0f : load(p.mean + row)", "0.0f", "the mean is forgotten"),
    Mutant(KERNEL, "load(p.rstd + row)", "load(p.rstd + row - begin)", "every unit takes the first one's deviations"),
    Mutant(KERNEL, "to_float(e.grad) * normalized(to_float(e.x), e.mean, e.rstd)", "fma(to_float(e.grad), to_float(e.x) - e.mean, 0.0f) * e.rstd",
           "the factors of a product in another order"),
    Mutant(KERNEL, "block_index() - unit * tiles", "block_index() % (tiles + 1)", "columns of another tile"),
    Mutant(KERNEL, "static_cast<int64_t>(unit) * p.columns + column, sum", "column, sum", "all units leave their sums in one place"),
]  # fmt: skip

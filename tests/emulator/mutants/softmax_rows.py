"""Bugs in the kernels of softmax, and in its formulas."""

from . import Mutant

TEST = "test_softmax_rows"
KERNEL = "kernels/softmax_rows.cu"
LIST = "kernels/softmax_rows.h"
FORMULA = "math/softmax.h"

MUTANTS = [
    # ---- forward
    Mutant(KERNEL, "counts[j] = column < left;", "counts[j] = 1;", "lanes beyond the row count"),
    Mutant(KERNEL, "float largest = kMasked, sum", "float largest = 0.0f, sum", "the largest value is at least 0"),
    Mutant(KERNEL, "exp_of(v[j] - softmax_base(top));", "exp_of(v[j] - top);", "-inf - (-inf) in a piece"),
    Mutant(
        KERNEL, "sum = fma(sum, exp_of(largest - softmax_base(top)), added);", "sum += added;", "pieces do not agree"
    ),
    Mutant(KERNEL, "sum *= exp_of(softmax_base(of_thread) - base);", "", "threads do not agree"),
    Mutant(
        KERNEL,
        "sum *= exp_of(softmax_base(of_thread) - base);",
        "sum *= exp_of(of_thread - base);",
        "a thread without a value",
        missed="its sum is 0, and so is the product",
    ),
    Mutant(KERNEL, "largest = top;", "", "the largest value is forgotten"),
    Mutant(KERNEL, "block_sum<kThreads>(sum), p.safe", "block_sum<kThreads>(sum), false", "safe is forgotten"),
    Mutant(KERNEL, "p.statistics ? log_softmax_of(result, v[j]) :", "", "there is no logarithm"),
    Mutant(
        KERNEL,
        "store(p.statistics + p.rows + row, result.inverse);",
        "store(p.statistics + row, result.inverse);",
        "one statistic over the other",
    ),
    Mutant(KERNEL, "[&](int j) { v[j] = kMasked; });", "[&](int) {});", "the mask is not looked at", nth=2),
    Mutant(KERNEL, "f(k * kVec + j);", "f(j);", "the mask is that of the first vector"),
    Mutant(KERNEL, "kVec > 1 && mask.wide", "kVec > 1", "a mask between boundaries is read in vectors"),
    Mutant(
        KERNEL, "mask.row(row) + begin + column;", "mask.row(row) + column;", "every piece has the mask of the first"
    ),
    Mutant(KERNEL, "mask.row(row) + begin", "mask.row(0) + begin", "all rows have the mask of the first"),
    Mutant(KERNEL, "row += grid_blocks()", "row += 1", "several blocks write a row"),
    # ---- backward
    Mutant(KERNEL, "sum = log ? sum + g[j] : fma(g[j], y[j], sum);", "sum += g[j];", "the sum is that of log-softmax"),
    Mutant(KERNEL, "sum = log ? sum + g[j] :", "sum =", "the sum is that of softmax"),
    Mutant(KERNEL, "sum = block_sum<kThreads>(sum);", "", "the sum is that of a thread"),
    Mutant(KERNEL, "exp_of(y[j] - base) * inverse", "exp_of(y[j] - base)", "probabilities are not normalised"),
    Mutant(KERNEL, "if constexpr (!kWhole) take(begin);", "", "the last piece is written for all"),
    Mutant(KERNEL, "[&](int j) { g[j] = 0.0f; });", "[&](int) {});", "what is left out has a gradient"),
    Mutant(KERNEL, "load(p.statistics + p.rows + row)", "load(p.statistics + row)", "the wrong statistic"),
    Mutant(
        KERNEL,
        "&& rows_aligned(p.y, p.columns)",
        "",
        "the result's address is not looked at",
        missed="the test shifts all matrices alike",
    ),
    # ---- formulas
    Mutant(FORMULA, "return largest == kMasked ? 0.0f : largest;", "return largest;", "an empty row has a base"),
    Mutant(
        FORMULA, "const float nothing = safe ?", "const float nothing = !safe ?", "safe and torch's rule are mixed up"
    ),
    Mutant(FORMULA, "(x - row.base) - row.log_sum", "x - row.log_sum", "the base is forgotten"),
    Mutant(
        FORMULA, "(x - row.base) - row.log_sum", "x - (row.base + row.log_sum)", "large values swallow the logarithm"
    ),
    Mutant(FORMULA, "y * (grad - sum_grad_y)", "y * grad - sum_grad_y", "the sum is not weighted"),
    Mutant(FORMULA, "fma(-y, sum_grad, grad)", "fma(y, sum_grad, grad)", "the sum has the wrong sign"),
    # ---- the mask's rows
    Mutant(LIST, "rest / inner[0] * strides[0]", "rest / inner[0] * strides[1]", "the first dimension is the second"),
    Mutant(LIST, "rest % inner[0] * strides[1]", "rest * strides[1]", "the second dimension goes on"),
    Mutant(
        LIST, "index % inner[1], rest = index / inner[1]", "index % inner[0], rest = index / inner[0]", "sizes mixed up"
    ),
]

"""Bugs in the kernels of softmax, and in its formulas."""

from . import Mutant

TEST = "test_softmax_rows"
KERNEL = "softmax/rows.cu"
LIST = "softmax/call.h"
PIECES = "base/row_pieces.cuh"
EXP_SUM = "softmax/exp_sum.cuh"
FORMULA = "softmax/formula.h"

MUTANTS = [
    # ---- rows by way of shared memory, forward
    Mutant(EXP_SUM, "const float base = softmax_base(top);", "const float base = top;", "-inf - (-inf) in a share"),
    Mutant(EXP_SUM, "max_number(value(j), top);", "value(j) > top ? top : value(j);", "the smallest of a batch"),
    Mutant(EXP_SUM, "sum = fma(sum, exp_above(largest, base), added);", "sum += added;", "batches do not agree"),
    Mutant(EXP_SUM, "    largest = top;", "", "the largest value is forgotten"),
    Mutant(EXP_SUM, "return sum * exp_above(largest, base);", "return sum;", "threads do not agree"),
    Mutant(
        EXP_SUM,
        "return sum * exp_above(largest, base);",
        "return sum * exp_above(softmax_base(largest), base);",
        "a thread without a value multiplies 0 by infinity",
    ),
    Mutant(KERNEL, "pieces.for_each_left_out(1, batch, [&](int j) { v[j] = kMasked; });", "", "no look at the mask"),
    Mutant(KERNEL, "pieces.sum(running.relative_to(base)), p.safe", "running.sum, p.safe", "a thread's sum"),
    Mutant(KERNEL, "running.relative_to(base)), p.safe", "running.relative_to(base)), false", "safe forgotten"),
    Mutant(KERNEL, "if (p.statistics) {", "if (false) {", "there is no logarithm"),
    Mutant(
        KERNEL,
        "store(p.statistics + p.rows + row, result.inverse);",
        "store(p.statistics + row, result.inverse);",
        "one statistic over the other",
    ),
    Mutant(KERNEL, "p.y_type, row * p.columns + begin);", "p.y_type, row * p.columns);", "a piece over the first"),
    Mutant(KERNEL, "row < p.rows; row += grid_blocks()", "row < p.rows; row += 1", "several blocks write a row"),
    # ---- backward
    Mutant(KERNEL, "sum = log ? sum + g[j] : fma(g[j], y[j], sum);", "sum += g[j];", "the sum is that of log-softmax"),
    Mutant(KERNEL, "sum = log ? sum + g[j] :", "sum =", "the sum is that of softmax"),
    Mutant(KERNEL, "sum = pieces.sum(sum);", "", "the sum is that of a thread"),
    Mutant(KERNEL, "exp_above(y[j], base) * inverse", "exp_above(y[j], base)", "probabilities are not normalised"),
    Mutant(KERNEL, "pieces.for_each_left_out(2, batch, [&](int j) { g[j] = 0.0f; });", "", "what is left out counts"),
    Mutant(KERNEL, "load(p.statistics + p.rows + row)", "load(p.statistics + row)", "the wrong statistic"),
    Mutant(
        KERNEL, "p.out_type, row * p.columns + begin);", "p.out_type, row * p.columns);", "a piece over the first one"
    ),
    Mutant(
        KERNEL,
        "&& rows_aligned(p.y, p.columns)",
        "",
        "the result's address is not looked at",
    ),
    # ---- pieces
    Mutant(PIECES, "* bytes + 2 * (kWord - 1))", "* bytes + (kWord - 1))", "a slot is too short"),
    Mutant(PIECES, "slot + 1 < shape_.slots; slot++", "slot < shape_.slots; slot++", "the copies run a slot ahead"),
    Mutant(
        PIECES, "if (!again || shape_.columns < columns_) wait();", "wait();", "a row that has stayed is waited for"
    ),
    Mutant(
        PIECES,
        "if (!again || shape_.columns < columns_) wait();",
        "if (!again) wait();",
        "the last piece is taken for all",
    ),
    Mutant(PIECES, "column + (kBatch - 1) * kThreads < left_;", "column < left_;", "a batch ends behind the piece"),
    Mutant(
        PIECES, "for (; column < left_; column += kThreads) f", "for (; false;) f", "the rest of a piece is left out"
    ),
    Mutant(
        PIECES, "for (; column < left_; column += kThreads) f", "if (column < left_) f", "one column is left of a piece"
    ),
    Mutant(PIECES, "if (row[j * kThreads] == 0) f(j);", "if (row[0] == 0) f(j);", "a batch has one mask"),
    Mutant(PIECES, "bytes_of(dtype) == bytes_[m] &&", "", "results of another width in the place of what is read"),
    Mutant(PIECES, "&& phase(data) == at_[m] % kWord ?", "?", "results elsewhere lie as those that were read"),
    Mutant(
        PIECES, "if (place == 0) return;\n    block_sync();", "if (place == 0) return;", "results are stored too early"
    ),
    Mutant(
        PIECES,
        "store_vec(reinterpret_cast<uint32_t*>(to + byte)",
        "store_vec(reinterpret_cast<uint32_t*>(to + run.head)",
        "one word of results",
    ),
    Mutant(PIECES, "if (edge < 0) return;", "return;", "results beside the words stay behind"),
    Mutant(PIECES, "turn_ ^= 1;", "", "a reduction over the one before"),
    Mutant(PIECES, "for (int mask = kWarps / 2;", "for (int mask = kWarps / 4;", "half of the warps are not joined"),
    Mutant(PIECES, "phase(begin) << m * 4;", "phase(begin);", "matrices lie as far from a boundary as each other"),
    Mutant(PIECES, "phases_ = 0;\n    if", "if", "a row lies as far from a boundary as the ones before"),
    Mutant(PIECES, "value = of_warp[lane_index() % kWarps];", "value = of_warp[0];", "the first warp's value"),
    Mutant(PIECES, "to_boundary < bytes ? to_boundary : bytes;", "to_boundary;", "a row shorter than its head"),
    Mutant(PIECES, "tail() + (thread_index() - kWord) * size;", "tail();", "one element behind the words"),
    Mutant(PIECES, "(thread_index() < kWord ? head : bytes) ?", "bytes ?", "elements beside the words over the words"),
    Mutant(PIECES, "place.again = !place.again && comes_again_;", "place.again = false;", "pieces come once"),
    Mutant(PIECES, "static_cast<int64_t>(place.begin) * bytes_[m];", "0;", "the first piece again and again"),
    Mutant(PIECES, "columns_ - place.begin < shape_.columns ?", "false ?", "the last piece is as long as the others"),
    Mutant(
        PIECES,
        "const uint32_t at = to + phase(begin);",
        "const uint32_t at = to;",
        "words between boundaries of shared memory",
    ),
    Mutant(
        PIECES,
        "byte < run.tail(); byte += kThreads * kWord)\n          copy_async",
        "byte < run.head + kWord; byte += kThreads * kWord)\n          copy_async",
        "one word is brought",
    ),
    Mutant(PIECES, "bits & 0xffffu) << at % kWord", "bits & 0xffffu)", "the mask in front of the words lies elsewhere"),
    Mutant(PIECES, ": bits >> 16,", ": bits,", "the mask behind the words is that in front"),
    Mutant(PIECES, "four * 0x204081u & 0x01010101u", "four & 0x01010101u", "bits are not spread over bytes"),
    Mutant(PIECES, "run.head == 0 : tail == run.bytes", "false : tail == run.bytes", "a word of the mask is lost"),
    Mutant(
        PIECES,
        "if (shape_.slots == 2) {\n      copy_wait<0>();",
        "if (shape_.slots == 2) {\n      copy_wait<1>();",
        "no wait for the piece",
    ),
    Mutant(
        PIECES,
        "} else if (shape_.slots == 3) {\n      copy_wait<1>();",
        "} else if (shape_.slots == 3) {\n      copy_wait<2>();",
        "no wait for the piece in three slots",
    ),
    Mutant(PIECES, "copy_wait<2>();", "copy_wait<3>();", "no wait for the piece in four slots"),
    Mutant(PIECES, "    block_sync();\n    copy(last);", "    copy(last);", "a slot is filled while it is read"),
    Mutant(PIECES, "copy(last);", "copy(slot_);", "the piece is overwritten"),
    Mutant(PIECES, "* (kSumBytes / 2));", "* 0);", "two reductions in one place"),
    Mutant(
        PIECES,
        "slots_of(columns, shape.blocks) < 2) shape.blocks /= 2;",
        "false) shape.blocks /= 2;",
        "rows are cut that would fit",
    ),
    # ---- teams, forward
    Mutant(KERNEL, "row >= rows_) return;", "false) return;", "the mask of rows behind the last is read"),
    Mutant(
        KERNEL,
        "const uint8_t* at = mask_.row(row);",
        "const uint8_t* at = mask_.row(0);",
        "a team's rows have the first mask",
    ),
    Mutant(KERNEL, "bytes_[held / kRingVec] = load", "bytes_[0] = load", "a thread's vectors have the last one's mask"),
    Mutant(KERNEL, "0xffu << j % kRingVec * 8", "0xffu", "a vector has the mask of its first column"),
    Mutant(KERNEL, "ring.read(v, 0, kMasked);", "ring.read(v, 0);", "columns behind a team's row are 0"),
    Mutant(KERNEL, "kept.for_each_left_out([&](int j) { v[j] = kMasked; });", "", "a team does not look at the mask"),
    Mutant(
        KERNEL, "kept.load_ahead(row + ring.step());", "kept.load_ahead(row);", "a row has the mask of the one before"
    ),
    Mutant(KERNEL, "largest[1] = {kMasked}", "largest[1] = {0.0f}", "the largest value of a team is at least 0"),
    Mutant(KERNEL, "ring.reduce(largest, max_number);", "", "each thread of a team has its own largest value"),
    Mutant(
        KERNEL,
        "sum[0] += exp_above(v[j], base);",
        "sum[0] += v[j] = exp_above(v[j], base);",
        "the logarithm is of an exponential",
    ),
    Mutant(KERNEL, "ring.sum(sum);", "", "a team's sum is a thread's"),
    Mutant(
        KERNEL,
        "softmax_row(largest[0], sum[0], p.safe)",
        "softmax_row(largest[0], sum[0], false)",
        "a team forgets safe",
    ),
    Mutant(KERNEL, "ring.refill(row);", "", "the ring is filled once"),
    Mutant(
        KERNEL,
        "if (log && ring.leads()) {",
        "if (log && thread_index() == 0) {",
        "only the first team stores statistics",
    ),
    Mutant(
        KERNEL,
        "store(p.statistics + row, result.base);",
        "store(p.statistics, result.base);",
        "all rows leave one statistic",
        nth=2,
    ),
    # ---- teams, backward
    Mutant(
        KERNEL,
        "next_base = load(p.statistics + row);",
        "next_base = load(p.statistics);",
        "a team's rows have the first base",
    ),
    Mutant(
        KERNEL,
        "load_statistics(row + ring.step());",
        "load_statistics(row);",
        "a row has the statistics of the one before",
    ),
    Mutant(
        KERNEL, "if (!log || row >= p.rows) return;", "if (!log) return;", "statistics of rows behind the last are read"
    ),
    Mutant(KERNEL, "ring.read(g, 1);", "ring.read(g, 0);", "the result is taken for its gradient"),
    Mutant(KERNEL, "sum[0] = log ? sum[0] + g[j] :", "sum[0] =", "a team's sum is that of softmax"),
    Mutant(KERNEL, "ring.sum(sum);", "", "a team's sum backward is a thread's", nth=2),
    Mutant(
        KERNEL, "kept.for_each_left_out([&](int j) { g[j] = 0.0f; });", "", "what is left out has a gradient in a team"
    ),
    Mutant(KERNEL, "mask.data == nullptr || mask.wide);", "true);", "a mask between boundaries is read in words"),
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
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written", nth=2),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written", nth=3),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written", nth=4),
]

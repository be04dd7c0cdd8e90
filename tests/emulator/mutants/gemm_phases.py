"""Bugs in products in phases: what a phase is, and what is added up where."""

from . import Mutant

TEST = "test_gemm_phases"
KERNEL = "gemm/phases.cu"
HOST = "gemm/phases.h"

MUTANTS = [
    # ---- the phases
    Mutant(HOST, "return (k - 1) / count;", "return k / count;", "no line is left: a phase reads beyond the last one"),
    Mutant(HOST, "return (k - 1) / count;", "return (k - 1) / count - 1;", "more lines are left than are multiplied"),
    Mutant(HOST, "m + (count - 1) * a", "m", "the last rows of later phases are missing"),
    Mutant(HOST, "n + (count - 1) * b + 3", "n + 3", "the last columns of later phases are missing"),
    Mutant(HOST, "(n + (count - 1) * b + 3) / 4 * 4", "n + (count - 1) * b", "rows of the results that TMA cannot write",
           missed="the threads store them then, word by word: slower, not wrong"),
    Mutant(HOST, "std::gcd(std::gcd(q.ld_a, q.ld_b), int64_t{8})", "std::gcd(q.ld_b, int64_t{8})", "the distance of A's lines is not asked for"),
    Mutant(HOST, "std::gcd(std::gcd(q.ld_a, q.ld_b), int64_t{8})", "std::gcd(q.ld_a, int64_t{8})", "the distance of B's lines is not asked for"),
    Mutant(HOST, "static_cast<int>(q.ld_a % 8), static", "0, static", "A's phases are taken to begin aligned"),
    Mutant(HOST, "static_cast<int>(q.ld_b % 8)}", "0}", "B's phases are taken to begin aligned"),
    Mutant(HOST, "q.ld_a * phases.count, r", "q.ld_a, r", "a phase takes all of A's lines"),
    Mutant(HOST, "r.ld_b = q.ld_b * phases.count", "r.ld_b = q.ld_b", "a phase takes all of B's lines"),
    Mutant(HOST, "r.batch_stride_a = q.ld_a - phases.a", "r.batch_stride_a = q.ld_a", "phases of A that begin unaligned"),
    Mutant(HOST, "r.batch_stride_b = q.ld_b - phases.b", "r.batch_stride_b = 0", "all phases begin at B's first line"),
    Mutant(HOST, "r.k = phases.lines(q.k)", "r.k = q.k / phases.count", "a phase has a line that belongs to those left over"),
    # ---- where there are none
    Mutant(HOST, "!is_plain(rest) ||", "", "an epilogue is forgotten"),
    Mutant(HOST, "q.batch != 1 ||", "", "all but the first of a batch are forgotten"),
    Mutant(HOST, "!q.m_major_a ||", "", "rows of A along k are taken for lines of k"),
    Mutant(HOST, "|| !q.n_major_b)", ")", "columns of B along k are taken for lines of k"),
    Mutant(HOST, "!begins_aligned(q.a) ||", "", "an A after an odd element"),
    Mutant(HOST, "|| !begins_aligned(q.b))", ")", "a B after an odd element"),
    Mutant(HOST, "count == 1 ||", "", "aligned operands go a longer way"),
    Mutant(HOST, "|| q.k <= count", "", "phases without a line"),
    # ---- the sum
    Mutant(KERNEL, "i < kPhases; i++, from", "i < kPhases - 1; i++, from", "a phase is not read"),
    Mutant(KERNEL, "i++, from += args.next_phase", "i++", "the first phase is taken for all"),
    Mutant(KERNEL, "b[i] = i < args.lines ?", "b[i] = i + 1 < args.lines ?", "the last line is forgotten"),
    Mutant(KERNEL, "b[i] = i < args.lines ?", "b[i] = true ?", "lines of B past the last are read"),
    Mutant(KERNEL, "line < args.lines ?", "true ?", "lines of A past the last are read"),
    Mutant(KERNEL, "line * args.ld_a + row(lane_index() % kRowsOfThread)", "line * args.ld_a + first", "a row of A for four"),
    Mutant(KERNEL, "args.b + i * args.ld_b + x", "args.b + x", "all lines of B are the first"),
    Mutant(KERNEL, "shuffle(a, i * kRowsOfThread + r)", "shuffle(a, r * kMostLines + i)", "A's elements of other lines"),
    Mutant(KERNEL, "first + r < args.m ? first + r : args.m - 1", "first + r", "sums past the last row are read"),
    Mutant(KERNEL, "column < args.n ? column : args.n - 1", "column", "elements past the last column are read"),
    Mutant(KERNEL, "sum * args.alpha", "sum", "alpha is forgotten"),
    Mutant(KERNEL, "args.accumulate ? load(reinterpret_cast<const float*>(to)) + result : result", "result", "what C holds is overwritten"),
    Mutant(KERNEL, "row(r) * args.c.row_stride + column * args.c.column_stride", "row(r) * args.c.row_stride + column", "C is taken to lie by rows"),
    Mutant(KERNEL, "first + r >= args.m || column", "column", "the last row is stored by several",
           missed="the same value"),
    Mutant(KERNEL, "|| column >= args.n) continue;", ") continue;", "columns past the last are written"),
    Mutant(KERNEL, "if (first >= args.m) return;", "", "rows past the last are made", missed="they are the last one again, and not stored"),
    Mutant(KERNEL, "block_index() - down * args.blocks_across", "block_index()", "blocks of the second row begin where the first ended"),
    Mutant(KERNEL, "phases.rows(q.m) * pitch + phases.a * pitch", "phases.rows(q.m) * pitch", "a phase's rows begin where the first phase's do"),
    Mutant(KERNEL, "phases.a * pitch + phases.b,", "phases.a * pitch,", "a phase's columns begin where the first phase's do"),
    Mutant(KERNEL, "int64_t{phases.lines(q.k)} * phases.count;", "int64_t{phases.lines(q.k)};", "the lines left over are others"),
    Mutant(KERNEL, "case 4:", "case 3:", "four phases are taken for eight"),
]  # fmt: skip

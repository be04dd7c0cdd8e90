"""Bugs in the copies of operands that TMA cannot read."""

from . import Mutant

TEST = "test_gemm_repack"
KERNEL = "gemm/sm90/repack.cu"
HOST = "gemm/sm90/gemm.h"
PITCH = "gemm/sm90/repack.h"

MUTANTS = [
    # ---- a chunk
    Mutant(KERNEL, "x > 0 && x + kInChunk < length :", "x + kInChunk < length :", "the word in front of a line is read"),
    Mutant(KERNEL, "x > 0 && x + kInChunk < length :", "x > 0 && x + kInChunk <= length :", "the word past a line is read"),
    Mutant(KERNEL, ": x + kInChunk <= length)", ": true)", "words beyond a line are read"),
    Mutant(KERNEL, "reinterpret_cast<const uint32_t*>(p - odd)", "reinterpret_cast<const uint32_t*>(p)", "words are read where none begins"),
    Mutant(KERNEL, "i < 4 || odd ? load(aligned + i) : 0", "load(aligned + i)", "a fifth word is read where four hold all"),
    Mutant(KERNEL, "both >> (odd ? 16 : 0)", "both >> 16", "aligned words are moved as well"),
    Mutant(KERNEL, "both >> (odd ? 16 : 0)", "both", "words are not moved into place"),
    Mutant(KERNEL, "x + 2 * i < length ? load(p + 2 * i) : 0", "load(p + 2 * i)", "elements beyond the end of a line are read"),
    Mutant(KERNEL, "x + 2 * i + 1 < length ?", "x + 2 * i < length ?", "an odd line's end is read one too far"),
    Mutant(KERNEL, "pairs[i] = high << 16 | low;", "pairs[i] = low << 16 | high;", "two elements change places"),
    # ---- the walk
    Mutant(KERNEL, "quotient + (x - quotient * d.by >= d.by)", "quotient", "a quotient is one too small"),
    Mutant(KERNEL, "(x - quotient * d.by >= d.by)", "(x - quotient * d.by > d.by)", "a quotient is one too small where nothing is left"),
    Mutant(KERNEL, "i += grid_blocks() * kRepackThreads", "i += kRepackThreads", "the blocks copy the same"),
    Mutant(KERNEL, "matrix * c.plane +", "", "all matrices are copies of the first"),
    Mutant(KERNEL, "(line - matrix * c.lines.by) * c.ld", "line * c.ld", "lines are counted over all matrices"),
    Mutant(KERNEL, "copy_lines(args.b);", "", "B is not copied"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "operands are read before they are written"),
    # ---- the host
    Mutant(KERNEL, "plane == 0 ? 1 : q.batch", "q.batch", "a shared matrix is copied once a product"),
    Mutant(KERNEL, "lines = along_k ? other : q.k;", "lines = other;", "lines of m or n are counted as those of k"),
    Mutant(KERNEL, "of_b ? !q.n_major_b : !q.m_major_a", "!q.m_major_a", "B is taken to lie as A does"),
    Mutant(PITCH, "(static_cast<int64_t>(length) + unit - 1) / unit * unit", "length", "the lines of the copy follow each other"),
    Mutant(PITCH, "length >= 512 ? 64 : 8", "8", "long lines lie across lines of L2"),
    Mutant(KERNEL, "lines.planes == 1 ? 0 : lines.lines * lines.pitch()", "lines.lines * lines.pitch()", "a shared matrix is looked for in a place for each product"),
    Mutant(KERNEL, "next += lines.size();", "", "both copies go to one place"),
    Mutant(KERNEL, "copy.plane = lines.plane;", "copy.plane = lines.lines * lines.ld;", "matrices are taken to follow each other"),
    Mutant(HOST, "ld >= 1 && ld % 8 == 0 &&", "ld >= 1 &&", "odd lines are not copied"),
    Mutant(HOST, "reinterpret_cast<uintptr_t>(p) % 16 == 0 && ld", "ld", "an operand after an odd element is not copied"),
    Mutant(HOST, "batch_stride >= 0 && batch_stride % 8 == 0", "batch_stride >= 0", "matrices at odd distances are not copied"),
]  # fmt: skip

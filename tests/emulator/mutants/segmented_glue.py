"""Bugs in the host code of products whose A is several matrices."""

from . import Mutant

TEST = "emulator/test_segmented_glue.py"
GLUE = "gemm/glue.cpp"
LAUNCH = "gemm/launch.h"

MUTANTS = [
    Mutant(GLUE, "problem.more_a[i - 1] = {data, static_cast<int>(begin), ld};", "problem.more_a[i - 1] = {data, static_cast<int>(begin), problem.ld_a};", "all matrices have the rows' distance of the first"),
    Mutant(GLUE, "begin += t.size(dim);", "begin = t.size(dim);", "the third matrix begins at the width of the second"),
    Mutant(GLUE, "for (GemmSegment& s : problem.more_a) s = {};", "", "the concatenation has the other matrices behind it, too"),
    Mutant(GLUE, "if (t.size(dim) == 0 || t.stride(dim) != 1", "if (t.stride(dim) != 1", "a matrix without memory"),
    Mutant(GLUE, "|| t.stride(dim) != 1 ||", "||", "columns with gaps are read as if there were none"),
    Mutant(LAUNCH, "whole.ld_a = q.m_major_a ? q.m : q.k;", "", "another plan than that of the concatenation"),
    Mutant(LAUNCH, "whole.a = nullptr;  // as", "// as", "another plan than that of the concatenation, by where A begins"),
    Mutant(GLUE, "begin += segment.size(dim);", "", "all matrices are copied to one place"),
    Mutant(GLUE, "count - 1 > std::size(problem.more_a)", "count > 9", "a fourth matrix is written past the problem"),
    Mutant(LAUNCH, "if (gemm_sm90_refuses(q, {plan.tile, plan.splits, plan.swapped})) return false;", "", "the kernel must take everything"),
]  # fmt: skip

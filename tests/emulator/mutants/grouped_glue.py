"""Bugs in the host code of grouped products."""

from . import Mutant

TEST = "emulator/test_grouped_glue.py"
GLUE = "gemm/glue_grouped.cpp"
OPERAND = "gemm/glue_operand.h"
LAUNCH = "gemm/launch.h"

MUTANTS = [
    Mutant(GLUE, "a.lay(1, !grouped.sums);", "", "an A by columns goes to a kernel that takes rows"),
    Mutant(GLUE, "if (grouped.sums) b.lay(0, false);", "", "a B by columns goes to a kernel that takes lines of terms"),
    Mutant(OPERAND, "inner == 1 ? tensor : torch::stable::transpose(tensor, 0, 1)", "tensor", "the copy lies as the operand did"),
    Mutant(GLUE, ".batch_stride = shared ? 0 : t.stride(0)", ".batch_stride = 0", "the bias of the first group for all"),
    Mutant(GLUE, ".column_stride = t.stride(t.dim() - 1),", ".column_stride = 1,", "a bias is taken as dense"),
    Mutant(GLUE, "grouped.offs_stride = offs.stride(0);", "grouped.offs_stride = 1;", "the ends are taken as dense"),
    Mutant(GLUE, "call.grouped.product.accumulate = !overwrite;", "call.grouped.product.accumulate = true;", "what is overwritten is added to"),
    Mutant(GLUE, "call.target.zero(out, static_cast<size_t>(out.numel()) * out.element_size());", "", "rows stay unwritten where there is no group"),
    Mutant(LAUNCH, "if (!p.sums) given.batch = p.groups;", "", "one matrix of B is copied"),
    Mutant(LAUNCH, "if (gemm_sm90_refuses_groups(taken)) return false;", "", "the kernel of Hopper must take everything"),
    Mutant("gemm/plan.h", "(r.tma_operands() || r.batch_invariant)", "r.tma_operands()", "a lone product of unaligned operands takes another kernel"),
    Mutant(LAUNCH, "if (p.product.k == 0) sum_over_zeros(call_, p.product, !p.sums);", "", "a sum over nothing is left to the kernels"),
    Mutant(LAUNCH, "q.m_major_a = q.n_major_b = !along_k;", "q.m_major_a = q.n_major_b = false;", "zeros by rows for sums over terms"),
    Mutant(LAUNCH, "q.ld_b = along_k ? kZeros : pitch(q.n);", "q.ld_b = kZeros;", "lines of zeros that overlap",
           missed="what the lines share is zeros, too"),
]  # fmt: skip

"""Bugs in the plans of products that a profile sets."""

from . import Mutant

TEST = "emulator/test_gemm_tuning.py"
GEMM = "gemm/glue.cpp"
LAUNCH = "gemm/launch.h"
PLAN = "gemm/plan.h"

MUTANTS = [
    Mutant(GEMM, ".m = as_int(op, p[0]),\n .n = as_int(op, p[1])", ".m = as_int(op, p[1]), .n = as_int(op, p[0])", "rows and columns exchanged"),
    Mutant(GEMM, ".bias = p[7] != 0", ".bias = p[8] != 0", "the residual in place of the bias"),
    Mutant(GEMM, ".column_sums = p[11] != 0", ".column_sums = p[7] != 0", "sums of columns are a bias"),
    Mutant(GEMM, "plans.erase(key);", "", "a plan is never taken back"),
    Mutant(GEMM, "as_int(op, plan[2]), plan[3] != 0", "as_int(op, plan[3]), plan[2] != 0", "splits and exchange of operands exchanged"),
    Mutant(PLAN, "splits > 1 && (r.batch_invariant ||", "splits > 1 && (", "a plan changes a fixed order"),
    Mutant(LAUNCH, "plan_gemm_once(request, chip, wanted)", "plan_gemm_once(request, chip)", "plans are forgotten"),
    Mutant(PLAN, "found.value_or(best)", "best", "the planner's plan after all"),
    Mutant(PLAN, "chip.geforce, wanted};", "chip.geforce};", "the plan that was made without a profile"),
    Mutant(PLAN, "tile, splits, swapped} == c", "tile, splits, swapped}.kernel == c.kernel", "any tile of the kernel"),
    Mutant(PLAN, ".keeps_z = e.z.data != nullptr", ".keeps_z = false", "a product with its pre-activation is one without"),
    Mutant(PLAN, ".m_major_a = q.m_major_a", ".m_major_a = q.n_major_b", "the layout of B in place of that of A"),
    Mutant(PLAN, ".out_bytes = q.accumulate ? 8 :", ".out_bytes =", "an accumulated product is one that overwrites"),
    Mutant(PLAN, ".residual = e.residual.data != nullptr", ".residual = e.bias.data != nullptr", "a bias is a residual"),
]  # fmt: skip

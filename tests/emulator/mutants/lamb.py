"""Bugs in the LAMB kernels: in the first pass, the rates, and what the second pass finds.

The formula itself is tested against another one written down in tests/math: here kernel and test share it.
"""

from . import Mutant

TEST = "test_lamb"
KERNEL = "update/rules/lamb.cu"
STEP = "update/step.cuh"
ARGS = "update/arguments.cuh"
WEIGHTS = "update/update.cuh"
PLAN = "base/tensor_list.h"


MUTANTS = [
    # ---- the rule
    Mutant(KERNEL, "store(&row->scalars.rate, Lamb::rate_of(", "store(&row->scalars.rate, 0 * Lamb::rate_of(", "no step"),
    Mutant(KERNEL, "Lamb::rate_of(sums.weight, sums.direction,", "Lamb::rate_of(sums.direction, sums.weight,", "the trust ratio is upside down"),
    Mutant(STEP, "Rule::scalars(options, step)", "Rule::scalars(options, step - 1)", "bias correction of the step before"),
    Mutant(STEP, "= args.options[i];", "= args.options[0];", "the learning rate is that of the first parameter's group"),
    # ---- the first pass
    Mutant(KERNEL, "if (skipped(decisions)) return; int tensor = 0;", "int tensor = 0;", "a skipped step moves the moments"),
    Mutant(KERNEL, "store_moment(t.moments[m], t.moment_dtypes[m], i, moments[m]);", "", "the moments are not stored"),
    Mutant(KERNEL, "as_stored(t.moment_dtypes[m], moments[m]);", "", "the norm is of directions before the moments are rounded"),
    Mutant(WEIGHTS, "if (dtype == DType::kFloat32) return;", "", "fp32 moments are taken for bf16 ones"),
    Mutant(KERNEL, "effective_grad(grad[j], row.inv_scale, row.clip)", "grad[j]", "does not unscale"),
    Mutant(KERNEL, "sums.weight += square(weight[j]);", "sums.weight += square(grad[j]);", "the norm of the gradients"),
    Mutant(KERNEL, "sums.direction += square(Lamb::direction(weight[j]", "sums.direction += square(Lamb::direction(0.0f", "the direction is without its decay"),
    Mutant(KERNEL, "sums.weight += square(weight[j]);", "sums.weight = square(weight[j]);", "only the last element counts"),
    Mutant(KERNEL, "return static_cast<double>(x) * static_cast<double>(x);", "return x * x;", "squares are rounded to fp32"),
    Mutant(KERNEL, "sums.weight += square(weight[j]);", "sums.weight = float(sums.weight) + float(square(weight[j]));", "sums are kept in fp32"),
    Mutant(WEIGHTS, "case WeightKind::kFp16: case WeightKind::kStochasticFp16: return f(PlainWeight<fp16>{});",
           "case WeightKind::kFp16: return f(PlainWeight<fp16>{}); case WeightKind::kStochasticFp16: return;", "weights that are rounded stochastically are left out"),
    Mutant(KERNEL, "rows + args.row[tensor]); const auto t", "rows + tensor); const auto t", "later launches read the rows of the first one"),
    Mutant(KERNEL, "tensor = span.tensor;", "tensor = 0;", "every unit is taken for the first tensor's"),
    Mutant(KERNEL, "index += grid_blocks()", "index += 1", "several blocks take one unit"),
    Mutant(ARGS, "if constexpr (Rule::kMovesMoments) aligned[place] = aligned[place] && vector_aligned(p.grad);", "", "unaligned gradients take the vector path"),
    # ---- slots and rates
    Mutant(KERNEL, "find(index, index + 1, tensor)", "find(index, args.map.units, tensor)", "units to the tensor's end"),
    Mutant(KERNEL, "store(slots + index, sums)", "store(slots + block_index(), sums)", "slots belong to blocks"),
    Mutant(KERNEL, "sums = block_total<kThreads>(sums); if (thread_index() == 0) store", "if (thread_index() == 0) store", "the first thread's sums stand for all"),
    Mutant(KERNEL, "block_sum<kThreads>(sums.direction)", "block_sum<kThreads>(sums.weight)", "all ratios are 1"),
    Mutant(KERNEL, "if (thread_index() == 0) store(slots", "store(slots", "all threads store the sums of a unit"),
    Mutant(KERNEL, "if (skipped(decisions)) return; for (int tensor", "for (int tensor", "a skipped step reads slots that nobody wrote"),
    Mutant(KERNEL, "begin = args.map.begin_of(tensor)", "begin = 0", "the sums of all tensors before are added"),
    Mutant(KERNEL, "begin = args.map.begin_of(tensor)", "begin = args.map.end[tensor] - 1", "only the last unit of a tensor counts"),
    Mutant(KERNEL, "slot < end; slot += kThreads", "slot < end; slot += kThreads / 2", "slots count several times"),
    Mutant(KERNEL, "slot < end; slot += kThreads", "slot < begin + kThreads; slot += kThreads", "reads slots of other tensors"),
    Mutant(KERNEL, "tensor < args.map.tensors; tensor += grid_blocks()", "tensor < args.map.tensors; tensor += args.map.tensors", "tensors beyond the grid have no rate"),
    Mutant(KERNEL, "LambRow* row = rows + args.row[tensor];", "LambRow* row = rows + tensor;", "rates of later launches are the first ones'"),
    Mutant(KERNEL, "direction += other.direction;", "direction = other.direction;", "of directions only the last slot of a thread counts"),
    Mutant(PLAN, "most = std::max(most, static_cast<size_t>(", "most = ((", "too few slots: as many as the last launch needs"),
    # ---- the second pass
    Mutant(STEP, "if constexpr (Rule::kMovesMoments) { AK_UNROLL", "{ AK_UNROLL", "moments are stored again",
           missed="the same bits are stored, so this costs time alone"),
    # ---- the kernel in front
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "scalars are read before they are written"),
    Mutant(KERNEL, "wait_for_previous_kernel();", "", "slots are read before they are written", 2),
]  # fmt: skip

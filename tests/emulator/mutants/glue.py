"""Bugs in the host code of the CUDA ops: which address, stride, scratch and plan a kernel gets."""

from . import Mutant

TEST = "emulator/test_glue.py"
GRADIENTS = "gradients/glue.cpp"
SUMS = "column_sums/glue.cpp"
SLOTS = "column_sums/glue.h"
ACTIVATION = "activation/glue.cpp"
OPERAND = "gemm/glue_operand.h"
GEMM = "gemm/glue.cpp"
LAUNCH = "gemm/launch.h"
UPDATE = "update/glue.cpp"
UPDATE_CALL = "update/call.h"
CALL = "base/op_call.h"
PLAN = "gemm/plan.h"

MUTANTS = [
    # ---- column_sums
    Mutant(SLOTS, "static_cast<size_t>(shares * columns) * sizeof(float)", "static_cast<size_t>(shares * columns)", "a quarter of the bytes for the shares"),
    Mutant(SUMS, ".pitch = x.stride(0)", ".pitch = x.size(1)", "rows lie without a gap"),
    Mutant(SUMS, "x_in.stride(1) == 1", "x_in.stride(0) >= 1", "columns are read as rows"),
    Mutant(SUMS, "if (p.columns == 0) return sums;", "", "a grid of no columns"),
    Mutant(SUMS, "dtype_of(x.scalar_type())", "DType::kBFloat16", "every matrix is bf16"),
    # ---- check_and_norm, unscale_, update_scale_
    Mutant(GRADIENTS, "call.counters(1)", "static_cast<uint32_t*>(scratch)", "blocks are counted in memory that nobody zeroed"),
    Mutant(GRADIENTS, "any_empty ? sizeof(float) * refs.size() : 0", "any_empty ? sizeof(float) : 0", "results of empty tensors after the first stay unwritten"),
    Mutant(GRADIENTS, "call.scratch(check_and_norm_per_tensor_scratch_bytes(refs))", "call.scratch(check_and_norm_scratch_bytes(refs))", "the scratch of another kernel"),
    Mutant(GRADIENTS, "scratch, blocks_done, norms_at, found_at);", "scratch, blocks_done, found_at, norms_at);", "norm and flag exchanged"),
    Mutant(GRADIENTS, 'const float* scale = call.scalar({"grad_scale"}, grad_scale);', "const float* scale = nullptr;", "the scale is forgotten"),
    Mutant(GRADIENTS, 'call.mutable_scalar<int32_t>({"growth_tracker"}, growth_tracker)', 'call.mutable_scalar<int32_t>({"hysteresis_tracker"}, hysteresis_tracker)',
           "one tracker in the place of the other"),
    Mutant(GRADIENTS, "found_infs[i])", "found_infs[0])", "only the first flag is looked at"),
    Mutant(GRADIENTS, "{growth_factor, backoff_factor,", "{backoff_factor, growth_factor,", "the factors exchanged"),
    Mutant(GRADIENTS, "min_scale, max_scale, hysteresis,", "max_scale, min_scale, hysteresis,", "the bounds exchanged"),
    Mutant(GRADIENTS, "refs.push_back({data, list[i].numel(), dtype_of(list[i].scalar_type())});",
           "refs.push_back({data, list[i].numel(), dtype_of(list[0].scalar_type())});", "the dtype of the neighbour"),
    Mutant(GRADIENTS, "for (size_t i = 0; i < list.size(); ++i) {", "for (size_t i = 0; i < std::min<size_t>(list.size(), 1536); ++i) {",
           "the tail of a long list is dropped"),
    Mutant(CALL, "zero(t, zeroed);", "", "scratch is never zeroed"),
    # ---- activation_backward
    Mutant(ACTIVATION, "const Tensor g = torch::stable::contiguous(grad)", "const Tensor g = grad", "a gradient with gaps is taken as it is laid out"),
    Mutant(ACTIVATION, "columns == 0 ? 0 : z.numel() / columns", "columns == 0 ? 0 : g.numel() / columns", "rows counted by the narrower tensor", nth=2),
    Mutant(ACTIVATION, "dtype_of(g.scalar_type())", "dtype_of(z.scalar_type())", "the dtype of the gradient is that of z"),
    Mutant(ACTIVATION, "columns == 0 ? nullptr : column_slots", "columns == 0 ? nullptr : p.sums; column_slots", "the shares leave their sums in those of all"),
    # ---- GEMM: operands
    Mutant(GEMM, "problem.batch_stride_a = batch_stride_of(a.tensor), problem.batch_stride_b = batch_stride_of(b.tensor);",
           "problem.batch_stride_a = batch_stride_of(b.tensor), problem.batch_stride_b = batch_stride_of(a.tensor);", "the batch strides of the operands exchanged"),
    Mutant(GEMM, "problem.ld_a = a.layout.ld, problem.ld_b = b.layout.ld;", "problem.ld_a = b.layout.ld, problem.ld_b = a.layout.ld;",
           "the row strides of the operands exchanged"),
    Mutant(GEMM, "problem.m_major_a = !a.layout.k_contiguous", "problem.m_major_a = !b.layout.k_contiguous", "the layout of b for a"),
    Mutant(OPERAND, "t.stride(d - 2), t.stride(d - 1), batch_stride_of(t)", "t.stride(d - 1), t.stride(d - 2), batch_stride_of(t)", "row and column stride exchanged"),
    Mutant(OPERAND, "t.stride(d - 2), t.stride(d - 1), batch_stride_of(t)};", "t.stride(d - 2), t.stride(d - 1), d == 3 ? t.stride(1) : 0};",
           "the row stride for the batch stride of results"),
    Mutant(GEMM, "problem.batch_stride_a = batch_stride_of(a.tensor)", "problem.batch_stride_a = 0", "every matrix of a batch is the first"),
    Mutant(OPERAND, "tensor = torch::stable::contiguous(t);", "", "an operand that lies in no usable way is not copied"),
    Mutant(LAUNCH, "if (q.k == 0) sum_over_zeros(call_, q);", "", "a sum over nothing is left to the kernels"),
    Mutant(PLAN, "(r.tma_operands() || r.batch_invariant)", "r.tma_operands()", "unaligned rows take another kernel than aligned ones"),
    Mutant(GEMM, "call.a.lay_across(d - 1);", "", "a gradient that lies along its rows is refused"),
    Mutant(OPERAND, "tensor.size(k_dim) == 1 ? (tensor.size(other) + 7) / 8 * 8 : tensor.stride(k_dim)", "tensor.size(other)", "lines across k are taken as dense"),
    # ---- GEMM: epilogue
    Mutant(GEMM, "values.row_stride = per_column ? 0 : t.stride(0);", "values.row_stride = per_column ? 0 : 1;", "a bias per row is taken as dense"),
    Mutant(GEMM, "values.column_stride = per_column ? t.stride(0) : 0;", "values.column_stride = per_column ? 1 : 0;", "a bias per column is taken as dense"),
    Mutant(GEMM, "e.alpha = static_cast<float>(alpha); e.beta = static_cast<float>(beta);", "e.alpha = static_cast<float>(beta); e.beta = static_cast<float>(alpha);",
           "alpha and beta exchanged"),
    Mutant(GEMM, "if (beta != 0) e.residual = call.read(", "e.residual = call.read(", "a residual is read although beta is 0"),
    Mutant(GEMM, "call.problem.accumulate = beta == 1.0;", "call.problem.accumulate = beta != 0.0;", "beta is taken for 1"),
    Mutant(GEMM, 'call.target.write({"c"}, c, beta != 0.0)', 'call.target.write({"c"}, c, false)', "what stands in c counts as unwritten"),
    Mutant(GEMM, "if (bias_grad) call.target.zero(sums, static_cast<size_t>(columns) * 4);", "", "sums over no rows stay unwritten"),
    Mutant(GEMM, "call.target.scratch(static_cast<size_t>(column_sums_size(call.problem)) * 4)",
           "call.target.scratch(static_cast<size_t>(column_sums_size(call.problem)))", "a quarter of the bytes for the column sums"),
    # ---- GEMM: plan, scratch
    Mutant(LAUNCH, "const GemmSm90Config config{plan.tile, plan.splits, plan.swapped};", "const GemmSm90Config config{plan.tile, plan.splits, false};",
           "operands are never exchanged"),
    Mutant(LAUNCH, "const GemmSm90Config config{plan.tile, plan.splits, plan.swapped};", "const GemmSm90Config config{0, plan.splits, plan.swapped};",
           "always the first tile"),
    Mutant(PLAN, "const Key key{request, chip.sm_count, chip.capability,", "const Key key{request, chip.sm_count, 0,",
           "the plan that another GPU was given"),
    Mutant(LAUNCH, "call_.scratch(size.partials * 4)", "call_.scratch(size.partials * 2)", "room for half of the partial sums"),
    Mutant(LAUNCH, "call_.counters(size.counters)", "call_.counters(size.counters / 2)", "half of the counters"),
    Mutant("gemm/sm80/launch.cuh", "if (q.accumulate && !Tile::kChained) {", "  if (false) {", "c is overwritten, not added to"),
    Mutant(LAUNCH, "q.batch_stride_a = q.batch_stride_b = 0;", "", "zeros are read beyond their end"),
    # ---- updates
    Mutant(UPDATE_CALL, "p.moment_dtypes[k] = block.moment_dtypes[k];", "p.moment_dtypes[k] = DType::kFloat32;", "moments are taken for fp32"),
    Mutant(UPDATE_CALL, "p.grad_dtype = dtype_of(static_cast<ScalarType>(row.grad_dtype));", "p.grad_dtype = DType::kFloat32;", "gradients are taken for fp32"),
    Mutant(UPDATE_CALL, "p.shadow_dtype = block.shadow_dtype;", "p.shadow_dtype = DType::kFloat16;", "shadows are taken for fp16"),
    Mutant(UPDATE_CALL, "p.group = static_cast<int>(row.group);", "p.group = 0;", "everything is in the first group"),
    Mutant(UPDATE_CALL, "random_place(static_cast<uint32_t>(row.index), first,", "random_place(0, first,", "all parameters draw the same random bits"),
    Mutant(UPDATE, "call.lrs[g])", "call.lrs[0])", "every group takes the first learning rate"),
    Mutant(UPDATE, "call.weight_decays[g])", "call.weight_decays[0])", "every group takes the first weight decay"),
    Mutant(UPDATE, "call.options_of<Rule>(g)", "call.options_of<Rule>(0)", "every group has the options of the first"),
    Mutant(UPDATE, 'gpu.scalar({"sum_sq"}, call.sum_sq)', "nullptr", "nothing is clipped"),
    Mutant(UPDATE, "update_scratch_bytes<Rule>(params)", "update_scratch_bytes<Rule>(params) / 2", "half of the scratch"),
    Mutant(GRADIENTS, "table_address(call.op(), name, row.grad, row.numel, dtype)", "table_address(call.op(), name, row.param, row.numel, dtype)",
           "of a table, parameters are checked in place of gradients"),
    Mutant("base/elementwise.cuh", ".overlap_previous = true,", "", "elementwise kernels wait for the end of the previous one"),
]  # fmt: skip

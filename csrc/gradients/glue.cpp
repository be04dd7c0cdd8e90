// check_and_norm, unscale_, exponent_histogram, judge_units_ and update_scale_: from the schemas to gradients/call.h.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/op_call.h"
#include "base/tensor_table.h"
#include "gradients/call.h"
#include "gradients/exponent.h"

namespace ak {
namespace {

template <typename Void>
std::vector<GradRefTo<Void>> refs(OpCall& call, const char* argument, const TensorList& list) {
  std::vector<GradRefTo<Void>> refs;
  refs.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    const ArgName name{argument, static_cast<int64_t>(i)};
    check_dtype(call.op(), name, list[i], kFloatDtypes);
    check_dense(call.op(), name, list[i]);
    Void* data;
    if constexpr (std::is_const_v<Void>) {
      data = call.read(name, list[i]);
    } else {
      data = call.write(name, list[i]);
    }
    refs.push_back({data, list[i].numel(), dtype_of(list[i].scalar_type())});
  }
  return refs;
}

// The gradients of a table.
std::vector<GradRef> refs(OpCall& call, const Tensor& table) {
  const auto rows = table_rows(call.op(), {"table"}, table);
  std::vector<GradRef> refs;
  refs.reserve(rows.size());
  for (const TableRow& row : rows) {
    const ArgName name{"grads", static_cast<int64_t>(refs.size())};
    const ScalarType dtype = table_dtype(call.op(), name, row.grad_dtype, kFloatDtypes);
    const GradRef ref{table_address(call.op(), name, row.grad, row.numel, dtype), row.numel, dtype_of(dtype)};
    call.reach(name, ref.data, ref.numel * bytes_of(ref.dtype), false);
    refs.push_back(ref);
  }
  return refs;
}

std::tuple<Tensor, Tensor> check_and_norm_of(OpCall& call, const std::vector<GradRef>& refs,
                                             const std::optional<Tensor>& grad_scale, Norm norm, bool per_tensor) {
  const float* scale = call.scalar({"grad_scale"}, grad_scale);
  const std::vector<int64_t> shape(per_tensor ? 1 : 0, static_cast<int64_t>(refs.size()));
  const Tensor norms = call.empty({"norms"}, shape, ScalarType::Float);
  const Tensor found_inf = call.empty({"found_inf"}, shape, ScalarType::Float);
  float* norms_at = static_cast<float*>(norms.mutable_data_ptr());
  float* found_at = static_cast<float*>(found_inf.mutable_data_ptr());
  if (per_tensor) {
    const bool any_empty = std::any_of(refs.begin(), refs.end(), [](const GradRef& g) { return g.numel == 0; });
    for (const Tensor& result : {norms, found_inf}) call.zero(result, any_empty ? sizeof(float) * refs.size() : 0);
    void* const scratch = call.scratch(check_and_norm_per_tensor_scratch_bytes(refs));
    call.launch(check_and_norm_per_tensor, refs, scale, norm, scratch, norms_at, found_at);
  } else {
    void* const scratch = call.scratch(check_and_norm_scratch_bytes(refs));
    uint32_t* const blocks_done = call.counters(1);
    call.launch(check_and_norm, refs, scale, norm, scratch, blocks_done, norms_at, found_at);
  }
  return {norms, found_inf};
}

std::tuple<Tensor, Tensor> run_check_and_norm(const TensorList& grads, const std::optional<Tensor>& grad_scale,
                                              double norm_type, bool per_tensor) {
  constexpr const char* op = "check_and_norm";
  AK_CHECK(!grads.empty(), op, ": grads must not be empty");
  const bool is_l2 = norm_type == 2.0;
  AK_CHECK(is_l2 || norm_type == std::numeric_limits<double>::infinity(), op, ": norm_type must be 2.0 or inf; got ",
           norm_type);
  OpCall call(op, {"grads", 0}, grads[0]);
  return check_and_norm_of(call, refs<const void>(call, "grads", grads), grad_scale,
                           is_l2 ? Norm::kSumOfSquares : Norm::kLargest, per_tensor);
}

std::tuple<Tensor, Tensor> run_check_and_norm_table(const Tensor& like, const Tensor& table,
                                                    const std::optional<Tensor>& grad_scale, bool per_tensor) {
  OpCall call("check_and_norm", {"like"}, like);
  return check_and_norm_of(call, refs(call, table), grad_scale, Norm::kSumOfSquares, per_tensor);
}

void run_unscale(const TensorList grads, const std::optional<Tensor> found_inf, const Tensor inv_scale) {
  OpCall call("unscale_", {"inv_scale"}, inv_scale);
  const std::vector<MutableGradRef> to = refs<void>(call, "grads", grads);
  const float* factor = call.scalar({"inv_scale"}, inv_scale);
  float* flag = call.mutable_scalar<float>({"found_inf"}, found_inf);
  call.launch(unscale, to, flag, factor);
}

std::tuple<Tensor, Tensor> run_exponent_histogram(const TensorList& tensors) {
  constexpr const char* op = "exponent_histogram";
  AK_CHECK(!tensors.empty(), op, ": tensors must not be empty");
  OpCall call(op, {"tensors", 0}, tensors[0]);
  const std::vector<GradRef> from = refs<const void>(call, "tensors", tensors);
  const int64_t n = static_cast<int64_t>(from.size());
  const Tensor counts = call.empty({"counts"}, {n, kExponentBins}, ScalarType::Long);
  const Tensor largest = call.empty({"largest"}, {n}, ScalarType::Float);
  call.zero(counts, sizeof(int64_t) * kExponentBins * from.size());
  call.zero(largest, sizeof(float) * from.size());
  call.launch(exponent_histogram, from, static_cast<uint64_t*>(counts.mutable_data_ptr()),
              static_cast<uint32_t*>(largest.mutable_data_ptr()));
  return {counts, largest};
}

void run_update_scale(const Tensor scale, const Tensor growth_tracker, const Tensor hysteresis_tracker,
                      const TensorList found_infs, double growth_factor, double backoff_factor, int64_t growth_interval,
                      double min_scale, double max_scale, int64_t hysteresis, bool consecutive,
                      const std::optional<Tensor> skipped_steps, const std::optional<Tensor> consecutive_skips) {
  constexpr const char* op = "update_scale_";
  AK_CHECK(hysteresis >= 1 && hysteresis <= INT32_MAX, op, ": hysteresis is ", hysteresis,
           "; accepted: a number from 1 to ", INT32_MAX);
  OpCall call(op, {"scale"}, scale);
  const LossScaleRef at{call.mutable_scalar<float>({"scale"}, scale),
                        call.mutable_scalar<int32_t>({"growth_tracker"}, growth_tracker),
                        call.mutable_scalar<int32_t>({"hysteresis_tracker"}, hysteresis_tracker),
                        call.mutable_scalar<int64_t>({"skipped_steps"}, skipped_steps),
                        call.mutable_scalar<int64_t>({"consecutive_skips"}, consecutive_skips)};
  std::vector<const float*> flags;
  flags.reserve(found_infs.size());
  for (size_t i = 0; i < found_infs.size(); ++i) {
    flags.push_back(call.scalar({"found_infs", static_cast<int64_t>(i)}, found_infs[i]));
  }
  const LossScaleOptions options{growth_factor, backoff_factor, growth_interval, min_scale,
                                 max_scale,     hysteresis,     consecutive};
  call.launch(update_scale, at, flags, options, call.scratch(update_scale_scratch_bytes(flags.size())));
}

// GPU kernels skip what is out of range; on the CPU it is an error.
void check_places(const UnitsRef& at, const char* op) {
  int64_t end = 0;
  for (int64_t unit = 0; unit < at.units; ++unit) {
    const int64_t least = unit + 1 < at.units ? end : at.tensors;
    AK_CHECK(at.ends[unit] >= least && at.ends[unit] <= at.tensors, op, ": ends[", unit, "] is ", at.ends[unit],
             "; accepted: ascending numbers up to ", at.tensors, ", which is the last");
    end = at.ends[unit];
  }
  AK_CHECK(end == at.tensors, op, ": no unit has the ", at.tensors, " tensors");
  std::vector<bool> seen(static_cast<size_t>(at.tensors));
  for (int64_t i = 0; i < at.tensors; ++i) {
    const int64_t row = row_of(at.rows[i]);
    AK_CHECK(row < at.tensors && !seen[static_cast<size_t>(row)], op, ": rows[", i, "] is ", at.rows[i],
             "; accepted: each number below ", at.tensors, " once, or its complement");
    seen[static_cast<size_t>(row)] = true;
  }
}

std::tuple<Tensor, Tensor> run_judge_units(const Tensor& sums, const Tensor& flags, const Tensor& rows,
                                           const Tensor& ends, const Tensor& rules, Tensor statistics,
                                           const std::optional<Tensor> found_infs) {
  constexpr const char* op = "judge_units_";
  OpCall call(op, {"sums"}, sums);
  const int64_t units = ends.numel(), tensors = sums.numel();
  const auto check_of = [&](const char* name, const Tensor& t, ScalarType dtype, int64_t count) {
    check_dtype(op, {name}, t, {dtype});
    AK_CHECK(t.numel() == count && t.is_contiguous(), op, ": ", name, " must be contiguous with ", count,
             " elements; got shape ", Ints{t.sizes()});
  };
  check_of("sums", sums, ScalarType::Float, tensors);
  check_of("flags", flags, ScalarType::Float, tensors);
  check_of("rows", rows, ScalarType::Long, tensors);
  check_of("ends", ends, ScalarType::Long, units);
  check_of("rules", rules, ScalarType::Double, units * static_cast<int64_t>(sizeof(UnitRule) / sizeof(double)));
  check_of("statistics", statistics, ScalarType::Double,
           units * static_cast<int64_t>(sizeof(UnitStatistics) / sizeof(double)));
  if (found_infs) check_of("found_infs", *found_infs, ScalarType::Float, units);
  const Tensor factors = call.empty({"factors"}, {tensors}, ScalarType::Float);
  const Tensor results = call.empty({"results"}, {3, units}, ScalarType::Float);
  const UnitsRef at{.units = units,
                    .tensors = tensors,
                    .sums = call.read<float>({"sums"}, sums),
                    .flags = call.read<float>({"flags"}, flags),
                    .rows = call.read<int64_t>({"rows"}, rows),
                    .ends = call.read<int64_t>({"ends"}, ends),
                    .rules = call.read<UnitRule>({"rules"}, rules),
                    .statistics = static_cast<UnitStatistics*>(call.write({"statistics"}, statistics)),
                    .found_infs = call.read<float>({"found_infs"}, found_infs),
                    .factors = static_cast<float*>(factors.mutable_data_ptr()),
                    .results = static_cast<float*>(results.mutable_data_ptr())};
  if (call.kOnCpu) check_places(at, op);
  if (units > 0) call.launch(judge_units, at);
  return {factors, results};
}

}  // namespace
}  // namespace ak

AK_OPS(m) {
  m.impl("check_and_norm", TORCH_BOX(&ak::run_check_and_norm));
  m.impl("_check_and_norm_table", TORCH_BOX(&ak::run_check_and_norm_table));
  m.impl("unscale_", TORCH_BOX(&ak::run_unscale));
  m.impl("exponent_histogram", TORCH_BOX(&ak::run_exponent_histogram));
  m.impl("judge_units_", TORCH_BOX(&ak::run_judge_units));
  m.impl("update_scale_", TORCH_BOX(&ak::run_update_scale));
}

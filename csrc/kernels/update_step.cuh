// One optimizer step over a list of parameters, as two kernels that know the optimizer by its Rule alone.
//
// update_prepare_kernel, one thread a parameter: increments the step count and derives from it, in double, the few
// scalars that all elements of the parameter share (bias corrections, decay, clip factor). It runs before the update,
// so no block ever reads a count that another one is about to change, and the update is spared the double arithmetic
// and its registers. update_kernel, a persistent grid over the chunks of the whole list: reads gradient, moments and
// weight, writes moments and weight. Bandwidth is the limit as long as enough loads are in flight, so a thread fetches
// eight elements of each operand, up to 128 bytes, before it computes. Traps: a skip (found_inf) must leave every byte
// as it was, the count too. Gradients may start at any element (views into a communication bucket) while the state is
// always aligned, so no peel could align both: such tensors go element by element.
//
// A Rule has: Options and Scalars (csrc/math); kName and kPrepareName, for errors; kMoments, what it keeps of an
// element between steps, and kMomentsOptional, whether a parameter may come without (then moments[0] is null);
// kBlocksPerSm; how many tensors fit a launch of each kernel; scalars(options, step), and update(weight, moments, are
// there moments, effective gradient, scalars) for one element.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "device/launch.cuh"
#include "kernels/tensor_list.h"
#include "kernels/update.cuh"
#include "kernels/update.h"
#include "math/clip.h"

namespace ak {

inline constexpr int kUpdateThreads = 256;
inline constexpr int kPrepareThreads = 128;

/// What update_prepare_kernel hands to update_kernel for one parameter.
template <class Rule>
struct alignas(16) UpdateRow {
  typename Rule::Scalars scalars;
  float inv_scale;
  float clip;  // negative when maximizing
};

/// The parameters of one launch of update_prepare_kernel.
template <class Rule, int N>
struct PrepareArgs {
  int tensors;
  typename Rule::Options options[N];
  float* step[N];
  const float* lr[N];
  bool maximize[N];
};

/// The parameters of one launch of update_kernel.
template <class Rule, int N>
struct UpdateArgs {
  static constexpr int kTensors = N;
  ChunkMap<N> map;
  const void* grad[N];
  void* main[N];
  void* second[N];
  void* moments[Rule::kMoments][N];
  uint32_t row[N];
  WeightKind kind[N];
  DType grad_dtype[N], moment_dtypes[Rule::kMoments][N];
  bool aligned[N];  // every operand to 16 bytes

  void set(int place, const ParamState& p, size_t position) {
    const bool fp32 = p.param_dtype == DType::kFloat32;
    const bool half = p.param_dtype == DType::kFloat16;
    grad[place] = p.grad;
    main[place] = p.master_kind == Master::kFloat32 ? p.master : p.param;
    second[place] = nullptr;
    if (p.master_kind == Master::kFloat32) {
      kind[place] = half ? WeightKind::kFp32CopyFp16 : WeightKind::kFp32CopyBf16;
      second[place] = p.param;
    } else if (p.master_kind == Master::kSplit) {
      kind[place] = half ? WeightKind::kSplitFp16 : WeightKind::kSplitBf16;
      second[place] = p.master;
    } else if (p.shadow != nullptr) {
      kind[place] = p.shadow_dtype == DType::kFloat16 ? WeightKind::kFp32CopyFp16 : WeightKind::kFp32CopyBf16;
      second[place] = p.shadow;
    } else {
      kind[place] = fp32 ? WeightKind::kFp32 : half ? WeightKind::kFp16 : WeightKind::kBf16;
    }
    row[place] = static_cast<uint32_t>(position);
    grad_dtype[place] = p.grad_dtype;
    auto is_aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
    aligned[place] = is_aligned(p.grad) && is_aligned(main[place]) && is_aligned(second[place]);
    for (int m = 0; m < Rule::kMoments; m++) {
      moments[m][place] = p.moments[m];
      moment_dtypes[m][place] = p.moment_dtypes[m];
      aligned[place] = aligned[place] && is_aligned(p.moments[m]);
    }
  }
};

AK_DEVICE bool skipped(const StepDecisions& decisions) {
  return decisions.found_inf != nullptr && found(load(decisions.found_inf));
}

template <class Rule, int kThreads, int kTensors>
AK_KERNEL(kThreads, 1)
update_prepare_kernel(AK_PARAM(PrepareArgs<Rule, kTensors>) args, AK_PARAM(StepDecisions) decisions,
                      UpdateRow<Rule>* rows) {
  const int i = block_index() * kThreads + thread_index();
  if (i >= args.tensors || skipped(decisions)) return;
  const float step = load(args.step[i]) + 1.0f;
  store(args.step[i], step);

  typename Rule::Options options = args.options[i];
  if (args.lr[i] != nullptr) options.lr = load(args.lr[i]);
  UpdateRow<Rule> row{};
  row.scalars = Rule::scalars(options, step);
  row.inv_scale = decisions.grad_scale == nullptr ? 1.0f : inverse_scale(load(decisions.grad_scale));
  row.clip = decisions.sum_sq == nullptr ? 1.0f : clip_factor(load(decisions.sum_sq), decisions.max_norm);
  if (args.maximize[i]) row.clip = -row.clip;
  store(rows + i, row);
}

/// Where the elements of one tensor are, and what they are.
template <class Rule>
struct UpdateOperands {
  const void* grad;
  void *main, *second;
  void* moments[Rule::kMoments];
  DType grad_dtype, moment_dtypes[Rule::kMoments];
};

/// Elements i .. i + V - 1.
template <class Rule, bool kHasMoments, class Weight, int V>
AK_DEVICE void update_elements(const UpdateOperands<Rule>& t, const UpdateRow<Rule>& row, int64_t i) {
  const auto raw_grad = fetch<V>(t.grad, t.grad_dtype, i);
  RawElements<V> raw_moments[Rule::kMoments] = {};
  AK_UNROLL
  for (int m = 0; m < Rule::kMoments; m++) {
    if (kHasMoments) raw_moments[m] = fetch<V>(t.moments[m], t.moment_dtypes[m], i);
  }
  const auto raw_weight = Weight::template fetch<V>(t.main, t.second, i);

  float grad[V], moments[Rule::kMoments][V], weight[V];
  decode(raw_grad, t.grad_dtype, grad);
  AK_UNROLL
  for (int m = 0; m < Rule::kMoments; m++) decode(raw_moments[m], t.moment_dtypes[m], moments[m]);
  Weight::decode(raw_weight, weight);
  AK_UNROLL
  for (int j = 0; j < V; j++) {
    float of_element[Rule::kMoments];
    AK_UNROLL
    for (int m = 0; m < Rule::kMoments; m++) of_element[m] = moments[m][j];
    const float g = effective_grad(grad[j], row.inv_scale, row.clip);
    Rule::update(weight[j], of_element, kHasMoments, g, row.scalars);
    AK_UNROLL
    for (int m = 0; m < Rule::kMoments; m++) moments[m][j] = of_element[m];
  }
  AK_UNROLL
  for (int m = 0; m < Rule::kMoments; m++) {
    if (kHasMoments) store_moment(t.moments[m], t.moment_dtypes[m], i, moments[m]);
  }
  Weight::store(t.main, t.second, i, weight);
}

template <class Rule, int kThreads, int kTensors>
AK_KERNEL(kThreads, Rule::kBlocksPerSm)
update_kernel(AK_PARAM(UpdateArgs<Rule, kTensors>) args, AK_PARAM(StepDecisions) decisions,
              const UpdateRow<Rule>* rows) {
  if (skipped(decisions)) return;
  int tensor = 0;
  for (uint32_t index = block_index(); index < args.map.chunks; index += grid_blocks()) {
    const TensorChunk chunk = args.map.find(index, tensor);
    tensor = chunk.tensor;
    const UpdateRow<Rule> row = load(rows + args.row[tensor]);
    UpdateOperands<Rule> t;
    t.grad = args.grad[tensor];
    t.main = args.main[tensor];
    t.second = args.second[tensor];
    t.grad_dtype = args.grad_dtype[tensor];
    AK_UNROLL
    for (int m = 0; m < Rule::kMoments; m++) {
      t.moments[m] = args.moments[m][tensor];
      t.moment_dtypes[m] = args.moment_dtypes[m][tensor];
    }
    const int by_eight = args.aligned[tensor] ? chunk.count / 8 * 8 : 0;
    with_weight(args.kind[tensor], [&]<class Weight>(Weight) {
      auto update = [&]<bool kHasMoments>(std::bool_constant<kHasMoments>) {
        for (int i = thread_index() * 8; i < by_eight; i += kThreads * 8)
          update_elements<Rule, kHasMoments, Weight, 8>(t, row, chunk.begin + i);
        for (int i = by_eight + thread_index(); i < chunk.count; i += kThreads)
          update_elements<Rule, kHasMoments, Weight, 1>(t, row, chunk.begin + i);
      };
      if constexpr (Rule::kMomentsOptional) {
        if (t.moments[0] == nullptr) return update(std::false_type{});
      }
      update(std::true_type{});
    });
  }
}

namespace detail {

/// Counts the step of every parameter and fills its row.
template <class Rule, int kThreads, int kTensors>
Status prepare_rows(std::span<const ParamState> params, std::span<const ParamGroup<typename Rule::Options>> groups,
                    const StepDecisions& decisions, UpdateRow<Rule>* rows, Stream stream) {
  static_assert(sizeof(PrepareArgs<Rule, kTensors>) + 128 <= kArgumentBytes,
                "the list and the other arguments must fit one launch");
  PrepareArgs<Rule, kTensors> args;
  for (size_t begin = 0; begin < params.size(); begin += kTensors) {
    args.tensors = static_cast<int>(std::min<size_t>(kTensors, params.size() - begin));
    for (int i = 0; i < args.tensors; i++) {
      const ParamState& p = params[begin + i];
      const auto& group = groups[p.group];
      args.options[i] = group.options;
      args.step[i] = p.step;
      args.lr[i] = group.lr;
      args.maximize[i] = group.maximize;
    }
    const LaunchConfig config{.name = Rule::kPrepareName,
                              .grid = (args.tensors + kThreads - 1) / kThreads,
                              .block = kThreads,
                              .stream = stream};
    const Status status =
        launch(update_prepare_kernel<Rule, kThreads, kTensors>, config, args, decisions, rows + begin);
    if (!status.ok()) return status;
  }
  return {};
}

/// Updates every parameter by its row.
template <class Rule, int kThreads, int kTensors>
Status update_params(int resident_blocks, std::span<const ParamState> params, const StepDecisions& decisions,
                     const UpdateRow<Rule>* rows, Stream stream) {
  using Args = UpdateArgs<Rule, kTensors>;
  static_assert(sizeof(Args) + 128 <= kArgumentBytes, "the list and the other arguments must fit one launch");
  LaunchPlan<Args, ParamState> plan(params);
  Args args;
  while (plan.next(args)) {
    const int grid = grid_for(args.map.chunks, resident_blocks);
    const LaunchConfig config{.name = Rule::kName, .grid = grid, .block = kThreads, .stream = stream};
    const Status status = launch(update_kernel<Rule, kThreads, kTensors>, config, args, decisions, rows);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace detail

template <class Rule>
size_t update_scratch_bytes(size_t params) {
  return params * sizeof(UpdateRow<Rule>);
}

/// One step of every parameter, as the package ships it. `scratch` is aligned to 16 bytes.
template <class Rule>
Status update_step(std::span<const ParamState> params, std::span<const ParamGroup<typename Rule::Options>> groups,
                   const StepDecisions& decisions, void* scratch, Stream stream) {
  auto* rows = static_cast<UpdateRow<Rule>*>(scratch);
  const Status prepared =
      detail::prepare_rows<Rule, kPrepareThreads, Rule::kPrepareTensors>(params, groups, decisions, rows, stream);
  if (!prepared.ok()) return prepared;
  return detail::update_params<Rule, kUpdateThreads, Rule::kTensors>(device_sm_count() * Rule::kBlocksPerSm, params,
                                                                     decisions, rows, stream);
}

}  // namespace ak

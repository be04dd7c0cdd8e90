// One optimizer step over a list of parameters: two kernels over any rule.
//
// update_prepare_kernel, one thread a parameter: increments the step count and derives from it, in double, the few
// scalars that all elements of the parameter share (bias corrections, decay, clip factor). It runs before the update,
// so no block reads a count that another one is about to change, and the update needs neither double arithmetic nor its
// registers. update_kernel, a persistent grid over the whole list: reads gradient, moments and weight,
// writes moments and weight. It is bandwidth-bound if enough loads are in flight, so a thread fetches eight elements of
// each operand, up to 128 bytes, before it computes. Traps: a skip (found_inf) must leave every byte unchanged, the
// count too. Gradients may start at any element (views into a communication bucket) while the state is always aligned,
// so no peel could align both: such tensors go element by element.
//
// Few steps need the extras: an average of the weights, optional moments, stochastic rounding. Their code and registers
// would slow every step, so update_kernel exists with and without them; one parameter with an extra selects the former.
// Parameters with moments in 8 bits have a kernel of their own (update/update8.cuh).
//
// `Rule` is that of update/rule.h with its tuning, Tuned<Rule> in update/rules/X.cu:
//   kCommonMoments                  number of moments in the kernel without extras
//   kMovesMoments                   false: update_kernel finds the moments up to date and does not read the gradient
//   kBlocksPerSm, kExtrasBlocksPerSm   of update_kernel: as many as an SM holds
//   kTensors, kExtrasTensors, kPrepareTensors   of a launch of update_kernel and of update_prepare_kernel
//   kBlocksPerSm8, kTensors8        of update8_kernel
// and, for a rule with a stage, stage_bytes(params) and stage(StageCall), which runs before update_kernel.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "update/arguments.cuh"
#include "update/update8.cuh"

namespace ak {

inline constexpr int kUpdateThreads = 256;
inline constexpr int kPrepareThreads = 128;

/// The parameters of one launch of update_prepare_kernel.
template <class Rule, int N>
struct PrepareArgs {
  int tensors;
  typename Rule::Options options[N];
  float* step[N];
  const float* lr[N];
  const double* weight_decay[N];
  float ema_take[N];
  RandomPlace random[N];
  bool maximize[N];
};

template <class Rule, int kThreads, int kTensors>
AK_KERNEL(kThreads, 1)
update_prepare_kernel(AK_PARAM(PrepareArgs<Rule, kTensors>) args, AK_PARAM(StepDecisions) decisions,
                      UpdateRow<Rule>* rows, int first) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int i = block_index() * kThreads + thread_index();
  if (i >= args.tensors || skipped(decisions)) return;
  float clip = 1.0f;
  if (decisions.sum_sq != nullptr) clip = clip_factor(load(decisions.sum_sq), decisions.max_norm);
  if (decisions.factors != nullptr) clip = load(decisions.factors + first + i);
  UpdateRow<Rule> row{};
  if (leaves(clip)) {
    row.clip = kLeave;
    store(rows + first + i, row);
    return;
  }
  const float step = load(args.step[i]) + 1.0f;
  store(args.step[i], step);

  typename Rule::Options options = args.options[i];
  if (args.lr[i] != nullptr) options.lr = load(args.lr[i]);
  if (args.weight_decay[i] != nullptr) options.weight_decay = load(args.weight_decay[i]);
  row.scalars = Rule::scalars(options, step);
  row.inv_scale = decisions.grad_scale == nullptr ? 1.0f : inverse_scale(load(decisions.grad_scale));
  row.clip = args.maximize[i] ? -clip : clip;
  row.ema_take = args.ema_take[i];
  row.step = static_cast<uint32_t>(step);
  row.random = args.random[i];
  store(rows + first + i, row);
}

/// Calls f<V>(i) for this thread's share of a span: V = 8 and Fours, by whole warps of them, if every operand is
/// aligned; else, and at the end, one element at a time.
template <int kThreads, class F>
AK_DEVICE void for_each_share(const TensorSpan& span, bool aligned, F f) {
  const int by_eight = aligned ? span.count / Fours::kWarp * Fours::kWarp : 0;
  for (int i = Fours::of_thread(); i < by_eight; i += kThreads * 8) f.template operator()<8>(Fours{span.begin + i});
  for (int i = by_eight + thread_index(); i < span.count; i += kThreads) f.template operator()<1>(span.begin + i);
}

/// The V elements at i.
template <class Rule, bool kExtras, bool kOptionalMoments, class Weight, int V, class At>
AK_DEVICE void update_elements(const UpdateOperands<Rule, kExtras>& t, const UpdateRow<Rule>& row,
                               const PhiloxKeys& seed, At i) {
  constexpr int kMoments = kMomentsOf<Rule, kExtras>;
  constexpr int kThere = kOptionalMoments ? kMoments : Rule::kRequiredMoments;
  RawElements<V> raw_grad{};
  if constexpr (Rule::kMovesMoments) raw_grad = fetch<V>(t.grad, t.grad_dtype, i);
  RawElements<V> raw_moments[kMoments] = {};
  AK_UNROLL
  for (int m = 0; m < kThere; m++) raw_moments[m] = fetch<V>(t.moments[m], t.moment_dtypes[m], i);
  const auto raw_weight = Weight::template fetch<V>(t.main, t.second, i);
  Vec<float, V> average{};
  if (kExtras && t.ema != nullptr) average = load_at<V, At>(t.ema + i);

  float grad[V], moments[kMoments][V], weight[V];
  decode(raw_grad, t.grad_dtype, grad);  // no instruction without a gradient
  AK_UNROLL
  for (int m = 0; m < kMoments; m++) decode(raw_moments[m], t.moment_dtypes[m], moments[m]);
  Weight::decode(raw_weight, weight);
  AK_UNROLL
  for (int j = 0; j < V; j++) {
    float of_element[Rule::kMoments] = {};
    AK_UNROLL
    for (int m = 0; m < kMoments; m++) of_element[m] = moments[m][j];
    const float g = effective_grad(grad[j], row.inv_scale, row.clip);
    Rule::update(weight[j], of_element, kOptionalMoments, g, row.scalars);
    AK_UNROLL
    for (int m = 0; m < kMoments; m++) moments[m][j] = of_element[m];
  }
  if constexpr (Rule::kMovesMoments) {
    AK_UNROLL
    for (int m = 0; m < kThere; m++) store_moment(t.moments[m], t.moment_dtypes[m], i, moments[m]);
  }
  Weight::store(t.main, t.second, i, weight, row.key(seed));
  if (kExtras && t.ema != nullptr) store_ema(t.ema, i, average, weight, row.ema_take);
}

template <class Rule, bool kExtras, int kThreads, int kTensors>
AK_KERNEL(kThreads, (kExtras ? Rule::kExtrasBlocksPerSm : Rule::kBlocksPerSm))
update_kernel(AK_PARAM(UpdateArgs<Rule, kExtras, kTensors>) args, AK_PARAM(StepDecisions) decisions,
              const UpdateRow<Rule>* rows, AK_PARAM(PhiloxKeys) seed) {
  wait_for_previous_kernel();
  allow_next_kernel();
  if (skipped(decisions)) return;
  ListWalk walk(block_index(), grid_blocks());
  for (TensorSpan span; walk.next(args.map, span);) {
    const int tensor = span.tensor;
    const UpdateRow<Rule> row = load(rows + args.row[tensor]);
    if (leaves(row.clip)) continue;
    const UpdateOperands<Rule, kExtras> t = args.operands(tensor);
    with_weight<kExtras>(args.kind[tensor], [&]<class Weight>(Weight) {
      auto update = [&]<bool kOptional>(std::bool_constant<kOptional>) {
        for_each_share<kThreads>(span, args.aligned[tensor], [&]<int V>(auto i) {
          constexpr bool kTight = kExtras && Rule::kExtrasBlocksPerSm > 2;  // no registers for addresses
          update_elements<Rule, kExtras, kOptional, Weight, V>(kTight ? args.operands(opaque(tensor)) : t, row, seed,
                                                               i);
        });
      };
      if constexpr (kMomentsOf<Rule, kExtras> > Rule::kRequiredMoments) {
        if (t.moments[Rule::kRequiredMoments] != nullptr) return update(std::true_type{});
      }
      update(std::false_type{});
    });
  }
}

/// The call of a rule's stage.
template <class Rule>
struct StageCall {
  std::span<const Param> params;
  const StepDecisions& decisions;
  uint64_t seed;
  UpdateRow<Rule>* rows;  ///< one for each parameter, filled by update_prepare_kernel; the stage adds its results
  void* scratch;          ///< Rule::stage_bytes(params), aligned to 16 bytes
  StepHalf half;
  Stream stream;
};

namespace detail {

/// Counts the step of every parameter and fills its row.
template <class Rule, int kThreads, int kTensors>
Status prepare_rows(std::span<const Param> params, std::span<const ParamGroup<typename Rule::Options>> groups,
                    const StepDecisions& decisions, UpdateRow<Rule>* rows, Stream stream) {
  static_assert(sizeof(PrepareArgs<Rule, kTensors>) + 128 <= kArgumentBytes,
                "the list and the other arguments must fit one launch");
  PrepareArgs<Rule, kTensors> args;
  for (size_t begin = 0; begin < params.size(); begin += kTensors) {
    args.tensors = static_cast<int>(std::min<size_t>(kTensors, params.size() - begin));
    for (int i = 0; i < args.tensors; i++) {
      const Param& p = params[begin + i];
      const auto& group = groups[p.group];
      args.options[i] = group.options;
      args.step[i] = p.step;
      args.lr[i] = group.lr;
      args.weight_decay[i] = group.weight_decay;
      args.ema_take[i] = ema_take(group.ema_decay);
      args.random[i] = p.random;
      args.maximize[i] = group.maximize;
    }
    const LaunchConfig config{.name = "update_prepare",
                              .grid = (args.tensors + kThreads - 1) / kThreads,
                              .block = kThreads,
                              .overlap_previous = true,
                              .stream = stream};
    const Status status =
        launch(update_prepare_kernel<Rule, kThreads, kTensors>, config, args, decisions, rows, static_cast<int>(begin));
    if (!status.ok()) return status;
  }
  return {};
}

/// True if a parameter of update_kernel needs the one with extras.
template <class Rule>
bool has_extras(const Param& p) {
  if (p.in_8_bits()) return false;
  const bool moments = Rule::kMoments > Rule::kCommonMoments && p.moments[Rule::kMoments - 1] != nullptr;
  return moments || p.ema != nullptr || weight_place(p).stochastic();
}

/// Updates every parameter by its row.
template <class Rule, bool kExtras, int kThreads, int kTensors>
Status update_params(int resident_blocks, std::span<const Param> params, const StepDecisions& decisions, uint64_t seed,
                     const UpdateRow<Rule>* rows, Stream stream) {
  using Args = UpdateArgs<Rule, kExtras, kTensors>;
  static_assert(sizeof(Args) + 128 <= kArgumentBytes, "the list and the other arguments must fit one launch");
  LaunchPlan<Args, Param> plan(params, resident_blocks);
  Args args;
  while (plan.next(args)) {
    const LaunchConfig config{
        .name = Rule::kName, .grid = plan.blocks(), .block = kThreads, .overlap_previous = true, .stream = stream};
    const Status status =
        launch(update_kernel<Rule, kExtras, kThreads, kTensors>, config, args, decisions, rows, PhiloxKeys(seed));
    if (!status.ok()) return status;
  }
  return {};
}

/// Updates every parameter with the kernels that the list needs, as tuned.
template <class Rule>
Status update_params_as_tuned(std::span<const Param> params, const StepDecisions& decisions, uint64_t seed,
                              const UpdateRow<Rule>* rows, Stream stream) {
  const Status status = update_params8<Rule, kUpdateThreads, Rule::kTensors8>(device_sm_count() * Rule::kBlocksPerSm8,
                                                                              params, decisions, seed, rows, stream);
  if (!status.ok()) return status;
  if (std::any_of(params.begin(), params.end(), has_extras<Rule>)) {
    return update_params<Rule, true, kUpdateThreads, Rule::kExtrasTensors>(device_sm_count() * Rule::kExtrasBlocksPerSm,
                                                                           params, decisions, seed, rows, stream);
  }
  return update_params<Rule, false, kUpdateThreads, Rule::kTensors>(device_sm_count() * Rule::kBlocksPerSm, params,
                                                                    decisions, seed, rows, stream);
}

}  // namespace detail

template <class Rule>
size_t update_scratch_bytes(std::span<const Param> params) {
  const size_t rows = params.size() * sizeof(UpdateRow<Tuned<Rule>>);
  if constexpr (kHasStage<Rule>) return rows + Tuned<Rule>::stage_bytes(params);
  return rows;
}

template <class Rule>
Status update(std::span<const Param> params, std::span<const ParamGroup<typename Rule::Options>> groups,
              const StepDecisions& decisions, uint64_t seed, void* scratch, const StepHalf& half, Stream stream) {
  using Kernel = Tuned<Rule>;
  auto* rows = static_cast<UpdateRow<Kernel>*>(scratch);
  Status status =
      detail::prepare_rows<Kernel, kPrepareThreads, Kernel::kPrepareTensors>(params, groups, decisions, rows, stream);
  if constexpr (kHasStage<Rule>) {
    if (status.ok()) status = Kernel::stage({params, decisions, seed, rows, rows + params.size(), half, stream});
  }
  if (!status.ok() || !half.second) return status;
  return detail::update_params_as_tuned<Kernel>(params, decisions, seed, rows, stream);
}

}  // namespace ak

/// At the end of update/rules/X.cu.
#define AK_UPDATE_KERNELS(Rule)                                                                                    \
  template size_t ak::update_scratch_bytes<Rule>(std::span<const ak::Param>);                                      \
  template ak::Status ak::update<Rule>(std::span<const ak::Param>, std::span<const ak::ParamGroup<Rule::Options>>, \
                                       const ak::StepDecisions&, uint64_t, void*, const ak::StepHalf&, ak::Stream);

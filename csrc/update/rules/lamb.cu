// lamb_: one LAMB step of every parameter. No weight may move before the norms of all weights and directions of its
// tensor are known, so there are two passes over memory; the first is the rule's stage.
//
// Work: the first pass moves 14 bytes (split master, bf16 moments, 16-bit gradient) to 24 bytes (fp32 throughout) an
// element, the second 12 to 16, a 16-bit copy of the weight 2 more, an average of the weights 8; each takes some forty
// instructions, two of them divisions. Both are bandwidth-bound.
//
// Plan: update_prepare_kernel (update/step.cuh) counts the step and derives the scalars. lamb_moments_kernel, a
// persistent grid over the units of the list, reads gradient, moments and weight, writes the moments, and stores the
// sums of squares of each unit's weights and directions in the unit's slot. lamb_rates_kernel, one block a tensor,
// adds the slots of the tensor and writes the length of its step into the parameter's row. update_kernel, the second
// pass, reads moments and weight and writes the weight. It recomputes the direction: storing it would cost 8 bytes an
// element.
//
// Traps: both passes must compute the same direction, and the second reads moments that may have been rounded to bf16,
// so the first rounds them before it continues. Squares are taken and added in double: squares of fp32 numbers are
// exact there, none under- or overflows, and the error of a sum is far below the rounding of the rate. That is six
// double instructions an element; at 2 a cycle and SM (compute capability 7.5, 8.6, 8.9, 12.0) they take as long as 16
// bytes. There are no atomics, and slots belong to units, whose size depends on the list alone: the bits are the same
// in each run and on each device. A skip (found_inf) must leave every byte unchanged: all four kernels check it.
#include "update/rules/lamb.h"

#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "update/step.cuh"

namespace ak {

/// For update_prepare_kernel and for update_kernel, the second pass.
template <>
struct Tuned<Lamb> : Untuned<Lamb> {
  static constexpr bool kMovesMoments = false;
  static constexpr int kBlocksPerSm = 3, kExtrasBlocksPerSm = 2, kBlocksPerSm8 = 3;
  static constexpr int kPrepareTensors = 320;
  static constexpr int kTensors = 528, kExtrasTensors = 464, kTensors8 = 376;

  static size_t stage_bytes(std::span<const Param> params);
  static Status stage(const StageCall<Tuned<Lamb>>& call);
};

namespace {

/// For the first pass, which reads the operands of an update.
struct LambMoments : Tuned<Lamb> {
  static constexpr bool kMovesMoments = true;
  static constexpr int kBlocksPerSm = 2;
};
using LambOperands = UpdateOperands<LambMoments, false>;
template <int N>
using LambArgs = UpdateArgs<LambMoments, false, N>;
template <int N>
using LambArgs8 = UpdateArgs8<LambMoments, N>;
using LambRow = UpdateRow<Tuned<Lamb>>;

/// Sums of squares, of a thread's elements, a unit or a tensor.
struct alignas(16) Squares {
  double weight, direction;

  AK_DEVICE void add(const Squares& other) {
    weight += other.weight;
    direction += other.direction;
  }
};

AK_DEVICE double square(float x) { return static_cast<double>(x) * static_cast<double>(x); }

/// The sums of all threads of the block.
template <int kThreads>
AK_DEVICE Squares block_total(const Squares& sums) {
  return {block_sum<kThreads>(sums.weight), block_sum<kThreads>(sums.direction)};
}

/// Moves the moments of the V elements at i and adds the squares of their weights and directions to `sums`.
template <class Weight, int V, class At>
AK_DEVICE void move_moments(const LambOperands& t, const LambRow& row, At i, Squares& sums) {
  const auto raw_grad = fetch<V>(t.grad, t.grad_dtype, i);
  RawElements<V> raw_moments[2];
  AK_UNROLL
  for (int m = 0; m < 2; m++) raw_moments[m] = fetch<V>(t.moments[m], t.moment_dtypes[m], i);
  const auto raw_weight = Weight::template fetch<V>(t.main, t.second, i);

  float grad[V], moments[2][V], weight[V];
  decode(raw_grad, t.grad_dtype, grad);
  AK_UNROLL
  for (int m = 0; m < 2; m++) decode(raw_moments[m], t.moment_dtypes[m], moments[m]);
  Weight::decode(raw_weight, weight);
  AK_UNROLL
  for (int j = 0; j < V; j++) {
    Lamb::move_moments(moments[0][j], moments[1][j], effective_grad(grad[j], row.inv_scale, row.clip), row.scalars);
  }
  AK_UNROLL
  for (int m = 0; m < 2; m++) {
    store_moment(t.moments[m], t.moment_dtypes[m], i, moments[m]);
    as_stored(t.moment_dtypes[m], moments[m]);
  }
  AK_UNROLL
  for (int j = 0; j < V; j++) {
    sums.weight += square(weight[j]);
    sums.direction += square(Lamb::direction(weight[j], moments[0][j], moments[1][j], row.scalars));
  }
}

/// The same for moments in 8 bits. False as update_elements8.
template <int V>
AK_DEVICE bool move_moments8(const UpdateOperands8<LambMoments>& t, WeightKind kind, const LambRow& row,
                             const PhiloxKeys& seed, int64_t i, bool inside, Squares& sums) {
  Share8<LambMoments, 2, V> share{t, i, inside};
  share.load(kind);
  bool fits = share.is_small();
  auto& [m, v] = share.moments;
  AK_UNROLL
  for (int j = 0; j < V; j++) {
    if (!inside) break;
    share.decode_moments(j);
    Lamb::move_moments(m[j], v[j], effective_grad(share.grad[j], row.inv_scale, row.clip), row.scalars);
  }
  share.template encode_moments<false>(row.key(seed));
  fits &= share.is_small();
  if (V == 8 && warp_any(!fits)) return false;
  share.store_moments();
  if (!inside) return true;
  AK_UNROLL
  for (int j = 0; j < V; j++) {
    share.decode_moments(j);  // as the second pass will find them
    sums.weight += square(share.weight[j]);
    sums.direction += square(Lamb::direction(share.weight[j], m[j], v[j], row.scalars));
  }
  return true;
}

/// The first pass: moves the moments and stores the sums of unit i in slots[i].
template <int kThreads, class Args>
AK_KERNEL(kThreads, LambMoments::kBlocksPerSm)
lamb_moments_kernel(AK_PARAM(Args) args, AK_PARAM(StepDecisions) decisions, const LambRow* rows,
                    AK_PARAM(PhiloxKeys) seed, Squares* slots) {
  wait_for_previous_kernel();
  allow_next_kernel();
  if (skipped(decisions)) return;
  int tensor = 0;
  for (uint32_t index = block_index(); index < args.map.units; index += grid_blocks()) {
    const TensorSpan span = args.map.find(index, index + 1, tensor);
    tensor = span.tensor;
    const LambRow row = load(rows + args.row[tensor]);
    if (leaves(row.clip)) continue;
    const auto t = args.operands(tensor);
    Squares sums{};
    if constexpr (requires { args.exponents; }) {
      for_each_share8<kThreads>(span, args.aligned[tensor], false, [&]<Share kShare>(int64_t i, bool inside) {
        return move_moments8<kShare == Share::kOne ? 1 : 8>(t, args.kind[tensor], row, seed, i, inside, sums);
      });
    } else {
      with_weight_to_read(args.kind[tensor], [&]<class Weight>(Weight) {
        for_each_share<kThreads>(span, args.aligned[tensor],
                                 [&]<int V>(auto i) { move_moments<Weight, V>(t, row, i, sums); });
      });
    }
    sums = block_total<kThreads>(sums);
    if (thread_index() == 0) store(slots + index, sums);
  }
}

/// Between the passes: the length of the step of each tensor. If the parameters are pieces of tensors, the first half
/// of a step stores their sums in `pieces`; the second, which has no slots, reads the whole tensors' sums from there.
template <int kThreads, class Args>
AK_KERNEL(kThreads, 1)
lamb_rates_kernel(AK_PARAM(Args) args, AK_PARAM(StepDecisions) decisions, const Squares* slots, Squares* pieces,
                  LambRow* rows) {
  wait_for_previous_kernel();
  allow_next_kernel();
  if (skipped(decisions)) return;
  for (int tensor = block_index(); tensor < args.map.tensors; tensor += grid_blocks()) {
    if (leaves(load(&rows[args.row[tensor]].clip))) continue;
    const uint32_t begin = args.map.begin_of(tensor), end = args.map.end[tensor];
    Squares sums{};
    if (slots != nullptr) {
      for (uint32_t slot = begin + thread_index(); slot < end; slot += kThreads) sums.add(load(slots + slot));
      sums = block_total<kThreads>(sums);
    }
    if (thread_index() != 0) continue;
    if (pieces != nullptr && slots != nullptr) {
      store(pieces + args.row[tensor], sums);
      continue;
    }
    if (pieces != nullptr) sums = load(pieces + args.row[tensor]);
    LambRow* row = rows + args.row[tensor];
    store(&row->scalars.rate, Lamb::rate_of(sums.weight, sums.direction, load(row).scalars));
  }
}

constexpr int kLambTensors = 528, kLambTensors8 = 376;

}  // namespace

namespace detail {

/// Elements of a unit, whose sums cost two reductions of a block: many where there are enough units for any GPU, some
/// 50 a block and launch.
template <class Args>
int lamb_unit(std::span<const Param> params) {
  constexpr int kLeast = 2 * kUnit, kMost = kRunUnits * kUnit;
  constexpr int64_t kEnoughUnits = 16384;
  int64_t elements = 0;
  for (const Param& p : params) elements += takes<Args>(p) ? p.numel : 0;
  const int64_t launches = std::max(1, launch_count<Args>(params));
  return static_cast<int>(std::clamp<int64_t>(elements / launches / kEnoughUnits / kLeast * kLeast, kLeast, kMost));
}

template <class Args>
LaunchPlan<Args, Param> lamb_plan(std::span<const Param> params, int resident_blocks) {
  return {params, resident_blocks, lamb_unit<Args>(params)};
}

/// Bytes of `scratch`.
template <class Args>
size_t lamb_rates_bytes(std::span<const Param> params) {
  return most_of(lamb_plan<Args>(params, 1), [](const auto& map) { return map.units; }) * sizeof(Squares);
}

/// The stage, of the parameters that Args takes.
template <int kThreads, class Args>
Status lamb_rates(int resident_blocks, const StageCall<Tuned<Lamb>>& call) {
  static_assert(sizeof(Args) + 128 <= kArgumentBytes, "the list and the other arguments must fit one launch");
  auto plan = lamb_plan<Args>(call.params, resident_blocks);
  Args args;
  const bool moves = call.half.squares == nullptr || !call.half.second;
  auto* slots = static_cast<Squares*>(call.scratch);
  auto* pieces = reinterpret_cast<Squares*>(call.half.squares);
  while (plan.next(args)) {
    LaunchConfig config{.name = "lamb_moments",
                        .grid = plan.blocks(),
                        .block = kThreads,
                        .overlap_previous = true,
                        .stream = call.stream};
    Status status;
    if (moves) {
      const auto* rows = call.rows;
      status =
          launch(lamb_moments_kernel<kThreads, Args>, config, args, call.decisions, rows, PhiloxKeys(call.seed), slots);
    }
    if (!status.ok()) return status;
    config.name = "lamb_rates";
    config.grid = std::min(args.map.tensors, resident_blocks);
    const Squares* sums = moves ? slots : nullptr;
    status = launch(lamb_rates_kernel<kThreads, Args>, config, args, call.decisions, sums, pieces, call.rows);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace detail

size_t Tuned<Lamb>::stage_bytes(std::span<const Param> params) {
  return std::max(detail::lamb_rates_bytes<LambArgs<kLambTensors>>(params),
                  detail::lamb_rates_bytes<LambArgs8<kLambTensors8>>(params));
}

Status Tuned<Lamb>::stage(const StageCall<Tuned<Lamb>>& call) {
  const int resident_blocks = device_sm_count() * LambMoments::kBlocksPerSm;
  const Status status = detail::lamb_rates<kUpdateThreads, LambArgs<kLambTensors>>(resident_blocks, call);
  return status.ok() ? detail::lamb_rates<kUpdateThreads, LambArgs8<kLambTensors8>>(resident_blocks, call) : status;
}

}  // namespace ak

AK_UPDATE_KERNELS(ak::Lamb)

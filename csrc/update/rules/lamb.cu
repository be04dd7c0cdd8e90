// lamb_: one LAMB step of every parameter. A weight may move only when the norms of all weights and of all directions
// of its tensor are known, so there are two passes over memory.
//
// Work: the first pass costs 14 bytes (split master, bf16 moments, 16-bit gradient) to 24 bytes (fp32 throughout) an
// element, the second 12 to 16, a 16-bit copy of the weight 2 more, an average of the weights 8; each some forty
// instructions, two of them divisions. Bandwidth is the limit.
//
// Plan: update_prepare_kernel (update/step.cuh) counts the step and derives the scalars.
// lamb_moments_kernel, a persistent grid over the chunks of the list, reads gradient, moments and weight, writes the
// moments, and leaves for every chunk the squares of its weights and directions, added up, in a slot of its own.
// lamb_rates_kernel, one block a tensor, joins the slots of the tensor and puts the length of its step into the
// parameter's row. update_kernel, the second pass, reads moments and weight and writes the weight: to store the
// direction between the passes would cost 8 bytes, to compute it again costs nothing that is scarce.
//
// Traps: the direction of the first pass must be that of the second, which reads moments that may have been rounded to
// bf16; so the first one rounds them before it goes on. Squares are added in double, products included: squares of
// fp32 numbers are exact there, none under- or overflows, and a sum's error is far below what the rate keeps of it.
// That is six instructions in double an element; at 2 a cycle and SM (compute capability 7.5, 8.6, 8.9, 12.0) they take
// about as long as 16 bytes do. Nothing is added with atomics, and slots belong to chunks, not to blocks: the same bits
// each time, and on each device. A skip (found_inf) must leave every byte as it was: all four kernels look.
#include "update/rules/lamb.h"

#include "device/block.cuh"
#include "update/step.cuh"

namespace ak {

/// Of update_prepare_kernel and of update_kernel, the second pass.
template <>
struct Tuned<Lamb> : Untuned<Lamb> {
  static constexpr bool kMovesMoments = false;
  static constexpr int kBlocksPerSm = 3, kExtrasBlocksPerSm = 3;
  static constexpr int kPrepareTensors = 400;
  static constexpr int kTensors = 528, kExtrasTensors = 464;

  static size_t first_pass_bytes(std::span<const ParamState> params);
  static Status first_pass(std::span<const ParamState> params, const StepDecisions& decisions,
                           UpdateRow<Tuned<Lamb>>* rows, void* scratch, const StepHalf& half, Stream stream);
};

namespace {

/// Of the first pass, which reads what an update reads.
struct LambMoments : Tuned<Lamb> {
  static constexpr bool kMovesMoments = true;
  static constexpr int kBlocksPerSm = 2;
};
using LambOperands = UpdateOperands<LambMoments, false>;
template <int N>
using LambArgs = UpdateArgs<LambMoments, false, N>;
using LambRow = UpdateRow<Tuned<Lamb>>;

/// Sums of squares, of a thread's elements, a chunk or a tensor.
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

/// Moves the moments of elements i .. i + V - 1 and adds the squares of their weights and directions to `sums`.
template <class Weight, int V>
AK_DEVICE void move_moments(const LambOperands& t, const LambRow& row, int64_t i, Squares& sums) {
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

/// The first pass: moves the moments, and leaves the sums of chunk i in slots[i].
template <int kThreads, int kTensors>
AK_KERNEL(kThreads, LambMoments::kBlocksPerSm)
lamb_moments_kernel(AK_PARAM(LambArgs<kTensors>) args, AK_PARAM(StepDecisions) decisions, const LambRow* rows,
                    Squares* slots) {
  if (skipped(decisions)) return;
  int tensor = 0;
  for (uint32_t index = block_index(); index < args.map.chunks; index += grid_blocks()) {
    const TensorChunk chunk = args.map.find(index, tensor);
    tensor = chunk.tensor;
    const LambRow row = load(rows + args.row[tensor]);
    const LambOperands t = args.operands(tensor);
    Squares sums{};
    with_weight_to_read(args.kind[tensor], [&]<class Weight>(Weight) {
      for_each_share<kThreads>(chunk, args.aligned[tensor],
                               [&]<int V>(int64_t i) { move_moments<Weight, V>(t, row, i, sums); });
    });
    sums = block_total<kThreads>(sums);
    if (thread_index() == 0) store(slots + index, sums);
  }
}

/// Between the passes: the length of the step of each tensor. Of a piece of a tensor the first half of a step leaves
/// the sums in `pieces`, and the second, which has no slots, finds there those of the whole tensor.
template <int kThreads, int kTensors>
AK_KERNEL(kThreads, 1)
lamb_rates_kernel(AK_PARAM(LambArgs<kTensors>) args, AK_PARAM(StepDecisions) decisions, const Squares* slots,
                  Squares* pieces, LambRow* rows) {
  if (skipped(decisions)) return;
  for (int tensor = block_index(); tensor < args.map.tensors; tensor += grid_blocks()) {
    const uint32_t begin = tensor == 0 ? 0 : args.map.end[tensor - 1], end = args.map.end[tensor];
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

constexpr int kLambTensors = 528;

}  // namespace

namespace detail {

/// The first pass and the rates. `slots`: as many as most_chunks<LambArgs<kTensors>>.
template <int kThreads, int kTensors>
Status lamb_rates(int resident_blocks, std::span<const ParamState> params, const StepDecisions& decisions,
                  LambRow* rows, Squares* slots, const StepHalf& half, Stream stream) {
  using Args = LambArgs<kTensors>;
  static_assert(sizeof(Args) + 128 <= kArgumentBytes, "the list and the other arguments must fit one launch");
  LaunchPlan<Args, ParamState> plan(params);
  Args args;
  const bool moves = half.squares == nullptr || !half.second;
  auto* pieces = reinterpret_cast<Squares*>(half.squares);
  while (plan.next(args)) {
    LaunchConfig config{.name = "lamb_moments",
                        .grid = grid_for(args.map.chunks, resident_blocks),
                        .block = kThreads,
                        .stream = stream};
    Status status;
    if (moves) status = launch(lamb_moments_kernel<kThreads, kTensors>, config, args, decisions, rows, slots);
    if (!status.ok()) return status;
    config.name = "lamb_rates";
    config.grid = grid_for(static_cast<uint32_t>(args.map.tensors), resident_blocks);
    const Squares* sums = moves ? slots : nullptr;
    status = launch(lamb_rates_kernel<kThreads, kTensors>, config, args, decisions, sums, pieces, rows);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace detail

size_t Tuned<Lamb>::first_pass_bytes(std::span<const ParamState> params) {
  return most_chunks<LambArgs<kLambTensors>>(params) * sizeof(Squares);
}

Status Tuned<Lamb>::first_pass(std::span<const ParamState> params, const StepDecisions& decisions, LambRow* rows,
                               void* scratch, const StepHalf& half, Stream stream) {
  return detail::lamb_rates<kUpdateThreads, kLambTensors>(device_sm_count() * LambMoments::kBlocksPerSm, params,
                                                          decisions, rows, static_cast<Squares*>(scratch), half,
                                                          stream);
}

}  // namespace ak

AK_UPDATE_KERNELS(ak::Lamb)

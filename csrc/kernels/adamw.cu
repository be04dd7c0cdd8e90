// adamw_: one optimizer step of every parameter, as two kernels.
//
// adamw_prepare, one thread a parameter: increments the step count and derives from it, in double, the few scalars that all elements
// of the parameter share (bias corrections, decay, clip factor). It runs before the update, so no block ever reads a count that
// another one is about to change, and the update is spared the double arithmetic and its registers.
// adamw_kernel, a persistent grid over the chunks of the whole list: reads gradient, moments and weight, writes moments and weight.
// Work: 18 bytes (split master, bf16 moments, 16-bit gradient) to 30 bytes (fp32 weight, shadow, fp32 moments and gradient) an element
// and some forty instructions, two of them divisions: bandwidth is the limit as long as enough loads are in flight, so a thread fetches
// eight elements of each operand, up to 128 bytes, before it computes.
// Traps: a skip (found_inf) must leave every byte as it was, the count too. Gradients may start at any element (views into a
// communication bucket) while the state is always aligned, so no peel could align both: such tensors go element by element.
#include "kernels/adamw.h"

#include "device/launch.cuh"
#include "kernels/tensor_list.h"
#include "kernels/update.cuh"
#include "math/clip.h"

namespace ak {
namespace {

constexpr int kAdamWThreads = 256;
constexpr int kAdamWBlocksPerSm = 2;
constexpr int kPrepareThreads = 128;

/// What adamw_prepare hands to adamw_kernel for one parameter.
struct alignas(16) AdamWRow {
  AdamWScalars scalars;
  float inv_scale;
  float clip;  // negative when maximizing
  float unused[2];
};

/// The parameters of one launch of adamw_prepare.
template <int N>
struct PrepareArgs {
  int tensors;
  AdamWOptions options[N];
  float* step[N];
  const float* lr[N];
  bool maximize[N];
};

/// The parameters of one launch of adamw_kernel.
template <int N>
struct AdamWArgs {
  static constexpr int kTensors = N;
  ChunkMap<N> map;
  const void* grad[N];
  void* main[N];
  void* second[N];
  void* exp_avg[N];
  void* exp_avg_sq[N];
  uint32_t row[N];
  WeightKind kind[N];
  DType grad_dtype[N], exp_avg_dtype[N], exp_avg_sq_dtype[N];
  bool aligned[N];  // every operand to 16 bytes

  void set(int place, const AdamWTensor& t, size_t position) {
    const bool fp32 = t.param_dtype == DType::kFloat32;
    const bool half = t.param_dtype == DType::kFloat16;
    grad[place] = t.grad;
    main[place] = t.master_kind == Master::kFloat32 ? t.master : t.param;
    second[place] = nullptr;
    if (t.master_kind == Master::kFloat32) {
      kind[place] = half ? WeightKind::kFp32CopyFp16 : WeightKind::kFp32CopyBf16;
      second[place] = t.param;
    } else if (t.master_kind == Master::kSplit) {
      kind[place] = half ? WeightKind::kSplitFp16 : WeightKind::kSplitBf16;
      second[place] = t.master;
    } else if (t.shadow != nullptr) {
      kind[place] = t.shadow_dtype == DType::kFloat16 ? WeightKind::kFp32CopyFp16 : WeightKind::kFp32CopyBf16;
      second[place] = t.shadow;
    } else {
      kind[place] = fp32 ? WeightKind::kFp32 : half ? WeightKind::kFp16 : WeightKind::kBf16;
    }
    exp_avg[place] = t.exp_avg;
    exp_avg_sq[place] = t.exp_avg_sq;
    row[place] = static_cast<uint32_t>(position);
    grad_dtype[place] = t.grad_dtype;
    exp_avg_dtype[place] = t.exp_avg_dtype;
    exp_avg_sq_dtype[place] = t.exp_avg_sq_dtype;
    aligned[place] = true;
    for (const void* p : {t.grad, const_cast<const void*>(main[place]), const_cast<const void*>(second[place]),
                          const_cast<const void*>(t.exp_avg), const_cast<const void*>(t.exp_avg_sq)}) {
      aligned[place] = aligned[place] && reinterpret_cast<uintptr_t>(p) % 16 == 0;
    }
  }
};

constexpr int kPrepareTensors = 488;
constexpr int kAdamWTensors = 528;
static_assert(sizeof(PrepareArgs<kPrepareTensors>) + 128 <= kArgumentBytes, "the list and the other arguments must fit one launch");
static_assert(sizeof(AdamWArgs<kAdamWTensors>) + 128 <= kArgumentBytes, "the list and the other arguments must fit one launch");

AK_DEVICE bool skipped(const StepDecisions& decisions) {
  return decisions.found_inf != nullptr && found(load(decisions.found_inf));
}

template <int kThreads, class Args>
AK_KERNEL(kThreads, 1)
adamw_prepare_kernel(AK_PARAM(Args) args, AK_PARAM(StepDecisions) decisions, AdamWRow* rows) {
  const int i = block_index() * kThreads + thread_index();
  if (i >= args.tensors || skipped(decisions)) return;
  const float step = load(args.step[i]) + 1.0f;
  store(args.step[i], step);

  AdamWOptions options = args.options[i];
  if (args.lr[i] != nullptr) options.lr = load(args.lr[i]);
  AdamWRow row{};
  row.scalars = adamw_scalars(options, step);
  row.inv_scale = decisions.grad_scale == nullptr ? 1.0f : inverse_scale(load(decisions.grad_scale));
  row.clip = decisions.sum_sq == nullptr ? 1.0f : clip_factor(load(decisions.sum_sq), decisions.max_norm);
  if (args.maximize[i]) row.clip = -row.clip;
  store(rows + i, row);
}

/// Where the elements of one chunk are, and what they are.
struct AdamWChunk {
  const void* grad;
  void *main, *second, *exp_avg, *exp_avg_sq;
  DType grad_dtype, exp_avg_dtype, exp_avg_sq_dtype;
};

/// Elements i .. i + V - 1.
template <class Weight, int V>
AK_DEVICE void update_elements(const AdamWChunk& c, const AdamWRow& row, int64_t i) {
  const auto raw_grad = fetch<V>(c.grad, c.grad_dtype, i);
  const auto raw_exp_avg = fetch<V>(c.exp_avg, c.exp_avg_dtype, i);
  const auto raw_exp_avg_sq = fetch<V>(c.exp_avg_sq, c.exp_avg_sq_dtype, i);
  const auto raw_weight = Weight::template fetch<V>(c.main, c.second, i);
  float grad[V], exp_avg[V], exp_avg_sq[V], weight[V];
  decode(raw_grad, c.grad_dtype, grad);
  decode(raw_exp_avg, c.exp_avg_dtype, exp_avg);
  decode(raw_exp_avg_sq, c.exp_avg_sq_dtype, exp_avg_sq);
  Weight::decode(raw_weight, weight);
  AK_UNROLL
  for (int j = 0; j < V; j++) {
    adamw(weight[j], exp_avg[j], exp_avg_sq[j], effective_grad(grad[j], row.inv_scale, row.clip), row.scalars);
  }
  store_moment(c.exp_avg, c.exp_avg_dtype, i, exp_avg);
  store_moment(c.exp_avg_sq, c.exp_avg_sq_dtype, i, exp_avg_sq);
  Weight::store(c.main, c.second, i, weight);
}

template <int kThreads, class Args>
AK_KERNEL(kThreads, kAdamWBlocksPerSm)
adamw_kernel(AK_PARAM(Args) args, AK_PARAM(StepDecisions) decisions, const AdamWRow* rows) {
  if (skipped(decisions)) return;
  int tensor = 0;
  for (uint32_t index = block_index(); index < args.map.chunks; index += grid_blocks()) {
    const TensorChunk chunk = args.map.find(index, tensor);
    tensor = chunk.tensor;
    const AdamWRow row = load(rows + args.row[tensor]);
    const AdamWChunk c{args.grad[tensor],       args.main[tensor],          args.second[tensor],        args.exp_avg[tensor],
                       args.exp_avg_sq[tensor], args.grad_dtype[tensor], args.exp_avg_dtype[tensor], args.exp_avg_sq_dtype[tensor]};
    const int by_eight = args.aligned[tensor] ? chunk.count / 8 * 8 : 0;
    with_weight(args.kind[tensor], [&]<class Weight>(Weight) {
      for (int i = thread_index() * 8; i < by_eight; i += kThreads * 8) update_elements<Weight, 8>(c, row, chunk.begin + i);
      for (int i = by_eight + thread_index(); i < chunk.count; i += kThreads) update_elements<Weight, 1>(c, row, chunk.begin + i);
    });
  }
}

}  // namespace

namespace detail {

template <int kThreads, class Prepare, int kPrepareTensors>
Status adamw_prepare_on(std::span<const AdamWTensor> tensors, std::span<const AdamWGroup> groups, const StepDecisions& decisions,
                        AdamWRow* rows, Stream stream) {
  Prepare args;
  for (size_t begin = 0; begin < tensors.size(); begin += kPrepareTensors) {
    args.tensors = static_cast<int>(std::min<size_t>(kPrepareTensors, tensors.size() - begin));
    for (int i = 0; i < args.tensors; i++) {
      const AdamWTensor& t = tensors[begin + i];
      const AdamWGroup& group = groups[t.group];
      args.options[i] = group.options;
      args.step[i] = t.step;
      args.lr[i] = group.lr;
      args.maximize[i] = group.maximize;
    }
    const LaunchConfig config{
        .name = "adamw_prepare", .grid = (args.tensors + kThreads - 1) / kThreads, .block = kThreads, .stream = stream};
    const Status status = launch(adamw_prepare_kernel<kThreads, Prepare>, config, args, decisions, rows + begin);
    if (!status.ok()) return status;
  }
  return {};
}

template <int kThreads, class Args>
Status adamw_update_on(int resident_blocks, std::span<const AdamWTensor> tensors, const StepDecisions& decisions, const AdamWRow* rows,
                       Stream stream) {
  LaunchPlan<Args, AdamWTensor> plan(tensors);
  Args args;
  while (plan.next(args)) {
    const int grid = grid_for(args.map.chunks, resident_blocks);
    const LaunchConfig config{.name = "adamw", .grid = grid, .block = kThreads, .stream = stream};
    const Status status = launch(adamw_kernel<kThreads, Args>, config, args, decisions, rows);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace detail

size_t adamw_scratch_bytes(size_t tensors) { return tensors * sizeof(AdamWRow); }

Status adamw(std::span<const AdamWTensor> tensors, std::span<const AdamWGroup> groups, const StepDecisions& decisions, void* scratch,
             Stream stream) {
  auto* rows = static_cast<AdamWRow*>(scratch);
  const Status prepared = detail::adamw_prepare_on<kPrepareThreads, PrepareArgs<kPrepareTensors>, kPrepareTensors>(
      tensors, groups, decisions, rows, stream);
  if (!prepared.ok()) return prepared;
  return detail::adamw_update_on<kAdamWThreads, AdamWArgs<kAdamWTensors>>(device_sm_count() * kAdamWBlocksPerSm, tensors, decisions,
                                                                          rows, stream);
}

}  // namespace ak

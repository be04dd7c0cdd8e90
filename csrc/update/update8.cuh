// One optimizer step over the parameters of a list whose moments are in 8 bits: update8_kernel, in place of
// update_kernel (update/step.cuh), over any rule.
//
// A list may hold both kinds of parameters: small ones keep moments in bf16. Each kernel takes its own and leaves the
// others out, so that neither has the registers of the other's code. Here every extra is in the one kernel, and so are
// all ways to keep a weight: what differs is a load and a store, behind branches that are the same for a whole block.
//
// Work: 14 bytes (split24 master, 16-bit gradient) to 20 bytes (fp32 weight and gradient) an element with two moments.
// A thread has eight elements, four lanes a block of 32; a block that no eight of aligned operands cover, at the end of
// a tensor or throughout, has one element a lane. So all lanes of a warp are in the same loop, as their shuffles need.
//
// Traps: the exponent of a block must be the one of its new values before any of them is rounded; and a rule with a
// stage must find the moments as stored, exponents included, in both passes.
//
// Tuned<Rule> also has kBlocksPerSm8 and kTensors8.
#pragma once
#include <span>

#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "update/arguments.cuh"
#include "update/codes.cuh"

namespace ak {

/// Addresses of one tensor.
template <class Rule>
struct UpdateOperands8 : UpdateOperands<Rule, true> {
  uint8_t* exponents[Rule::kMoments];
};

/// The parameters of one launch.
template <class Rule, int N>
struct UpdateArgs8 : UpdateArgs<Rule, true, N> {
  uint8_t* exponents[Rule::kMoments][N];

  static bool takes(const Param& p) { return p.in_8_bits(); }

  void set(int place, const Param& p, size_t position) {
    UpdateArgs<Rule, true, N>::set(place, p, position);
    for (int m = 0; m < Rule::kMoments; m++) exponents[m][place] = p.exponents[m];
  }

  AK_DEVICE UpdateOperands8<Rule> operands(int tensor) const {
    UpdateOperands8<Rule> t{UpdateArgs<Rule, true, N>::operands(tensor), {}};
    AK_UNROLL
    for (int m = 0; m < Rule::kMoments; m++) t.exponents[m] = exponents[m][tensor];
    return t;
  }
};

/// Calls f<V>(i, inside) for this thread's share of a span, with all lanes of a warp: elements i .. i + 7 of aligned
/// operands by warps of 256, else, and at the end, one by one. `inside` is false where there is no element.
template <int kThreads, class F>
AK_DEVICE void for_each_share8(const TensorSpan& span, bool aligned, F f) {
  constexpr int kWarp = 8 * kWarpThreads;
  const int by_eight = aligned ? span.count / kWarp * kWarp : 0;
  for (int i = thread_index() * 8; i < by_eight; i += kThreads * 8) f.template operator()<8>(span.begin + i, true);
  const int end = by_eight + (span.count - by_eight + kBlock8 - 1) / kBlock8 * kBlock8;
  for (int i = by_eight + thread_index(); i < end; i += kThreads) {
    f.template operator()<1>(span.begin + i, i < span.count);
  }
}

/// Elements i .. i + V - 1 of a parameter with kThere moments; without them (`inside`) they are 0.
template <class Rule, int kThere, int V>
struct Share8 {
  const UpdateOperands8<Rule>& t;
  int64_t i;
  bool inside;
  Codes<V> raw[kThere] = {};
  float grad[V] = {}, moments[Rule::kMoments][V] = {}, weight[V] = {};
  Vec<float, V> average{};

  AK_DEVICE void load(WeightKind kind) {
    if (!inside) return;
    RawElements<V> raw_grad{};
    if constexpr (Rule::kMovesMoments) raw_grad = fetch<V>(t.grad, t.grad_dtype, i);
    for_each_moment<kThere>([&]<int m>() { raw[m] = fetch_codes<V>(t.moments[m], t.exponents[m], i); });
    if (t.ema != nullptr) average = load_vec<V, Cache::kStreaming>(t.ema + i);
    with_weight_to_read(
        kind, [&]<class Weight>(Weight) { Weight::decode(Weight::template fetch<V>(t.main, t.second, i), weight); });
    decode(raw_grad, t.grad_dtype, grad);
  }

  /// The moments of element j, which is there, as they are in memory. Those of all elements at once would be too many
  /// registers.
  AK_DEVICE void decode_moments(int j) {
    for_each_moment<kThere>([&]<int m>() { moments[m][j] = decode_code<CodeOf<Rule, m>>(raw[m], j); });
  }

  /// Called by all lanes of a warp.
  template <class Key>
  AK_DEVICE void store_moments(const Key& key) {
    warp_sync();  // every lane of a block has read the exponent, which one of them writes
    for_each_moment<kThere>([&]<int m>() {
      uint32_t random[V];
      random_numbers<256>(key, 1 + m, i, random);
      raw[m] = encode_codes<CodeOf<Rule, m>>(moments[m], random);
      if (inside) store_codes(t.moments[m], t.exponents[m], i, raw[m]);
    });
  }
};

template <class Rule, bool kOptionalMoments, int V>
AK_DEVICE void update_elements8(const UpdateOperands8<Rule>& t, WeightKind kind, const UpdateRow<Rule>& row,
                                const PhiloxKeys& seed, int64_t i, bool inside) {
  Share8<Rule, kOptionalMoments ? Rule::kMoments : Rule::kRequiredMoments, V> share{t, i, inside};
  share.load(kind);
  if (inside) {
    AK_UNROLL
    for (int j = 0; j < V; j++) {
      share.decode_moments(j);
      float moments[Rule::kMoments];
      AK_UNROLL
      for (int m = 0; m < Rule::kMoments; m++) moments[m] = share.moments[m][j];
      const float g = effective_grad(share.grad[j], row.inv_scale, row.clip);
      Rule::update(share.weight[j], moments, kOptionalMoments, g, row.scalars);
      AK_UNROLL
      for (int m = 0; m < Rule::kMoments; m++) share.moments[m][j] = moments[m];
    }
  }
  if constexpr (Rule::kMovesMoments) share.store_moments(row.key(seed));
  if (!inside) return;
  with_weight<true>(kind,
                    [&]<class Weight>(Weight) { Weight::store(t.main, t.second, i, share.weight, row.key(seed)); });
  if (t.ema != nullptr) store_ema(t.ema, i, share.average, share.weight, row.ema_take);
}

template <class Rule, int kThreads, int kTensors>
AK_KERNEL(kThreads, Rule::kBlocksPerSm8)
update8_kernel(AK_PARAM(UpdateArgs8<Rule, kTensors>) args, AK_PARAM(StepDecisions) decisions,
               const UpdateRow<Rule>* rows, AK_PARAM(PhiloxKeys) seed) {
  wait_for_previous_kernel();
  allow_next_kernel();
  if (skipped(decisions)) return;
  ListWalk walk(block_index(), grid_blocks());
  for (TensorSpan span; walk.next(args.map, span);) {
    const int tensor = span.tensor;
    const UpdateRow<Rule> row = load(rows + args.row[tensor]);
    const UpdateOperands8<Rule> t = args.operands(tensor);
    auto update = [&]<bool kOptional>(std::bool_constant<kOptional>) {
      for_each_share8<kThreads>(span, args.aligned[tensor], [&]<int V>(int64_t i, bool inside) {
        update_elements8<Rule, kOptional, V>(t, args.kind[tensor], row, seed, i, inside);
      });
    };
    if constexpr (Rule::kMoments > Rule::kRequiredMoments) {
      if (t.moments[Rule::kRequiredMoments] != nullptr) {
        update(std::true_type{});
        continue;
      }
    }
    if constexpr (Rule::kRequiredMoments > 0) update(std::false_type{});
  }
}

namespace detail {

/// Updates every parameter with moments in 8 bits by its row.
template <class Rule, int kThreads, int kTensors>
Status update_params8(int resident_blocks, std::span<const Param> params, const StepDecisions& decisions, uint64_t seed,
                      const UpdateRow<Rule>* rows, Stream stream) {
  using Args = UpdateArgs8<Rule, kTensors>;
  static_assert(sizeof(Args) + 128 <= kArgumentBytes, "the list and the other arguments must fit one launch");
  LaunchPlan<Args, Param> plan(params, resident_blocks);
  Args args;
  while (plan.next(args)) {
    const LaunchConfig config{
        .name = Rule::kName, .grid = plan.blocks(), .block = kThreads, .overlap_previous = true, .stream = stream};
    const Status status =
        launch(update8_kernel<Rule, kThreads, kTensors>, config, args, decisions, rows, PhiloxKeys(seed));
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace detail
}  // namespace ak

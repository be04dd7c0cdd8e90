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
// Instructions, not bytes, would bound the general form on an H100. So there is a plain one of each rule that divides,
// for steps without options and moments that are normal numbers.
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
#include "update/normal_numbers.cuh"

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

/// A thread's share of a span: one element; eight; or eight of a plain step (is_plain).
enum class Share { kOne, kEight, kPlain };

/// Calls f<Share>(i, inside) for this thread's share of a span, with all lanes of a warp: elements i .. i + 7 of
/// aligned operands by warps of 256, as plain ones if the step is plain. If a call returns false, the next kind
/// follows, and the others come one by one. `inside` is false where there is no element.
template <int kThreads, bool kPlain = false, class F>
AK_DEVICE void for_each_share8(const TensorSpan& span, bool aligned, bool plain, F f) {
  constexpr int kWarp = 8 * kWarpThreads;
  const int by_eight = aligned ? span.count / kWarp * kWarp : 0, by_plain = plain ? by_eight : 0;
  for (int first = warp_index() * kWarp; first < span.count; first += kThreads * 8) {
    const int64_t i = span.begin + first;
    if constexpr (kPlain) {
      if (first < by_plain && f.template operator()<Share::kPlain>(i + lane_index() * 8, true)) continue;
    }
    if (first < by_eight && f.template operator()<Share::kEight>(i + lane_index() * 8, true)) continue;
    warp_sync();  // other lanes may have read the elements
    const int left = span.count - first, lanes = (left < kWarp ? left + kBlock8 - 1 : kWarp) / kBlock8 * kBlock8;
    AK_NO_UNROLL
    for (int j = lane_index(); j < lanes; j += kWarpThreads) {
      f.template operator()<Share::kOne>(i + j, j < left);
    }
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

  /// True if decode_moments is right: one by one always.
  AK_DEVICE bool is_small() const {
    bool small = true;
    for_each_moment<kThere>([&]<int m>() { small &= V == 1 || block8_is_small<CodeOf<Rule, m>>(raw[m].exponent); });
    return small;
  }

  /// The moments of element j, which is there, as they are in memory. Those of all elements at once would be too many
  /// registers.
  AK_DEVICE void decode_moments(int j) {
    for_each_moment<kThere>([&]<int m>() { moments[m][j] = decode_code<CodeOf<Rule, m>>(raw[m], j); });
  }

  /// Called by all lanes of a warp. With kStores each moment is stored at once, which takes fewer registers.
  template <bool kStores, class Key>
  AK_DEVICE void encode_moments(const Key& key) {
    if constexpr (kStores) warp_sync();  // as in store_moments
    for_each_moment<kThere>([&]<int m>() {
      uint32_t random[V];
      random_numbers<256>(key, 1 + m, i, random);
      raw[m] = encode_codes<CodeOf<Rule, m>, (kThere < 3)>(moments[m], random);
      if (kStores && inside) store_codes(t.moments[m], t.exponents[m], i, raw[m]);
    });
  }

  /// True if all new moments have the magnitudes of the rule's plain form.
  AK_DEVICE bool are_normal() const {
    bool normal = true;
    for_each_moment<kThere>([&]<int m>() {
      constexpr Magnitudes kRange = Rule::kNormal[m];
      normal &= is_block_within<CodeOf<Rule, m>>(raw[m], kRange);
    });
    if (normal) return true;
    normal = true;
    for_each_moment<kThere>([&]<int m>() {
      constexpr Magnitudes kRange = Rule::kNormal[m];
      normal &= are_within(moments[m], kRange);
    });
    return normal;
  }

  /// Called by all lanes of a warp.
  AK_DEVICE void store_moments() {
    warp_sync();  // every lane of a block has read the exponent, which one of them writes
    if (!inside) return;
    for_each_moment<kThere>([&]<int m>() { store_codes(t.moments[m], t.exponents[m], i, raw[m]); });
  }
};

/// True if a step has none of the rule's options and no average, and one factor of the gradient at most is not 1: then
/// Share::kPlain is right, whose code knows that.
template <class Rule>
AK_DEVICE bool is_plain(const UpdateRow<Rule>& row, const UpdateOperands8<Rule>& t) {
  return (row.inv_scale == 1.0f || row.clip == 1.0f) && t.ema == nullptr && Rule::is_plain(row.scalars);
}

/// False if the elements must be updated in another way: nothing has been stored. Called by all lanes of a warp.
template <class Rule, bool kOptionalMoments, Share kShare>
AK_DEVICE bool update_elements8(UpdateOperands8<Rule> t, WeightKind kind, UpdateRow<Rule> row, const PhiloxKeys& seed,
                                int64_t i, bool inside) {
  constexpr bool kPlain = kShare == Share::kPlain;
  constexpr int V = kShare == Share::kOne ? 1 : 8;
  if constexpr (kPlain) {
    t.ema = nullptr;
    if (row.inv_scale == 1.0f) row.inv_scale = row.clip;
    row.clip = 1.0f;
    row.scalars = Rule::plain(row.scalars);
  }
  Share8<Rule, kOptionalMoments ? Rule::kMoments : Rule::kRequiredMoments, V> share{t, i, inside};
  share.load(kind);
  bool fits = share.is_small();
  if (!kPlain && V == 8 && warp_any(!fits)) return false;
  if (inside) {
    AK_UNROLL
    for (int j = 0; j < V; j++) {
      share.decode_moments(j);
      float moments[Rule::kMoments];
      AK_UNROLL
      for (int m = 0; m < Rule::kMoments; m++) moments[m] = share.moments[m][j];
      const float g = effective_grad(share.grad[j], row.inv_scale, row.clip);
      if constexpr (kPlain) {
        Rule::template update<NormalNumbers>(share.weight[j], moments, kOptionalMoments, g, row.scalars);
      } else {
        Rule::update(share.weight[j], moments, kOptionalMoments, g, row.scalars);
      }
      AK_UNROLL
      for (int m = 0; m < Rule::kMoments; m++) share.moments[m][j] = moments[m];
    }
  }
  if constexpr (Rule::kMovesMoments) share.template encode_moments<!kPlain>(row.key(seed));
  if constexpr (kPlain) {
    if (warp_any(!(fits && share.are_normal()))) return false;
    share.store_moments();
  }
  if (!inside) return true;
  with_weight<true>(kind,
                    [&]<class Weight>(Weight) { Weight::store(t.main, t.second, i, share.weight, row.key(seed)); });
  if (t.ema != nullptr) store_ema(t.ema, i, share.average, share.weight, row.ema_take);
  return true;
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
    const int tensor = shuffle(span.tensor, 0);  // so that ptxas keeps addresses in uniform registers
    const UpdateRow<Rule> row = load(rows + args.row[tensor]);
    if (leaves(row.clip)) span.count = 0;  // a branch around the share costs it 15 instructions more
    const UpdateOperands8<Rule> t = args.operands(tensor);
    auto update = [&]<bool kOptional>(std::bool_constant<kOptional>) {
      constexpr bool kPlain = kHasPlain<Rule> && !kOptional;
      bool plain = false;
      if constexpr (kPlain) plain = is_plain(row, t);
      for_each_share8<kThreads, kPlain>(span, args.aligned[tensor], plain, [&]<Share kShare>(int64_t i, bool inside) {
        const int at = kOptional ? opaque(tensor) : tensor;  // so many moments leave no registers for addresses
        return update_elements8<Rule, kOptional, kShare>(args.operands(at), args.kind[tensor], row, seed, i, inside);
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

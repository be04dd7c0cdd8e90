#pragma once
// The arguments of the kernels that update a list of parameters: rows of scalars and, for each launch, addresses.
#include <cstddef>
#include <cstdint>

#include "base/tensor_list.h"
#include "gradients/clip.h"
#include "update/rule.h"
#include "update/update.cuh"
#include "update/update.h"

namespace ak {

template <class Rule>
struct Tuned;

/// Defaults; the base of Tuned.
template <class Rule>
struct Untuned : Rule {
  static constexpr int kCommonMoments = Rule::kMoments;
  static constexpr bool kMovesMoments = true;
};

/// The scalars of one parameter, from update_prepare_kernel to update_kernel.
template <class Rule>
struct alignas(16) UpdateRow {
  typename Rule::Scalars scalars;
  float inv_scale;
  float clip;  // negative when maximizing, or kLeave
  // Extras; last, so that the kernel without them need not load them.
  float ema_take;
  uint32_t step;
  RandomPlace random;

  AK_DEVICE RoundingKey<const PhiloxKeys&> key(const PhiloxKeys& seed) const { return {seed, step, random}; }
};

template <class Rule, bool kExtras>
inline constexpr int kMomentsOf = kExtras ? Rule::kMoments : Rule::kCommonMoments;

/// Addresses and dtypes of one tensor.
template <class Rule, bool kExtras>
struct UpdateOperands {
  static constexpr int kMoments = kMomentsOf<Rule, kExtras>;
  const void* grad;
  void *main, *second;
  void* moments[kMoments];
  float* ema;  // null without extras
  DType grad_dtype, moment_dtypes[kMoments];
};

/// The averages of one launch.
template <bool kExtras, int N>
struct EmaArgs {
  float* ema[N];
};
template <int N>
struct EmaArgs<false, N> {};

/// The parameters of one launch of update_kernel.
template <class Rule, bool kExtras, int N>
struct UpdateArgs {
  static constexpr int kTensors = N;
  static constexpr int kMoments = kMomentsOf<Rule, kExtras>;
  ListMap<N> map;
  const void* grad[N];
  void* main[N];
  void* second[N];
  void* moments[kMoments][N];
  EmaArgs<kExtras, N> extras;
  uint32_t row[N];
  WeightKind kind[N];
  DType grad_dtype[N], moment_dtypes[kMoments][N];
  bool aligned[N];  // every operand to 16 bytes

  static bool takes(const Param& p) { return !p.in_8_bits(); }

  void set(int place, const Param& p, size_t position) {
    const WeightPlace weight = weight_place(p);
    grad[place] = p.grad;
    main[place] = weight.main;
    second[place] = weight.second;
    kind[place] = weight.kind;
    row[place] = static_cast<uint32_t>(position);
    grad_dtype[place] = p.grad_dtype;
    aligned[place] = vector_aligned(weight.main) && vector_aligned(weight.second);
    if constexpr (Rule::kMovesMoments) aligned[place] = aligned[place] && vector_aligned(p.grad);
    for (int m = 0; m < kMoments; m++) {
      moments[m][place] = p.moments[m];
      moment_dtypes[m][place] = p.moment_dtypes[m];
      aligned[place] = aligned[place] && vector_aligned(p.moments[m]);
    }
    if constexpr (kExtras) {
      extras.ema[place] = p.ema;
      aligned[place] = aligned[place] && vector_aligned(p.ema);
    }
  }

  AK_DEVICE UpdateOperands<Rule, kExtras> operands(int tensor) const {
    UpdateOperands<Rule, kExtras> t;
    t.grad = grad[tensor];
    t.main = main[tensor];
    t.second = second[tensor];
    t.ema = nullptr;
    if constexpr (kExtras) t.ema = extras.ema[tensor];
    t.grad_dtype = grad_dtype[tensor];
    AK_UNROLL
    for (int m = 0; m < kMoments; m++) {
      t.moments[m] = moments[m][tensor];
      t.moment_dtypes[m] = moment_dtypes[m][tensor];
    }
    return t;
  }
};

AK_DEVICE bool skipped(const StepDecisions& decisions) {
  return decisions.found_inf != nullptr && found(load(decisions.found_inf));
}

}  // namespace ak

// A GEMM on a GPU or the emulator: plan, scratch from torch's allocator, launches.
//
// Operands that do not begin at multiples of 16 bytes are multiplied in phases that do, or on Hopper copied for TMA, if
// the planner finds that faster than the kernel that reads any alignment.
#pragma once
#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "base/op_call.h"
#include "gemm/phases.h"
#include "gemm/plan.h"
#include "gemm/sm90/repack.h"

namespace ak {

/// The plans of products that `tune` found on a GPU. Set while no other thread multiplies.
struct GemmTuning {
  std::map<GemmKey, GemmChoice> plans;

  GemmChoice wanted(const GemmProblem& q) const {
    if (plans.empty()) return {};
    const auto found = plans.find(key_of(q));
    return found == plans.end() ? GemmChoice{} : found->second;
  }
};
inline GemmTuning& gemm_tuning(const Tensor& on) {
  static std::array<GemmTuning, 64> of_devices;
  return of_devices[static_cast<size_t>(on.get_device_index()) % of_devices.size()];
}

/// The chip of a call, with the kernels that this build has for it.
inline GemmChip chip_of(const OpCall& call) {
  const GpuProperties gpu = call.target().properties();
  GemmChip chip{.sm_count = gpu.sm_count, .capability = gpu.capability, .geforce = gpu.geforce};
#ifndef AK_HAS_SM90a
  chip.sm90 = false;
#endif
#ifndef AK_HAS_GEMM_SM80
  chip.sm80 = false;
#endif
  return chip;
}

/// The kernels need a k of at least 1: eight zeros, along k or across it, give the same sums as none.
inline void sum_over_zeros(OpCall& call, GemmProblem& q, bool along_k = true) {
  constexpr int kZeros = 8;
  const auto pitch = [](int x) { return (x + kZeros - 1) / kZeros * kZeros; };
  const size_t bytes = size_t{2 * kZeros} * static_cast<size_t>(pitch(std::max(q.m, q.n)));
  q.a = q.b = call.scratch(bytes, bytes);
  q.k = kZeros;
  q.ld_a = along_k ? kZeros : pitch(q.m);
  q.ld_b = along_k ? kZeros : pitch(q.n);
  q.m_major_a = q.n_major_b = !along_k;
  q.batch_stride_a = q.batch_stride_b = 0;
}

[[noreturn]] inline void fail_without_kernel(const OpCall& call) {
  fail(call.op(),
       ": this build has no GEMM kernel for this GPU and these operands; with AMP_KERNELS_BACKEND=triton another one "
       "serves");
}

class GemmLaunch {
 public:
  explicit GemmLaunch(OpCall& call) : call_(call) {}

  void run(GemmProblem q, const GemmTuning& tuning) {
    const GemmChoice wanted = tuning.wanted(q);
    if (q.k == 0) sum_over_zeros(call_, q);
    const GemmRequest request = request_of(q);
    GemmChip chip = chip_of(call_);
    const auto launched = [&] {
      const GemmPlan plan = plan_gemm_once(request, chip, wanted);
      return q.type == DType::kFloat16 ? launch<fp16>(q, plan) : launch<bf16>(q, plan);
    };
    if (launched()) return;
    chip.sm90 = false;  // the other kernel needs no tensor maps
    launched();
  }

  /// The product of an A in several matrices by the plan, and so with the bits, of the same A in one. False if that
  /// plan does not read them in place; nothing was launched then.
  bool run_segments(const GemmProblem& q, const GemmTuning& tuning) {
    GemmProblem whole = q;
    whole.a = nullptr;  // as aligned as fresh memory
    whole.ld_a = q.m_major_a ? q.m : q.k;
    const GemmPlan plan = plan_gemm_once(request_of(whole), chip_of(call_), tuning.wanted(whole));
    if (plan.kernel != GemmKernel::kSm90) return false;
    if (gemm_sm90_refuses(q, {plan.tile, plan.splits, plan.swapped})) return false;
    return q.type == DType::kFloat16 ? product<fp16>(q, plan) : product<bf16>(q, plan);
  }

 private:
  // For the parts of a split product.
  GemmScratch scratch(const GemmScratchSize& size) {
    if (size.partials == 0) return {};
    return {static_cast<float*>(call_.scratch(size.partials * 4)), call_.counters(size.counters)};
  }

  // False if gemm_sm90 has no tensor map of an operand; nothing was computed then.
  template <class T>
  bool launch(const GemmProblem& q, const GemmPlan& plan) {
    const GemmPhases& phases = plan.phases;
    if (phases.count == 0) return product<T>(q, plan);
    auto* const parts = static_cast<float*>(call_.scratch(static_cast<size_t>(phases.size(q.m, q.n)) * 4));
    if (!product<T>(gemm_in_phases(q, phases, parts), plan)) return false;
    call_.launch(gemm_add_phases<T>, q, phases, parts);
    return true;
  }

  template <class T>
  bool product([[maybe_unused]] GemmProblem q, [[maybe_unused]] const GemmPlan& plan) {
#ifdef AK_HAS_SM90a
    if (plan.kernel == GemmKernel::kSm90) {
      const GemmSm90Config config{plan.tile, plan.splits, plan.swapped};
      if (const size_t bytes = gemm_repack_bytes(q)) {
        const GemmProblem given = q;
        q = gemm_repacked(given, call_.scratch(bytes));
        call_.launch(gemm_repack, given, q);
      }
      const Status status = call_.try_launch(gemm_sm90<T>, q, config, scratch(gemm_sm90_scratch(q, config)));
      if (std::string_view(status.message) == kGemmSm90HasNoMap) return false;
      call_.check(status);
      return true;
    }
#endif
#ifdef AK_HAS_GEMM_SM80
    if (plan.kernel == GemmKernel::kSm80) {
      const GemmSm80Config config{kGemmSm80Tiles[plan.tile], plan.splits};
      call_.launch(gemm_sm80<T>, q, config, scratch(gemm_sm80_scratch(q, config)));
      return true;
    }
#endif
    fail_without_kernel(call_);
  }

  OpCall& call_;
};

/// A grouped product, whose A is row-major, or for sums m-major, as B then is n-major. On Hopper unaligned operands are
/// copied for TMA.
class GroupedLaunch {
 public:
  explicit GroupedLaunch(OpCall& call) : call_(call) {}

  void run(GroupedProblem p) {
    if (p.product.k == 0) sum_over_zeros(call_, p.product, !p.sums);
    const bool launched = p.product.type == DType::kFloat16 ? launch<fp16>(p) : launch<bf16>(p);
    if (!launched) fail_without_kernel(call_);
  }

 private:
  template <class T>
  bool launch(const GroupedProblem& p) {
    [[maybe_unused]] const GemmChip chip = chip_of(call_);
#ifdef AK_HAS_SM90a
    if (chip.capability == 90 && on_sm90<T>(p)) return true;
#endif
#ifdef AK_HAS_GEMM_SM80
    if (chip.capability >= 80) {
      call_.launch(gemm_sm80_grouped<T>, p);
      return true;
    }
#endif
    return false;
  }

#ifdef AK_HAS_SM90a
  // False if gemm_sm90 does not take the problem; no result was computed then.
  template <class T>
  bool on_sm90(const GroupedProblem& p) {
    GemmProblem given = p.product;
    if (!p.sums) given.batch = p.groups;
    GroupedProblem taken = p;
    const size_t bytes = gemm_repack_bytes(given);
    if (bytes > 0) taken.product = gemm_repacked(given, call_.scratch(bytes));
    if (gemm_sm90_refuses_groups(taken)) return false;
    if (bytes > 0) call_.launch(gemm_repack, given, taken.product);
    const Status status = call_.try_launch(gemm_sm90_grouped<T>, taken);
    if (std::string_view(status.message) == kGemmSm90HasNoMap) return false;
    call_.check(status);
    return true;
  }
#endif

  OpCall& call_;
};

}  // namespace ak

// A GEMM on a GPU or the emulator: plan, scratch from torch's allocator, launches.
//
// Operands that do not begin at multiples of 16 bytes are multiplied in phases that do, or on Hopper copied for TMA, if
// the planner finds that faster than the kernel that reads any alignment.
#pragma once
#include <algorithm>
#include <array>
#include <string_view>

#include "base/op_call.h"
#include "gemm/phases.h"
#include "gemm/plan.h"
#include "gemm/sm90/repack.h"

namespace ak {

/// Rates of the planner's model for a GPU: those of an H200, until `_set_gemm_rates` sets others.
inline GemmRates& gemm_rates(const Tensor& on) {
  static std::array<GemmRates, 64> rates;
  return rates[static_cast<size_t>(on.get_device_index()) % rates.size()];
}

class GemmLaunch {
 public:
  explicit GemmLaunch(OpCall& call) : call_(call) {}

  void run(GemmProblem q, const GemmRates& rates) {
    if (q.k == 0) sum_over_zeros(q);
    const GemmRequest request = request_of(q);
    GemmChip chip = chip_of(call_.target().properties(), rates);
    const auto launched = [&] {
      const GemmPlan plan = plan_gemm_once(request, chip);
      return q.type == DType::kFloat16 ? launch<fp16>(q, plan) : launch<bf16>(q, plan);
    };
    if (launched()) return;
    chip.sm90 = false;  // the other kernel needs no tensor maps
    launched();
  }

 private:
  static GemmChip chip_of(const GpuProperties& gpu, const GemmRates& rates) {
    GemmChip chip{.sm_count = gpu.sm_count, .capability = gpu.capability, .rates = rates};
#ifndef AK_HAS_SM90a
    chip.sm90 = false;
#endif
#ifndef AK_HAS_GEMM_SM80
    chip.sm80 = false;
#endif
    return chip;
  }

  // The kernels need a k of at least 1: eight zeros give the same sums as none.
  void sum_over_zeros(GemmProblem& q) {
    constexpr int kZeros = 8;
    const size_t bytes = size_t{2 * kZeros} * static_cast<size_t>(std::max(q.m, q.n));
    q.a = q.b = call_.scratch(bytes, bytes);
    q.k = kZeros;
    q.ld_a = q.ld_b = kZeros;
    q.m_major_a = q.n_major_b = false;
    q.batch_stride_a = q.batch_stride_b = 0;
  }

  // For the parts of a split product.
  GemmScratch scratch(const GemmScratchSize& size) {
    if (size.partials == 0) return {};
    GemmScratch parts{static_cast<float*>(call_.scratch(size.partials * 4)), call_.counters(size.counters)};
    parts.memset = call_.counters_took_memset();
    return parts;
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
        const GemmProblem lies = q;
        q = gemm_repacked(lies, call_.scratch(bytes));
        call_.launch(gemm_repack, lies, q);
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
    fail(call_.op(),
         ": this build has no GEMM kernel for this GPU and these operands; with AMP_KERNELS_BACKEND=triton another "
         "one serves");
  }

  OpCall& call_;
};

}  // namespace ak

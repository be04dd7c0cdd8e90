// Selects the kernel of a product.
#include "gemm/cpu/product.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

#include "base/cpu/isa.h"
#include "base/cpu/simd.h"
#include "base/cpu/tile.h"
#include "base/scalar_type.h"

namespace ak {
namespace {

// The whole product, then its units of rows by threads.
void finish_portable(const GemmProblem& q, float* room, const Finish& finish) {
  constexpr int64_t kSumsPerThread = 32768;
  const int64_t n = q.n, rows = int64_t{q.batch} * q.m, half = is_halved(q) ? n / 2 : 0;
  const Buffer own = room ? nullptr : make_buffer(rows * n);
  float* const sums = room ? room : own.get();
  portable_product(q, sums);
  const int64_t grain = std::max<int64_t>(1, kSumsPerThread / (n * kRowUnit));
  torch::stable::parallel_for(0, row_units(1, rows), grain, [&](int64_t begin_unit, int64_t end_unit) {
    const int64_t begin = begin_unit * kRowUnit, end = std::min(rows, end_unit * kRowUnit);
    finish({.sums = sums + begin * n,
            .stride = n,
            .half = half,
            .row = begin,
            .rows = end - begin,
            .column = 0,
            .columns = half ? half : n,
            .unit = begin_unit});
  });
}

// For every set but the portable one.
const Kernel* kernel_of(Isa isa, [[maybe_unused]] bool is_bf16) {
  switch (isa) {
#if AK_X86
    case Isa::avx2:
      return &avx2_kernel(is_bf16);
    case Isa::avx512:
      return &avx512_kernel(is_bf16);
    case Isa::avx512_bf16:
      return is_bf16 ? &avx512_bf16_kernel() : &avx512_kernel(false);
    case Isa::amx:
      return is_bf16 ? &amx_kernel() : &avx512_kernel(false);
    case Isa::amx_emulated:
      return is_bf16 ? &amx_emulated_kernel() : &avx512_kernel(false);
#endif
    default:
      return nullptr;
  }
}

BatchedOperand operand_of(const void* data, int64_t ld, bool k_contiguous, int64_t batch_stride) {
  return {{static_cast<const uint16_t*>(data), k_contiguous ? ld : 1, k_contiguous ? 1 : ld}, batch_stride};
}

}  // namespace

void product(const GemmProblem& q, float* room, const Finish& finish) {
  const Isa isa = q.batch_invariant ? Isa::portable : current_isa();
  if (isa == Isa::portable) return finish_portable(q, room, finish);
  const bool is_bf16 = q.type == DType::kBFloat16;
  const BlockedProblem problem{.a = operand_of(q.a, q.ld_a, !q.m_major_a, q.batch_stride_a),
                               .b = operand_of(q.b, q.ld_b, !q.n_major_b, q.batch_stride_b),
                               .batches = q.batch,
                               .m = q.m,
                               .n = q.n,
                               .k = q.k,
                               .halves = is_halved(q) ? 2 : 1};
  const Kernel* kernel = kernel_of(isa, is_bf16);
  if (is_thin(problem) && isa == Isa::amx) kernel = kernel_of(Isa::avx512_bf16, is_bf16);
  if (is_thin(problem) && kernel->dot) return thin_product(*kernel, problem, finish);
  blocked_product(*kernel, problem, finish);
}

// Flops per second of multiply-adds on registers, on all threads, for the instructions of a product of this dtype; 0 on
// the portable path.
double cpu_peak(ScalarType dtype, double seconds) {
  const Isa isa = current_isa();
  if (isa == Isa::portable) return 0.0;
  const Kernel& kernel = *kernel_of(isa, dtype == ScalarType::BFloat16);
  const int64_t threads = torch::stable::get_num_threads();
  std::vector<double> rates(static_cast<size_t>(threads), 0.0);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    using Clock = std::chrono::steady_clock;
    for (int64_t thread = begin; thread < end; ++thread) {
      if (kernel.begin) kernel.begin();
      const auto start = Clock::now();
      double flops = 0.0, passed = 0.0;
      while (passed < seconds) {
        flops += static_cast<double>(kernel.burn(1000));
        passed = std::chrono::duration<double>(Clock::now() - start).count();
      }
      rates[static_cast<size_t>(thread)] = flops / passed;
      if (kernel.end) kernel.end();
    }
  });
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CompositeExplicitAutograd, m) { m.impl("cpu_peak", TORCH_BOX(&ak::cpu_peak)); }

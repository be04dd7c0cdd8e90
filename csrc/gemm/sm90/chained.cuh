// Products whose accumulators start from C, and their launch: the gradient of a weight that continues from main_grad.
//
// Work: that of gemm_sm90, 8 bytes an element of C as with red. Plan: a consumer loads its part of C before its first
// wgmma and stores plainly. wgmma carries nothing from one instruction to the next but its fp32 accumulators, so a sum
// that was stored and loaded again is the sum that never stopped, if K was cut at a multiple of 16.
#pragma once
#include "gemm/sm90/gemm.cuh"

namespace ak {
namespace gemm {

template <class T, int kIndex>
Status launch_chained(const GemmProblem& q, const GemmSm90Config& config, Stream stream) {
  if constexpr (kIndex < kGemmTileCount) {
    if (config.tile != kIndex) return launch_chained<T, kIndex + 1>(q, config, stream);
    if constexpr (gemm_sm90_chains(kGemmTiles[kIndex])) {
      using Chained = ChainedTile<StagedTile<kIndex, stages<kIndex, true>()>>;
      return launch_gemm<T, Major::kMN, Major::kMN, true, Chained>(q, 1, {}, stream);
    }
  }
  return {1, "gemm_sm90: sums that start from C take tiles of gemm_sm90_chains()"};
}

}  // namespace gemm

template <class T>
Status gemm_sm90_chained(const GemmProblem& problem, const GemmSm90Config& config, Stream stream) {
  if (!is_chained(problem) || problem.c.type != DType::kFloat32 || config.splits != 1 || config.swapped ||
      !problem.m_major_a || !problem.n_major_b)
    return {1, "gemm_sm90: sums that start from C take an fp32 C, an m-major A, an n-major B and one part"};
  if (const char* why = gemm_sm90_refuses(problem, config)) return {1, why};
  GemmProblem q = problem;
  q.accumulate = false;  // the plain store
  return gemm::launch_chained<T, 0>(q, config, stream);
}

}  // namespace ak

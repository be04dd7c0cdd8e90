// lamb_ on the CPU: the stage of a LAMB step.
//
// Its walk over the parameters moves the moments and sums the squares of weights and directions; the second walk, which
// knows the trust ratios, moves the weights. The sums are taken per chunk in double and added in order, so they do not
// depend on the number of threads.
#include "update/rules/lamb.h"

#include "update/cpu.h"

namespace ak {
namespace {

struct Squares {
  double weight = 0, direction = 0;
};

AK_SIMD_CLONES void moments_span(float* __restrict m, float* __restrict v, const float* __restrict g, int64_t n,
                                 float inv_scale, float clip, const Lamb::Scalars scalars) {
  for (int64_t i = 0; i < n; ++i) Lamb::move_moments(m[i], v[i], effective_grad(g[i], inv_scale, clip), scalars);
}

AK_SIMD_CLONES void direction_span(const float* __restrict p, const float* __restrict m, const float* __restrict v,
                                   float* __restrict u, int64_t n, const Lamb::Scalars scalars) {
  for (int64_t i = 0; i < n; ++i) u[i] = Lamb::direction(p[i], m[i], v[i], scalars);
}

// Eight independent sums, in a fixed order.
AK_SIMD_CLONES double sum_squares(const float* x, int64_t n) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  }
  for (int j = 0; i < n; ++i, ++j) sums[j] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Moves the moments and returns the sums of squares of each tensor.
std::vector<Squares> move_moments(const std::vector<Param>& params, const std::vector<SharedByParam<Lamb>>& shared,
                                  float inv_scale, uint64_t seed) {
  std::vector<std::vector<Squares>> squares(params.size());
  for (size_t i = 0; i < params.size(); ++i)
    squares[i].resize(static_cast<size_t>((params[i].numel + kChunk - 1) / kChunk));
  for_each_tile(
      params, KeyOf<Lamb>{params, shared, seed},
      [&](int64_t index, const float* p, const float* g, int64_t at, int64_t n, TileNumbers& numbers) {
        const size_t i = static_cast<size_t>(index);
        const auto& s = shared[i];
        TileMoments<Lamb> moments;
        float direction[kTile];
        moments.load(params[i], at, n);
        moments_span(moments.of[0], moments.of[1], g, n, inv_scale, s.clip, s.scalars);
        moments.store(params[i], at, n, 0, numbers);
        moments.load(params[i], at, n);  // as stored
        direction_span(p, moments.of[0], moments.of[1], direction, n, s.scalars);
        Squares& sum = squares[i][static_cast<size_t>(at / kChunk)];
        sum.weight += sum_squares(p, n);
        sum.direction += sum_squares(direction, n);
      },
      [](int64_t, const float*, int64_t, int64_t, TileNumbers&) {});

  std::vector<Squares> totals(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    for (const Squares& part : squares[i]) {
      totals[i].weight += part.weight;
      totals[i].direction += part.direction;
    }
  }
  return totals;
}

}  // namespace

template <>
void run_stage<Lamb>(const std::vector<Param>& params, std::vector<SharedByParam<Lamb>>& shared, float inv_scale,
                     uint64_t seed, const StepHalf& half) {
  std::vector<Squares> totals(params.size());
  if (half.squares && half.second) {
    for (size_t i = 0; i < params.size(); ++i) totals[i] = {half.squares[2 * i], half.squares[2 * i + 1]};
  } else {
    totals = move_moments(params, shared, inv_scale, seed);
  }
  for (size_t i = 0; i < params.size(); ++i) {
    if (half.second) {
      shared[i].scalars.rate = Lamb::rate_of(totals[i].weight, totals[i].direction, shared[i].scalars);
    } else if (params[i].numel > 0) {
      half.squares[2 * i] = totals[i].weight;
      half.squares[2 * i + 1] = totals[i].direction;
    }
  }
}

}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { ak::register_update<ak::Lamb, ak::take_step<ak::Lamb>>(m); }

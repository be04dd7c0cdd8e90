// lamb_ on the CPU: one LAMB step of a list of parameters.
//
// Two walks over the parameters: the first moves the moments and adds up the squares of weights and directions, the
// second, which knows the trust ratios, moves the weights. The sums are taken per chunk in double and added in order,
// so they do not depend on the number of threads.
#include "update/rules/lamb.h"

#include "update/cpu.h"

namespace ak {
namespace {

struct Squares {
  double weight = 0, direction = 0;
};

template <typename T>
AK_SIMD_CLONES void as_stored(float* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = to_float(round_to<T>(x[i]));
}

AK_SIMD_CLONES void moments_span(float* __restrict m, float* __restrict v, const float* __restrict g, int64_t n,
                                 float inv_scale, float clip, const Lamb::Scalars scalars) {
  for (int64_t i = 0; i < n; ++i) Lamb::move_moments(m[i], v[i], effective_grad(g[i], inv_scale, clip), scalars);
}

AK_SIMD_CLONES void direction_span(const float* __restrict p, const float* __restrict m, const float* __restrict v,
                                   float* __restrict u, int64_t n, const Lamb::Scalars scalars) {
  for (int64_t i = 0; i < n; ++i) u[i] = Lamb::direction(p[i], m[i], v[i], scalars);
}

// In eight chains, which keeps the order fixed and the additions apart.
AK_SIMD_CLONES double sum_squares(const float* x, int64_t n) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  }
  for (int j = 0; i < n; ++i, ++j) sums[j] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The first walk: the moments as they are after the step, and the squares of each tensor.
std::vector<Squares> move_moments(const std::vector<UpdateParam>& work, const std::vector<SharedByParam<Lamb>>& shared,
                                  float inv_scale) {
  std::vector<std::vector<Squares>> squares(work.size());
  for (size_t i = 0; i < work.size(); ++i)
    squares[i].resize(static_cast<size_t>((work[i].numel + kChunk - 1) / kChunk));
  for_each_tile(
      work,
      [&](int64_t index, const float* p, const float* g, float* const* moments, int64_t at, int64_t n) {
        const size_t i = static_cast<size_t>(index);
        const auto& s = shared[i];
        float direction[kTile];
        moments_span(moments[0], moments[1], g, n, inv_scale, s.clip, s.scalars);
        for (int k = 0; k < 2; ++k) {
          if (work[i].moments[k].dtype == ScalarType::BFloat16) as_stored<bf16>(moments[k], n);
        }
        direction_span(p, moments[0], moments[1], direction, n, s.scalars);
        Squares& sum = squares[i][static_cast<size_t>(at / kChunk)];
        sum.weight += sum_squares(p, n);
        sum.direction += sum_squares(direction, n);
      },
      [](int64_t, const float*, int64_t, int64_t) {});

  std::vector<Squares> totals(work.size());
  for (size_t i = 0; i < work.size(); ++i) {
    for (const Squares& part : squares[i]) {
      totals[i].weight += part.weight;
      totals[i].direction += part.direction;
    }
  }
  return totals;
}

void take_lamb_step(const UpdateArguments& arguments) {
  const std::vector<UpdateParam> work = check_update<Lamb>(arguments);
  const UpdateDecision step = decide(arguments);
  if (step.skip) return;
  auto shared = begin_step<Lamb>(work, arguments, step);

  std::vector<Squares> totals(work.size());
  if (arguments.squares && arguments.second) {
    const double* known = static_cast<const double*>(arguments.squares->const_data_ptr());
    for (size_t i = 0; i < work.size(); ++i) totals[i] = {known[2 * i], known[2 * i + 1]};
  } else {
    totals = move_moments(work, shared, step.inv_scale);
  }
  if (!arguments.second) {
    double* sums = static_cast<double*>(arguments.squares->mutable_data_ptr());
    for (size_t i = 0; i < work.size(); ++i) {
      if (work[i].numel == 0) continue;
      sums[2 * i] = totals[i].weight;
      sums[2 * i + 1] = totals[i].direction;
    }
    return;
  }
  for (size_t i = 0; i < work.size(); ++i) {
    shared[i].scalars.rate = Lamb::rate_of(totals[i].weight, totals[i].direction, shared[i].scalars);
  }
  for_each_tile(
      work,
      [&](int64_t i, float* p, const float* g, float* const* moments, int64_t, int64_t n) {
        const auto& s = shared[static_cast<size_t>(i)];
        update_tile<Lamb, false>(moments, n, step.inv_scale, s.clip, s.scalars, g, p);
      },
      [&](int64_t i, const float* weights, int64_t at, int64_t n) {
        keep_weights(work[static_cast<size_t>(i)], shared[static_cast<size_t>(i)], weights, at, n);
      });
}

}  // namespace
}  // namespace ak

STABLE_TORCH_LIBRARY_IMPL(amp_kernels, CPU, m) { ak::register_update<ak::Lamb, ak::take_lamb_step>(m); }

// cross_entropy_rows: the loss of every row of logits and, on request, its gradient, which may replace the logits.
//
// Work: memory bandwidth. The least is one read and one write of the logits; an element needs two exponentials, which
// the special function unit computes at 16 a cycle and SM: 4 bytes an element and 3 TB/s leave it a third idle, while
// the polynomial of csrc/math would be the limit. Plan: a block takes a row; every thread keeps the largest logit of
// its share and the sum of exponentials relative to it, rescaled when a larger one comes (Milakov and Gimelshein,
// arXiv:1805.02867); the block joins them, and a second walk writes the gradient. What it reads is then in L2: two
// blocks an SM have 27 MB of rows of 50,257 bf16 in work. Smoothing and probabilities need a walk more, in between.
// Traps: rows of odd length begin at any address, so the ends are peeled off. A thread that has seen only -inf must not
// compute -inf - (-inf), but a row of nothing else is NaN, as in torch. A row that is ignored is not read.
#include "kernels/cross_entropy_rows.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "device/approx.cuh"
#include "device/block.cuh"
#include "device/launch.cuh"
#include "kernels/vector_walk.cuh"
#include "math/half.h"

namespace ak {
namespace {

constexpr int kCrossEntropyThreads = 512;
constexpr int kShortRowThreads = 64;  // for rows that would leave most of a large block idle
constexpr int kShortRow = 2048;
constexpr int kResidentThreads = 1024;  // of an SM

AK_DEVICE float exp_below(float x, float largest) { return exp2_approx((x - largest) * 1.4426950408889634f); }

/// The largest value of a thread's share, and the sum of exp(x - largest).
struct RunningSum {
  float largest = -HUGE_VALF, sum = 0.0f;

  template <class T, int N>
  AK_DEVICE void add(const Vec<T, N>& v) {
    float top = largest;
    AK_UNROLL
    for (int j = 0; j < N; j++) top = to_float(v[j]) > top ? to_float(v[j]) : top;
    const float base = top == -HUGE_VALF ? 0.0f : top;  // only -inf so far: their exponentials are 0
    float added = 0.0f;
    AK_UNROLL
    for (int j = 0; j < N; j++) added += exp_below(to_float(v[j]), base);
    sum = fma(sum, exp_below(largest, base), added);
    largest = top;
  }
};

/// What a target gives each class. T is int64_t for a class, otherwise the type of probabilities.
template <class T>
struct Coefficients {
  const T* target;  // the row's
  const float* weight;
  CrossEntropyTerms terms;

  AK_DEVICE float of(int column) const {
    float c = terms.shared;
    if constexpr (!std::is_same_v<T, int64_t>) c = fma(terms.own, to_float(load(target + column)), c);
    return weight ? c * load(weight + column) : c;
  }
};

template <int kThreads, class T, class Target>
AK_DEVICE void run_row(const CrossEntropyRows& p, int64_t row) {
  constexpr bool kSoft = !std::is_same_v<Target, int64_t>;
  const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
  T* grad = p.grad ? static_cast<T*>(p.grad) + row * p.grad_stride : nullptr;
  const Coefficients<Target> coefficients{static_cast<const Target*>(p.target) + row * p.target_stride, p.weight,
                                          p.terms};
  const bool spread = kSoft || p.terms.shared != 0.0f;  // whether more than one class has a coefficient
  const bool first = thread_index() == 0;

  int column = 0;  // of the target
  float target_logit = 0.0f, own = 0.0f;
  CrossEntropySums sums{};
  sums.row = 1.0f;
  if constexpr (!kSoft) {
    const int64_t target = load(coefficients.target);
    const bool outside = target < 0 || target >= p.classes;
    if (target == p.ignore_index || outside) {
      const float fill = target == p.ignore_index ? 0.0f : float_of(0x7fc00000u);
      if (first) store(p.loss + row, fill);
      for (int i = thread_index(); grad && i < p.classes; i += kThreads) store(grad + i, round_to<T>(fill));
      return;
    }
    column = static_cast<int>(target);
    target_logit = to_float(load(logits + column));
    if (p.weight) sums.row = load(p.weight + column);
    own = p.terms.own * sums.row;
  }

  RunningSum running;
  for_each_vector<kThreads, Cache::kDefault>(logits, p.classes,
                                             [&]<int N>(const T*, const Vec<T, N>& v) { running.add(v); });
  sums.largest = block_reduce<kThreads>(running.largest, [](float a, float b) { return a > b ? a : b; });
  sums.sum_exp = block_sum<kThreads>(running.sum * exp_below(running.largest, sums.largest));

  if (spread) {
    float total = 0.0f, moved = 0.0f;
    for (int i = thread_index(); i < p.classes; i += kThreads) {
      const float c = coefficients.of(i);
      total += c;
      moved = fma(c, to_float(load(logits + i)) - sums.largest, moved);
    }
    sums.total = block_sum<kThreads>(total);
    sums.moved = block_sum<kThreads>(moved);
  }
  if constexpr (!kSoft) {
    sums.total += own;
    sums.moved = fma(own, target_logit - sums.largest, sums.moved);
  }
  const CrossEntropyRow result = cross_entropy_row(p.terms, sums);
  if (first) store(p.loss + row, result.loss);
  if (!grad) return;

  const float factor = load(p.factor + row * p.factor_stride), slope = factor * result.slope;
  const auto phase = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16; };
  const bool alike = phase(grad) == phase(logits);
  for_each_vector<kThreads>(logits, p.classes, [&]<int N>(const T* at, const Vec<T, N>& v) {
    const int begin = static_cast<int>(at - logits);
    Vec<T, N> g;
    AK_UNROLL
    for (int j = 0; j < N; j++) {
      const float e = slope * exp_below(to_float(v[j]), sums.largest);
      g[j] = round_to<T>(spread ? fma(-factor, coefficients.of(begin + j), e) : e);
    }
    if (alike) {
      store_vec<Cache::kStreaming>(grad + begin, g);
    } else {
      AK_UNROLL
      for (int j = 0; j < N; j++) store<Cache::kStreaming>(grad + begin + j, g[j]);
    }
  });
  if constexpr (!kSoft) {
    block_sync();  // the walk has written the target's element, too
    if (first) {
      const float c = own + (spread ? coefficients.of(column) : 0.0f);
      store(grad + column, round_to<T>(fma(-factor, c, slope * exp_below(target_logit, sums.largest))));
    }
  }
}

template <int kThreads, class T, class Target>
AK_KERNEL(kThreads, kResidentThreads / kThreads)
cross_entropy_rows_kernel(AK_PARAM(CrossEntropyRows) p) {
  for (int64_t row = block_index(); row < p.rows; row += grid_blocks()) run_row<kThreads, T, Target>(p, row);
}

template <int kThreads, class T, class Target>
Status run(const CrossEntropyRows& p, Stream stream) {
  const int64_t resident = static_cast<int64_t>(device_sm_count()) * (kResidentThreads / kThreads);
  const LaunchConfig config{.name = "cross_entropy_rows",
                            .grid = static_cast<int>(std::min(p.rows, resident)),
                            .block = kThreads,
                            .stream = stream};
  return launch(cross_entropy_rows_kernel<kThreads, T, Target>, config, p);
}

template <class T>
Status run(const CrossEntropyRows& p, Stream stream) {
  const auto sized = [&]<class Target>(Target) {
    return p.classes <= kShortRow ? run<kShortRowThreads, T, Target>(p, stream)
                                  : run<kCrossEntropyThreads, T, Target>(p, stream);
  };
  if (!p.soft) return sized(int64_t{});
  if (p.target_type == DType::kFloat16) return sized(fp16{});
  if (p.target_type == DType::kBFloat16) return sized(bf16{});
  return sized(float{});
}

}  // namespace

Status cross_entropy_rows(const CrossEntropyRows& p, Stream stream) {
  if (p.rows == 0) return {};
  if (p.type == DType::kFloat16) return run<fp16>(p, stream);
  if (p.type == DType::kBFloat16) return run<bf16>(p, stream);
  return run<float>(p, stream);
}

}  // namespace ak

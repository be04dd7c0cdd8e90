// cross_entropy_rows: the loss of every row of logits and, on request, its gradient, which may replace the logits.
//
// Work: memory bandwidth. The least is one read and one write of the logits; an element needs two exponentials, which
// the special function unit computes at 16 a cycle and SM: 4 bytes an element and 3 TB/s leave it a third idle, while
// the polynomial of csrc/math would be the limit. Plan: a block takes a row; every thread keeps the largest logit of
// its share and the sum of exponentials relative to it, rescaled when a larger one comes (Milakov and Gimelshein,
// arXiv:1805.02867); the block joins them, and a second walk writes the gradient. What it reads is then in L2: two
// blocks an SM have 27 MB of rows of 50,257 bf16 in work. Smoothing and probabilities need a walk more, in between.
// Aligned rows of up to 8,192 classes take another kernel, as norm_forward's: a row is in the registers of a team, a
// warp or 4 or 16, and read once; an element needs one exponential. cp.async brings the next rows: 16 to 64 KB an SM
// are on their way of 16-bit rows of 128 classes and more, where 4.25 TB/s of reads and writes need some 13 KB of
// reads.
//
// Traps: rows of odd length begin at any address, so the ends are peeled off, and the order of sums depends on it. A
// thread that has seen only -inf must not compute -inf - (-inf), but a row of nothing else is NaN, as in torch. What an
// ignored row holds must not count; the first kernel does not read it.
#include "kernels/cross_entropy_rows.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "device/block.cuh"
#include "device/launch.cuh"
#include "kernels/exp_sum.cuh"
#include "kernels/row_ring.cuh"
#include "kernels/vector_walk.cuh"
#include "math/half.h"

namespace ak {
namespace {

constexpr int kCrossEntropyThreads = 512;
constexpr int kShortRowThreads = 64;  // for rows that would leave most of a large block idle
constexpr int kShortRow = 2048;
constexpr int kResidentThreads = 1024;  // of an SM

/// Whether a row with this class has a loss. Where not, loss and gradient are 0, or NaN for a class that is none.
AK_DEVICE bool counts(const CrossEntropyRows& p, int64_t target) {
  return target != p.ignore_index && target >= 0 && target < p.classes;
}
AK_DEVICE float fill_of(const CrossEntropyRows& p, int64_t target) {
  return target == p.ignore_index ? 0.0f : float_of(0x7fc00000u);
}

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
    if (!counts(p, target)) {
      const float fill = fill_of(p, target);
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
  for_each_vector<kThreads, Cache::kDefault>(logits, p.classes, [&]<int N>(const T*, const Vec<T, N>& v) {
    running.add<N>([&](int j) { return to_float(v[j]); });
  });
  sums.largest = block_reduce<kThreads>(running.largest, max_number);
  sums.sum_exp = block_sum<kThreads>(running.relative_to(sums.largest));

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
      const float e = slope * exp_above(to_float(v[j]), sums.largest);
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
      store(grad + column, round_to<T>(fma(-factor, c, slope * exp_above(target_logit, sums.largest))));
    }
  }
}

template <int kThreads, class T, class Target>
AK_KERNEL(kThreads, kResidentThreads / kThreads)
cross_entropy_rows_kernel(AK_PARAM(CrossEntropyRows) p) {
  for (int64_t row = block_index(); row < p.rows; row += grid_blocks()) run_row<kThreads, T, Target>(p, row);
}

AK_HD RingMatrix logits_of(const CrossEntropyRows& p) { return {p.logits, p.type, p.logits_stride}; }
AK_HD RingMatrix probabilities_of(const CrossEntropyRows& p) {
  return {p.soft ? p.target : nullptr, p.target_type, p.target_stride};
}

/// Short rows: a team keeps one in registers, first the logits, then their exponentials.
template <class Team>
AK_KERNEL(kWarpThreads* three_row_warps(Team::kColumns), 1)
cross_entropy_rows_ring_kernel(AK_PARAM(CrossEntropyRows) p, int teams) {
  constexpr int kThreads = Team::kThreads, kColumns = Team::kColumns;
  const bool spread = p.soft || p.terms.shared != 0.0f;  // whether more than one class has a coefficient
  RowRing<Team, 2> ring({logits_of(p), probabilities_of(p)}, p.rows, p.classes, teams);
  int64_t next_target = 0;
  float next_factor = 0.0f;  // of the next row: loaded a row ahead
  const auto load_ahead = [&](int64_t row) {
    if (row >= p.rows) return;
    if (!p.soft) next_target = load(static_cast<const int64_t*>(p.target) + row * p.target_stride);
    if (p.grad != nullptr) next_factor = load(p.factor + row * p.factor_stride);
  };
  load_ahead(ring.first());
  AK_NO_UNROLL
  for (int64_t row = ring.first(); row < p.rows; row += ring.step()) {
    const int64_t target = next_target;
    const float factor = next_factor;
    load_ahead(row + ring.step());
    const bool counted = p.soft || counts(p, target);
    const int column = p.soft || !counted ? -1 : static_cast<int>(target);
    CrossEntropySums sums{};
    sums.row = column >= 0 && p.weight != nullptr ? load(p.weight + column) : 1.0f;
    const float own = column >= 0 ? p.terms.own * sums.row : 0.0f;

    float v[kColumns], c[kColumns] = {};  // c: the coefficients, without what the target's class has of its own
    ring.wait();
    ring.read(v, 0, -HUGE_VALF);
    if (p.soft) ring.read(c, 1);
    const float target_logit = column >= 0 ? ring.value(column, 0) : 0.0f;
    ring.refill(row);
    if (spread) {
      AK_UNROLL
      for (int j = 0; j < kColumns; j++) c[j] = fma(p.terms.own, c[j], p.terms.shared);
      if (p.weight != nullptr) {
        float weight[kColumns];
        load_row<kThreads, kRingVec>(weight, p.weight, DType::kFloat32, 0, p.classes);
        AK_UNROLL
        for (int j = 0; j < kColumns; j++) c[j] *= weight[j];
      }
    }

    float largest[1] = {-HUGE_VALF}, sum[1] = {};
    AK_UNROLL
    for (int j = 0; j < kColumns; j++) largest[0] = max_number(v[j], largest[0]);
    ring.reduce(largest, max_number);
    sums.largest = largest[0];
    if (spread) {
      float coefficients[2] = {};  // their sum, and that of their products with the logits
      for_each_held<kThreads, kRingVec, kColumns>(p.classes, [&](int held, int) {
        AK_UNROLL
        for (int j = held; j < held + kRingVec; j++) {
          coefficients[0] += c[j];
          coefficients[1] = fma(c[j], v[j] - sums.largest, coefficients[1]);
        }
      });
      ring.sum(coefficients);
      sums.total = coefficients[0];
      sums.moved = coefficients[1];
    }
    AK_UNROLL
    for (int j = 0; j < kColumns; j++) {
      v[j] = exp_above(v[j], sums.largest);
      sum[0] += v[j];
    }
    ring.sum(sum);
    sums.sum_exp = sum[0];
    if (column >= 0) {
      sums.total += own;
      sums.moved = fma(own, target_logit - sums.largest, sums.moved);
    }
    const CrossEntropyRow result = cross_entropy_row(p.terms, sums);
    if (ring.leads()) store(p.loss + row, counted ? result.loss : fill_of(p, target));
    if (p.grad == nullptr) continue;

    const float slope = factor * result.slope;
    AK_UNROLL
    for (int j = 0; j < kColumns; j++) v[j] *= slope;
    if (spread) {
      AK_UNROLL
      for (int j = 0; j < kColumns; j++) v[j] = fma(-factor, c[j], v[j]);
    }
    for_each_held<kThreads, kRingVec, kColumns>(p.classes, [&](int held, int first) {
      if (column < first || column >= first + kRingVec) return;
      AK_UNROLL
      for (int j = 0; j < kRingVec; j++) {
        if (column == first + j) v[held + j] = fma(-factor, own, v[held + j]);
      }
    });
    if (!counted) {
      AK_UNROLL
      for (int j = 0; j < kColumns; j++) v[j] = fill_of(p, target);
    }
    store_row<kThreads, kRingVec>(v, p.grad, p.type, row * p.grad_stride, p.classes);
  }
  ring.finish();
}

/// Whether its vectors are those of the rows.
bool ring_takes(const CrossEntropyRows& p) {
  const auto aligned = [&](const void* data, int64_t stride) {
    return rows_aligned(data, p.classes) && (p.rows == 1 || stride % kWideRow == 0);
  };
  return p.classes <= kRingColumns && aligned(p.logits, p.logits_stride) && aligned(p.grad, p.grad_stride) &&
         vector_aligned(p.weight) && (!p.soft || aligned(p.target, p.target_stride));
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
  if (ring_takes(p)) {
    int64_t blocks = 0;
    const Status status = with_row_team<RowTeam<16, 16>>(p.classes, [&]<class Team>(Team) {
      return launch_ring<Team, 2>("cross_entropy_rows", cross_entropy_rows_ring_kernel<Team>, p,
                                  {logits_of(p), probabilities_of(p)}, p.classes,
                                  three_row_warps(Team::kColumns) / Team::kWarps, stream, &blocks);
    });
    if (blocks > 0) return status;
  }
  if (p.type == DType::kFloat16) return run<fp16>(p, stream);
  if (p.type == DType::kBFloat16) return run<bf16>(p, stream);
  return run<float>(p, stream);
}

}  // namespace ak

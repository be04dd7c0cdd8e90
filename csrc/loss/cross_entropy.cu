// cross_entropy_rows: the loss of every row of logits and, on request, its gradient, which may overwrite the logits.
//
// Work: memory bandwidth is the limit. The minimum is one read and one write of the logits. An element needs two
// exponentials; at 4 bytes an element and 3 TB/s the special function unit, 16 a cycle and SM, is a third idle, while
// the polynomial of base/ would be the limit.
//
// Plan. Aligned rows of up to 8,192 classes are read once into the registers of a team, a warp or 4 or
// 16; an element then needs one exponential. cp.async prefetches the next rows: 16 to 64 KB an SM in flight for 16-bit
// rows of 128 classes and more, where 4.25 TB/s of reads and writes need some 13 KB of reads in flight.
//
// All other rows, such as those of 50,257 classes, of which one in eight begins at a 16-byte boundary, are staged
// through shared memory (row_pieces.cuh) in words of 16 bytes, and the order of sums does not depend on where a row
// begins. In the first pass every thread takes columns one by one and keeps the maximum logit of its share, the sum of
// exponentials relative to it, rescaled whenever the maximum grows (Milakov and Gimelshein, arXiv:1805.02867), and for
// smoothing and probabilities the sums of the coefficients, shifted likewise. The second pass, whose results depend on
// no order, reads the row's words and writes those of the gradient. 16-bit rows of up to 58,000 classes are read once,
// longer ones again from L2. 512 threads share a row: with twice as many, each would execute the per-row work again.
//
// Counted in SASS (tests/build), a bf16 logit of GPT-2 takes 23.5 instructions of a thread: 15.5 in the two passes, 0.5
// because batches of 8 do not divide 98 columns a thread, 1.5 in copies, 6 as its share of the per-row work. At a
// copy's rate of 4 bytes an element an SM of the H200 issues some 25. Only one row fits, so 16 warps reach 60 to 70 %
// of that in the model of norm/forward.cu: a prediction of two thirds to three quarters of a copy's rate, not measured.
//
// Instances for fp32 logits write a gradient in 16 bits too, element by element: 64 bytes a warp and store, where 6
// bytes a logit leave time for some 40 instructions. With the statistics of the forward they read a row once; 16-bit
// rows of 152,064 classes are found in L2 a second time, fp32 rows of 132 SMs are larger than it.
//
// Traps: a thread that has seen only -inf must not compute -inf - (-inf), but a row of nothing else is NaN, as in
// torch. The values of an ignored row must not count; the second kernel reads no word of it.
#include "loss/call.h"

#include <cmath>

#include "base/row_ring.cuh"
#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "loss/exp_sum.cuh"
#include "loss/row_pieces.cuh"

namespace ak {
namespace {

/// True if the target is a column.
AK_DEVICE bool has_column(const CrossEntropyRows& p, int64_t target) {
  return target != p.ignore_index && target >= 0 && target < p.classes;
}
/// True if a row with this target has a loss. If not, loss and gradient are 0, or NaN for a class out of range.
template <bool kMore>
AK_DEVICE bool counts(const CrossEntropyRows& p, int64_t target) {
  return has_column(p, target) || (kMore && p.known != nullptr && target != p.ignore_index);
}
AK_DEVICE float fill_of(const CrossEntropyRows& p, int64_t target) {
  return target == p.ignore_index ? 0.0f : float_of(0x7fc00000u);
}

AK_DEVICE int64_t target_of(const CrossEntropyRows& p, int64_t row) {
  return load(static_cast<const int64_t*>(p.target) + row * p.target_stride);
}

/// The logits and, for soft targets, the probabilities. An ignored row is not read but for the few elements outside its
/// whole words.
template <bool kMore>
struct LogitPieces {
  const CrossEntropyRows& p;
  AK_DEVICE const uint8_t* at(int m, int64_t row) const {
    return m == 0 ? element(p.logits, p.type, row * p.logits_stride)
                  : element(p.target, p.target_type, row * p.target_stride);
  }
  AK_DEVICE bool reads(int64_t row) const { return p.soft || counts<kMore>(p, target_of(p, row)); }
};

/// The sums of c and of c (x - base) over a thread's share of the coefficients c. The base follows the running maximum
/// of the logits. All terms have one sign, so rebasing cancels nothing.
struct RunningMean {
  float total = 0.0f, moved = 0.0f;

  AK_DEVICE void move(float from, float to) { moved = fma(total, from - to, moved); }
  AK_DEVICE void add(float c, float above) {
    total += c;
    moved = fma(c, above, moved);
  }
  /// Adds a share with the same base.
  AK_DEVICE void add(const RunningMean& other) {
    total += other.total;
    moved += other.moved;
  }
};

/// kMore: fp32 logits whose gradient has another type, or with what call.h has more for them. Its loss is that of the
/// other instance to the bit.
template <int kThreads, bool kMore>
AK_KERNEL(kThreads, kPieceThreads / kThreads)
cross_entropy_rows_kernel(AK_PARAM(CrossEntropyRows) p, AK_PARAM(PieceShape) shape) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const bool spread = p.soft || p.terms.shared != 0.0f;  // more than one class has a coefficient
  const bool known = kMore && p.known != nullptr;
  RowPieces<kThreads, 2, LogitPieces<kMore>> pieces({bytes_of(p.type), p.soft ? bytes_of(p.target_type) : 0}, p.rows,
                                                    p.classes, shape, {p}, p.grad != nullptr && !known);
  const auto with_type = [&](auto f) {
    if constexpr (kMore) {
      f(float{});
    } else {
      with_row_dtype(p.type, f);
    }
  };
  AK_NO_UNROLL
  for (int64_t row = block_index(); row < p.rows; row += grid_blocks()) {
    const int64_t target = p.soft ? 0 : target_of(p, row);
    const int column = p.soft || !has_column(p, target) ? -1 : static_cast<int>(target);
    const bool counted = p.soft || column >= 0 || (known && target != p.ignore_index);
    CrossEntropyRow result{fill_of(p, target), 0.0f};
    CrossEntropySums sums{};
    sums.row = column >= 0 && p.weight != nullptr ? load(p.weight + column) : 1.0f;

    float v[kBatch], c[kBatch];  // c: the coefficients without the target's own part
    const bool divides = kMore && p.temperature != nullptr;
    const auto temperature = [&] { return load(p.temperature + row * p.temperature_stride); };  // holds no register
    const auto read_logits = [&]<class T>(auto batch, T) {
      pieces.template read<T>(v, 0, batch);
      if constexpr (kMore) {
        if (!divides) return;
        const float by = temperature();
        AK_UNROLL
        for (int j = 0; j < batch.kCount; j++) v[j] = div(v[j], by);
      }
    };
    const auto read_coefficients = [&](auto batch, int begin) {
      AK_UNROLL
      for (int j = 0; j < batch.kCount; j++) c[j] = 0.0f;
      if (p.soft) pieces.read(c, 1, p.target_type, batch);
      AK_UNROLL
      for (int j = 0; j < batch.kCount; j++) c[j] = fma(p.terms.own, c[j], p.terms.shared);
      if (p.weight == nullptr) return;
      const float* weight = p.weight + begin + batch.column;
      AK_UNROLL
      for (int j = 0; j < batch.kCount; j++) c[j] *= load(weight + j * batch.kStep);
    };

    std::conditional_t<kMore, RunningMoment, RunningSum> running;
    RunningMean mean;
    float target_logit = 0.0f;
    const auto add_piece = [&](int begin) {
      if (!counted) return;
      if (pieces.has(column - begin)) {
        target_logit = pieces.value(column - begin, 0, kMore ? DType::kFloat32 : p.type);
        if (divides) target_logit = div(target_logit, temperature());
      }
      const float first_base = finite_base(running.largest);
      RunningMean of_piece;
      with_type([&]<class T>(T type) {
        pieces.for_each_batch([&](auto batch) {
          read_logits(batch, type);
          const float before = finite_base(running.largest);
          const auto value = [&](int j) { return v[j]; };
          if constexpr (kMore) {
            running.template add<batch.kCount>(value, p.statistics_count == 3);
          } else {
            running.template add<batch.kCount>(value);
          }
          if (!spread) return;
          read_coefficients(batch, begin);
          const float base = finite_base(running.largest);
          of_piece.move(before, base);
          AK_UNROLL
          for (int j = 0; j < batch.kCount; j++) of_piece.add(c[j], v[j] - base);
        });
      });
      if (!spread) return;
      mean.move(first_base, finite_base(running.largest));
      mean.add(of_piece);
    };
    if (!known) pieces.for_each_piece(false, add_piece);
    const float factor = p.grad != nullptr ? load(p.factor + row * p.factor_stride) : 0.0f;
    const float own = p.terms.own * sums.row;  // part of the target's class
    float moment = counted ? 0.0f : result.loss;
    if (known) {
      const float* of_row = p.known + row;
      sums.largest = load(of_row);
      sums.sum_exp = load(of_row + p.known_stride);
      moment = p.entropy_factor != nullptr ? load(of_row + 2 * p.known_stride) : 0.0f;
      result.slope = div(1.0f, sums.sum_exp);
    } else if (counted) {
      sums.largest = pieces.reduce(running.largest, max_number);
      sums.sum_exp = pieces.sum(running.relative_to(sums.largest));
      if (spread) {
        mean.move(finite_base(running.largest), sums.largest);
        sums.total = pieces.sum(mean.total);
        sums.moved = pieces.sum(mean.moved);
      }
      if (column >= 0) {
        sums.total += own;
        sums.moved = fma(own, target_logit - sums.largest, sums.moved);
      }
      result = cross_entropy_row(p.terms, sums);
      if constexpr (kMore) {
        if (p.statistics_count == 3) moment = pieces.sum(running.moment_relative_to(sums.largest));
      }
    }
    if (!known && thread_index() == 0) store(p.loss + row, result.loss);
    if (kMore && p.statistics != nullptr && thread_index() == 0) {
      float* of_row = p.statistics + row;
      store(of_row, counted ? sums.largest : result.loss);
      store(of_row + p.statistics_stride, counted ? sums.sum_exp : result.loss + 1.0f);
      if (p.statistics_count == 3) store(of_row + 2 * p.statistics_stride, moment);
    }
    if (p.grad == nullptr) continue;

    float slope = factor * result.slope;
    float at_target = slope * exp_above(target_logit, sums.largest);
    at_target = fma(-factor, own, fma(-factor, p.terms.shared * sums.row, at_target));
    const bool apart = spread && (p.soft || p.weight != nullptr);  // each column has its own coefficient
    const float same = spread && !apart ? -factor * p.terms.shared : 0.0f;
    if constexpr (kMore) {
      // The entropy's gradient is -p (x - m - moment / sum_exp).
      const float bend = p.entropy_factor != nullptr && counted
                             ? -div(load(p.entropy_factor + row * p.entropy_stride), sums.sum_exp)
                             : 0.0f;
      slope = fma(-bend, div(moment, sums.sum_exp), slope);
      pieces.for_each_piece(!known, [&](int begin) {
        with_row_dtype(p.grad_type, [&]<class T>(T) {
          T* grad = opaque(static_cast<T*>(p.grad) + row * p.grad_stride + begin);
          pieces.for_each_batch([&](auto batch) {
            if (counted) read_logits(batch, float{});
            AK_UNROLL
            for (int j = 0; j < batch.kCount; j++) {
              const int at = batch.column + j * batch.kStep;
              float value = result.loss;
              if (counted) {
                const float e = exp_above(v[j], sums.largest);
                value = fma(fma(bend, logit_in_range(v[j] - sums.largest), slope), e, same);
                if (apart) {
                  read_coefficients(Batch<1, 1>{at}, begin);
                  value = fma(-factor, c[0], value);
                }
                if (at == column - begin) value = fma(-factor, own, value);
              }
              store(grad + at, round_to<T>(value));
            }
          });
        });
      });
      continue;
    }
    pieces.for_each_piece(true, [&](int begin) {
      with_row_dtype(p.type, [&]<class T>(T) {
        T* grad = static_cast<T*>(p.grad) + row * p.grad_stride + begin;
        if (!counted) {
          AK_UNROLL
          for (int j = 0; j < kBatch; j++) v[j] = result.loss;
          return pieces.write_words(v, grad, 0, {-1, 0.0f}, [](auto) {});
        }
        pieces.write_words(v, grad, 0, {column - begin, at_target}, [&](auto batch) {
          pieces.template read_word<T>(v, 0, batch);
          AK_UNROLL
          for (int j = 0; j < batch.kCount; j++) v[j] = fma(slope, exp_above(v[j], sums.largest), same);
          if (!apart) return;
          AK_UNROLL
          for (int j = 0; j < batch.kCount; j++) {
            read_coefficients(Batch<1, 1>{batch.column + j}, begin);
            v[j] = fma(-factor, c[0], v[j]);
          }
        });
      });
    });
  }
  pieces.finish();
}

AK_HD RingMatrix logits_of(const CrossEntropyRows& p) { return {p.logits, p.type, p.logits_stride}; }
AK_HD RingMatrix probabilities_of(const CrossEntropyRows& p) {
  return {p.soft ? p.target : nullptr, p.target_type, p.target_stride};
}

/// Short rows: a team keeps a row in registers, first the logits, then their exponentials.
template <class Team>
AK_KERNEL(kWarpThreads* three_row_warps(Team::kColumns), 1)
cross_entropy_rows_ring_kernel(AK_PARAM(CrossEntropyRows) p, int teams) {
  wait_for_previous_kernel();
  allow_next_kernel();
  constexpr int kThreads = Team::kThreads, kColumns = Team::kColumns;
  const bool spread = p.soft || p.terms.shared != 0.0f;  // more than one class has a coefficient
  RowRing<Team, 2> ring({logits_of(p), probabilities_of(p)}, p.rows, p.classes, teams);
  int64_t next_target = 0;
  float next_factor = 0.0f;  // of the next row, loaded a row ahead
  const auto load_ahead = [&](int64_t row) {
    if (row >= p.rows) return;
    if (!p.soft) next_target = target_of(p, row);
    if (p.grad != nullptr) next_factor = load(p.factor + row * p.factor_stride);
  };
  load_ahead(ring.first());
  AK_NO_UNROLL
  for (int64_t row = ring.first(); row < p.rows; row += ring.step()) {
    const int64_t target = next_target;
    const float factor = next_factor;
    load_ahead(row + ring.step());
    const bool counted = p.soft || has_column(p, target);
    const int column = p.soft || !counted ? -1 : static_cast<int>(target);
    CrossEntropySums sums{};
    sums.row = column >= 0 && p.weight != nullptr ? load(p.weight + column) : 1.0f;
    const float own = column >= 0 ? p.terms.own * sums.row : 0.0f;

    float v[kColumns], c[kColumns] = {};  // c: the coefficients without the target's own part
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
      float coefficients[2] = {};  // sums of the coefficients and of their products with logits
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
    store_row<kThreads, kRingVec>(v, p.grad, p.grad_type, row * p.grad_stride, p.classes);
  }
  ring.finish();
}

/// True if a ring can read and write the rows in vectors. What fp32 logits have more, long rows have.
bool ring_takes(const CrossEntropyRows& p) {
  if (p.temperature != nullptr || p.statistics != nullptr || p.known != nullptr) return false;
  const auto aligned = [&](const void* data, int64_t stride) {
    return rows_aligned(data, p.classes) && (p.rows == 1 || stride % kWideRow == 0);
  };
  return p.classes <= kRingColumns && aligned(p.logits, p.logits_stride) && aligned(p.grad, p.grad_stride) &&
         vector_aligned(p.weight) && (!p.soft || aligned(p.target, p.target_stride));
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
  const bool more = p.temperature != nullptr || p.statistics != nullptr || p.known != nullptr || p.grad_type != p.type;
  return launch_pieces("cross_entropy_rows", {bytes_of(p.type), p.soft ? bytes_of(p.target_type) : 0}, p.classes, p,
                       stream, [=](auto threads) {
                         return more ? cross_entropy_rows_kernel<threads(), true>
                                     : cross_entropy_rows_kernel<threads(), false>;
                       });
}

}  // namespace ak

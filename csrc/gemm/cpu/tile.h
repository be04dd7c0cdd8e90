// Packing and the micro-kernel of kernel.h over the vectors of one instruction set. The file of an instruction set
// defines AK_TARGET, the attribute that makes the compiler use it, includes this, and passes `V`:
//
//   kLanes           words in a vector
//   kPair            16-bit elements in a word
//   Words, Sums      a vector of words, a vector of fp32 sums
//   load_steps       kLanes consecutive words of one lane; given a number of elements, zeros beyond them
//   load_lanes       the word of one step of kLanes consecutive lanes; zeros beyond K and beyond the lanes
//   transpose        a square of kLanes vectors
//   load_transposed  optional: a transposed square of steps, faster than load_steps and transpose
//   store_words      a vector, or its first lanes
//   load_words, broadcast, load_sums, store_sums, zero, multiply_add
//   total            sum over a vector of sums
//
// Everything is in an anonymous namespace, so that the linker does not merge code of different instruction sets.
#pragma once

// GCC 12 warns of undefined vectors in its own intrinsics (bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "gemm/cpu/kernel.h"

// For the small functions of V and for lambdas that call them.
#define AK_VECTOR inline __attribute__((always_inline)) AK_TARGET
#define AK_VECTOR_LAMBDA __attribute__((always_inline)) AK_TARGET

namespace ak {
namespace {

// The steps of kLanes lanes of K-contiguous memory: vector i is step i of all lanes.
template <typename V>
AK_VECTOR void load_square(const uint16_t* from, int64_t lane_stride, int64_t lanes, int64_t elements,
                           typename V::Words (&square)[V::kLanes]) {
  if (lanes >= V::kLanes && elements >= V::kLanes * V::kPair) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < V::kLanes; ++i)
      __builtin_prefetch(from + (V::kLanes + i) * lane_stride);  // of the next lanes
    if constexpr (requires { V::load_transposed(from, lane_stride, square); })
      return V::load_transposed(from, lane_stride, square);
#pragma GCC unroll 16
    for (int64_t i = 0; i < V::kLanes; ++i) square[i] = V::load_steps(from + i * lane_stride);
  } else {
#pragma GCC unroll 16
    for (int64_t i = 0; i < V::kLanes; ++i) square[i] = V::load_steps(from + i * lane_stride, i < lanes ? elements : 0);
  }
  V::transpose(square);
}

template <typename V>
AK_TARGET void pack_panels(Operand from, int64_t lanes, int64_t k, int64_t steps, int64_t width, uint32_t* to) {
  if (from.k_stride == 1) {
    for (int64_t lane = 0; lane < lanes; lane += width, to += width * steps) {
      for (int64_t v = 0; v < width; v += V::kLanes) {
        for (int64_t p = 0; p < steps; p += V::kLanes) {
          const int64_t at = p * V::kPair;
          typename V::Words square[V::kLanes];
          load_square<V>(from.data + (lane + v) * from.lane_stride + at, from.lane_stride, lanes - lane - v, k - at,
                         square);
          for (int64_t i = 0; i < std::min(V::kLanes, steps - p); ++i)
            V::store_words(to + (p + i) * width + v, square[i]);
        }
      }
    }
    return;
  }
  // Reads rows of memory in order, so that each cache line is read once. Each row is in another page, and the hardware
  // does not prefetch across pages.
  constexpr int64_t kAhead = 16, kLineElements = 32;
  for (int64_t p = 0; p < steps; ++p) {
    const int64_t at = p * V::kPair;
    for (int64_t i = at + kAhead; i < std::min(k, at + kAhead + V::kPair); ++i) {
      for (int64_t lane = 0; lane < lanes; lane += kLineElements)
        __builtin_prefetch(from.data + i * from.k_stride + lane);
    }
    for (int64_t lane = 0; lane < lanes; lane += width) {
      for (int64_t v = 0; v < width; v += V::kLanes) {
        const auto words =
            V::load_lanes(from.data + at * from.k_stride + lane + v, from.k_stride, k - at, lanes - lane - v);
        V::store_words(to + lane * steps + p * width + v, words);
      }
    }
  }
}

template <typename V>
AK_TARGET void pack_rows(Operand from, int64_t lanes, int64_t k, int64_t steps, uint32_t* to) {
  if (from.k_stride == 1) {
    for (int64_t lane = 0; lane < lanes; ++lane, to += steps) {
      const uint16_t* row = from.data + lane * from.lane_stride;
      for (int64_t p = 0; p < steps; p += V::kLanes)
        V::store_words(to + p, V::load_steps(row + p * V::kPair, k - p * V::kPair), steps - p);
    }
    return;
  }
  for (int64_t lane = 0; lane < lanes; lane += V::kLanes) {
    for (int64_t p = 0; p < steps; p += V::kLanes) {
      typename V::Words square[V::kLanes];
      for (int64_t i = 0; i < V::kLanes; ++i) {
        const int64_t at = (p + i) * V::kPair;
        square[i] = V::load_lanes(from.data + at * from.k_stride + lane, from.k_stride, k - at, lanes - lane);
      }
      V::transpose(square);
      for (int64_t i = 0; i < std::min(V::kLanes, lanes - lane); ++i)
        V::store_words(to + (lane + i) * steps + p, square[i], steps - p);
    }
  }
}

// A tile of kRows x kVectors accumulators in registers over all steps.
template <typename V, int kRows, int kVectors, int kWidth>
AK_TARGET void multiply_tile(int64_t steps, const Words& a, const uint32_t* b, float* sums, int64_t stride,
                             bool accumulate) {
  typename V::Sums tile[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      tile[i][j] = accumulate ? V::load_sums(sums + i * stride + j * V::kLanes) : V::zero();
  }
  const char* rows = a.data;
  for (int64_t p = 0; p < steps; ++p, b += kWidth, rows += a.step_bytes) {
    typename V::Words columns[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) columns[j] = V::load_words(b + j * V::kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const typename V::Words row = V::broadcast(rows + i * a.lane_bytes);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) tile[i][j] = V::multiply_add(row, columns[j], tile[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) V::store_sums(sums + i * stride + j * V::kLanes, tile[i][j]);
  }
}

// One function per size of tile: entry (rows - 1) * kVectors + vectors - 1.
template <typename V, int kRows, int kVectors>
struct Tiles {
  using Function = void (*)(int64_t, const Words&, const uint32_t*, float*, int64_t, bool);

  template <int... kIndex>
  static constexpr std::array<Function, kRows * kVectors> table(std::integer_sequence<int, kIndex...>) {
    return {multiply_tile<V, kIndex / kVectors + 1, kIndex % kVectors + 1, kVectors * V::kLanes>...};
  }

  static constexpr auto kTable = table(std::make_integer_sequence<int, kRows * kVectors>());

  static void multiply(int64_t steps, const Words& a, const uint32_t* panel, float* sums, int64_t stride, int64_t rows,
                       int64_t columns, bool accumulate) {
    const int64_t vectors = (columns + V::kLanes - 1) / V::kLanes;
    kTable[static_cast<size_t>((rows - 1) * kVectors + vectors - 1)](steps, a, panel, sums, stride, accumulate);
  }
};

// kRows x kColumns dot products, each summed in the lanes of one register, then over the lanes.
template <typename V, int kRows, int kColumns>
AK_TARGET void dot_tile(int64_t k, const uint32_t* a, int64_t steps, Operand b, float* sums, int64_t row_stride,
                        int64_t column_stride) {
  typename V::Sums tile[kRows][kColumns];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) tile[i][j] = V::zero();
  }
  const auto add = [&](int64_t p, auto load) AK_VECTOR_LAMBDA {
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) {
      const uint16_t* from = b.data + j * b.lane_stride + p * V::kPair;
      const typename V::Words column = load(from);
      __builtin_prefetch(from + kColumns * b.lane_stride);  // of the next columns, a hint that may point past the last
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i)
        tile[i][j] = V::multiply_add(V::load_words(a + i * steps + p), column, tile[i][j]);
    }
  };
  int64_t p = 0;
  for (; (p + V::kLanes) * V::kPair <= k; p += V::kLanes)
    add(p, [](const uint16_t* from) AK_VECTOR_LAMBDA { return V::load_steps(from); });
  if (const int64_t rest = k - p * V::kPair; rest > 0)
    add(p, [rest](const uint16_t* from) AK_VECTOR_LAMBDA { return V::load_steps(from, rest); });
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) sums[i * row_stride + j * column_stride] = V::total(tile[i][j]);
  }
}

// A few columns of b, kept in the L1 cache, by all rows.
template <typename V, int kColumns>
AK_TARGET void dot_rows(int64_t k, const uint32_t* a, int64_t steps, int64_t rows, Operand b, float* sums,
                        int64_t row_stride, int64_t column_stride) {
  constexpr std::array kByRows{dot_tile<V, 1, kColumns>, dot_tile<V, 2, kColumns>, dot_tile<V, 3, kColumns>,
                               dot_tile<V, 4, kColumns>};
  constexpr int64_t kRows = kByRows.size();
  for (int64_t i = 0; i < rows; i += kRows)
    kByRows[static_cast<size_t>(std::min(kRows, rows - i) - 1)](k, a + i * steps, steps, b, sums + i * row_stride,
                                                                row_stride, column_stride);
}

template <typename V>
AK_TARGET void dot(int64_t k, const uint32_t* a, int64_t steps, int64_t rows, Operand b, int64_t columns, float* sums,
                   int64_t row_stride, int64_t column_stride) {
  constexpr int kColumns = V::kLanes == 16 ? 4 : 2;  // 32 registers, or 16
  int64_t j = 0;
  for (; j + kColumns <= columns; j += kColumns)
    dot_rows<V, kColumns>(k, a, steps, rows, b.at(j, 0), sums + j * column_stride, row_stride, column_stride);
  for (; j < columns; ++j)
    dot_rows<V, 1>(k, a, steps, rows, b.at(j, 0), sums + j * column_stride, row_stride, column_stride);
}

// 12 independent sums hide the latency of an instruction on two ports that each start one per cycle.
template <typename V>
AK_TARGET int64_t burn(int64_t rounds) {
  constexpr int kSums = 12;
  typename V::Sums sums[kSums];
#pragma GCC unroll 12
  for (auto& sum : sums) sum = V::zero();
  const uint32_t one = V::kPair == 2 ? 0x3f803f80u : 0x3f800000u;
  auto a = V::broadcast(reinterpret_cast<const char*>(&one)), b = a;
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));  // the compiler must not merge equal products
#pragma GCC unroll 12
    for (auto& sum : sums) {
      sum = V::multiply_add(a, b, sum);
      asm volatile("" : "+v"(sum));
    }
  }
  return rounds * kSums * V::kLanes * V::kPair * 2;
}

// Tiles of kRows rows and kVectors vectors.
template <typename V, int kRows, int kVectors>
constexpr Kernel tile_kernel(int64_t depth) {
  return {.rows = kRows,
          .columns = kVectors * V::kLanes,
          .lanes_log2 = V::kLanes == 16 ? 4 : 3,
          .group = V::kPair,
          .word_elements = V::kPair,
          .depth = depth,
          .most_columns = 192,
          .in_place = V::kPair == 2,
          .packs_rows = false,
          .pack_panels = pack_panels<V>,
          .pack_rows = pack_rows<V>,
          .multiply = Tiles<V, kRows, kVectors>::multiply,
          .dot = dot<V>,
          .burn = burn<V>,
          .begin = nullptr,
          .end = nullptr};
}

}  // namespace
}  // namespace ak

// What a GEMM takes on a GPU, in microseconds: a model of the work, on the host.
//
// A tile costs one multiprocessor the larger of its products and its loads from L2; then it is finished, or, pingpong,
// finished under the next tile's products. Tiles go round by round over the multiprocessors, and the whole is no faster
// than memory. The rates are those of GemmRates. wgmma reads 128 bytes of shared memory a cycle and makes 2,048
// multiply-adds, so instructions narrower than 64 columns starve (measured by arXiv:2402.13499: 63 % at 32 columns,
// 38 % at 16; the formula below gives 67 and 40). tests/tuning/test_gemm_cost.py holds the model against measured
// times.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/gemm_sm80.h"
#include "kernels/gemm_sm90.h"

namespace ak {

/// What the model multiplies by. Chosen to fit products that were timed on an H200, but for `dram`, which was measured,
/// and `issue`, which follows from the latencies in the machine code.
struct GemmRates {
  double clock = 1750;       ///< cycles a microsecond; the power limit is part of `contention`
  double dram = 4.25e6;      ///< bytes a microsecond: of a copy, read and written
  double l2 = 50;            ///< bytes a cycle, of one multiprocessor
  double store = 32;         ///< bytes of C a cycle, of one multiprocessor
  double contention = 0.13;  ///< of the lesser of two things that run side by side, that the greater waits for
  double start = 2400;       ///< cycles outside the rounds: launch, barriers, first loads and last store
  double turn = 1000;        ///< cycles from a tile's last product to the first of the next, with nothing in between
  double step = 165;         ///< cycles between two steps of k, at least: a wgmma's latency and the release of a stage
  double issue = 0.35;       ///< instructions a cycle that a warp issues between products
};

/// The GPU, and what was compiled for it.
struct GemmChip {
  int sm_count = 132;
  int capability = 90;  ///< 10 major + minor
  bool sm90 = true, sm80 = true;
  GemmRates rates;
};

/// What the choice depends on.
struct GemmRequest {
  int m = 1, n = 1, k = 1, batch = 1;  ///< of A and B
  bool m_major_a = false, n_major_b = false;
  bool tma_operands = true;   ///< A and B: 16-byte aligned, as are the distances between rows and matrices
  bool tma_output = true;     ///< C as well, and of the inputs' type or fp32
  bool odd_operands = false;  ///< of A and B, one is aligned to 2 bytes only
  int out_bytes = 2;          ///< an element of C
  int side_bytes = 0;         ///< that the epilogue reads and writes besides, per element of C
  Activation activation = Activation::none;
  bool backward = false, column_sums = false;
  bool plain = true;             ///< nothing is done to the sums: is_plain()
  bool in_registers = true;      ///< what is done needs nothing but alpha or a bias: gemm_sm90_in_registers()
  bool batch_invariant = false;  ///< tile and splits may depend on n and k alone

  bool operator==(const GemmRequest&) const = default;
};

namespace detail {

constexpr double kNever = 1e300;
constexpr double kMemset = 2;  // microseconds: the counters of a product that gemm_sm80 splits

inline double whole(double x, double y) {
  return static_cast<double>((static_cast<int64_t>(x) + static_cast<int64_t>(y) - 1) / static_cast<int64_t>(y));
}

/// Two things that run side by side and get into each other's way; traffic also takes power from the products.
inline double side_by_side(double a, double b, const GemmRates& rates) {
  return std::max(a, b) + rates.contention * std::min(a, b);
}

inline bool halves_columns(const GemmRequest& q) { return q.activation == Activation::swiglu && !q.backward; }

/// Bytes that a product must read and write once.
inline double dram_bytes(const GemmRequest& r) {
  const double columns = r.activation != Activation::swiglu ? r.n : r.backward ? 2.0 * r.n : r.n / 2.0;
  return r.batch * (2.0 * r.k * (static_cast<double>(r.m) + r.n) + r.m * columns * (r.out_bytes + r.side_bytes));
}

/// Instructions per element of C that an activation takes, or its derivative, as nvcc compiles csrc/math.
inline double activation_instructions(const GemmRequest& q) {
  switch (q.activation) {
    case Activation::none:
      return 0;
    case Activation::relu:
      return 2;
    case Activation::gelu:
      return 20;
    case Activation::gelu_tanh:
      return 22;
    case Activation::silu:
      return 20;
    case Activation::swiglu:
      return q.backward ? 32 : 24;
  }
  return 0;
}

/// How the sums leave gemm_sm90 (Finish in its gemm_sm90_tile.cuh): as they are, in registers, by rows of vectors, or
/// element by element.
enum class Sm90Finish { kPlain, kInRegisters, kVectors, kElements };

inline Sm90Finish sm90_finish(const GemmRequest& r, const GemmTile& t, bool swap) {
  if (!r.tma_output || swap) return Sm90Finish::kElements;
  if (!r.in_registers || (r.out_bytes > 2 && t.n % 64 != 0)) return Sm90Finish::kVectors;
  return r.plain ? Sm90Finish::kPlain : Sm90Finish::kInRegisters;
}

/// Instructions per element of C between the last wgmma of a tile and the next tile, in a consumer of gemm_sm90;
/// counted in its machine code (tests/build/test_epilogue_instructions.py).
inline double sm90_epilogue_instructions(const GemmRequest& q, Sm90Finish finish, const GemmTile& t) {
  const double rows = t.n % 64 == 0 ? 0 : 4;  // without boxes the threads store the rounded rows themselves
  switch (finish) {
    case Sm90Finish::kPlain:
      return 1.2 + rows;
    case Sm90Finish::kInRegisters:
      return 4 + rows;
    case Sm90Finish::kVectors:
      return 12.5 + (q.side_bytes ? 2 : 0) + (q.column_sums ? 7.5 : 0) + activation_instructions(q);
    case Sm90Finish::kElements:
      return 67 + (q.column_sums ? 7.5 : 0) + activation_instructions(q);
  }
  return 0;
}

/// Microseconds of a product with one of the tiles of gemm_sm90; kNever if nothing speaks for it.
inline double sm90_time(const GemmRequest& r, const GemmChip& chip, const GemmTile& t, int splits, bool swap) {
  const GemmRates& rate = chip.rates;
  const int m = swap ? r.n : r.m, n = swap ? r.m : r.n;
  const bool halved = halves_columns(r);
  const double columns = halved ? n / 2 : n, tile_columns = halved ? t.n / 2 : t.n;
  const double cluster = t.cluster_m * t.cluster_n;
  const double works = r.batch * whole(m, t.m * t.cluster_m) * whole(columns, tile_columns * t.cluster_n) * splits;
  const double rounds = whole(works, std::max(1.0, std::floor(chip.sm_count / cluster)));
  if (splits > 1 && works > 2 * splits * chip.sm_count / cluster) return kNever;  // whole tiles fill the chip
  const double steps = whole(whole(r.k, 64), splits);

  // One group of warps cannot always have the next wgmma ready.
  const double wgmma = 4 * (t.m / 64) * std::max(t.n / 2.0, 16 + t.n / 4.0) / (t.consumers == 1 ? 0.9 : 1);
  const double loads = (t.m / t.cluster_n + t.n / t.cluster_m) * 128.0 / rate.l2;
  const double product = steps * std::max(rate.step, side_by_side(wgmma, loads, rate));

  const double elements = t.m * tile_columns;
  const double groups = t.pingpong ? 1 : t.consumers;  // of four warps, one on each scheduler
  const double instructions = elements * sm90_epilogue_instructions(r, sm90_finish(r, t, swap), t) / 128;
  double finish = rate.turn + instructions / std::min(0.9, groups * rate.issue);
  if (splits > 1) {  // each part is written, and the last one reads them all, writes the sum and reads it again
    finish += rate.turn + elements * 4 * (1 / rate.store + (splits + 2) / rate.l2);
  }
  const double stored = elements * (r.out_bytes + r.side_bytes) / rate.store;  // while the next tile is worked on
  const double busy = t.pingpong ? std::max(product + rate.turn / 4, (product + finish) / 2) : product + finish;
  const double cycles = rounds * std::max(busy, stored) + (t.pingpong ? finish : 0);
  return (splits > 1 ? kMemset : 0) + rate.start / rate.clock +
         side_by_side(cycles / rate.clock, dram_bytes(r) / rate.dram, rate);
}

struct Sm80TileCost {
  int m, n, resident;  // blocks that share a multiprocessor
};
/// By the number of the tile.
inline constexpr Sm80TileCost kSm80Tiles[] = {{128, 256, 1}, {128, 128, 2}, {64, 64, 4}};

/// The same for a tile of the mma.sync kernel.
inline double sm80_time(const GemmRequest& r, const GemmChip& chip, const Sm80TileCost& t, int splits) {
  constexpr double kL2Bytes = 32, kStoreBytes = 16, kFill = 2000;
  const double multiply_adds = chip.capability == 90 ? 1270 : chip.capability == 80 ? 1024 : 512;  // a cycle
  const bool halved = halves_columns(r);
  const double columns = halved ? r.n / 2 : r.n, tile_columns = halved ? t.n / 2 : t.n;
  const double works = r.batch * whole(r.m, t.m) * whole(columns, tile_columns) * splits;
  const double rounds = whole(works, static_cast<double>(chip.sm_count) * t.resident);
  const double together = std::min<double>(t.resident, whole(works, chip.sm_count));
  const double depth = whole(whole(r.k, 64), splits) * 64;
  const double loads = (t.m + t.n) * 2.0 / kL2Bytes * (r.tma_operands ? 1 : r.odd_operands ? 2.5 : 1.5);
  const double elements = t.m * tile_columns;
  double finish = std::max(elements * (r.out_bytes + r.side_bytes) / kStoreBytes,
                           elements * ((r.side_bytes ? 8 : 4) + activation_instructions(r)) / 128);
  if (splits > 1) finish += elements * 4 / kStoreBytes + splits * elements * 4 / kL2Bytes / 2;
  const double cycles = rounds * (kFill + together * (depth * std::max(t.m * t.n / multiply_adds, loads) + finish));
  return (splits > 1 ? kMemset : 0) +
         side_by_side(cycles / chip.rates.clock, dram_bytes(r) / chip.rates.dram, chip.rates);
}

}  // namespace detail
}  // namespace ak

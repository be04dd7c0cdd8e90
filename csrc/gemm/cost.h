// Cost model of a GEMM on a GPU, in microseconds, on the host.
//
// A k step of a tile costs the larger of its multiply-adds and its loads into the SM, plus a stage hand-over per
// consumer. The epilogue follows, or with pingpong overlaps the next tile's main loop. Tiles run in waves over the SMs,
// at the clock that power allows, overlapped with memory traffic. wgmma reads 128 bytes of shared memory per cycle and
// makes 2,048 multiply-adds, so instructions narrower than 64 columns starve (measured by arXiv:2402.13499: 63 % at 32
// columns, 38 % at 16; the formula below gives 67 and 40). tests/tuning/test_gemm_cost.py compares the model with
// measured times.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gemm/phases.h"
#include "gemm/sm80/gemm.h"
#include "gemm/sm90/gemm.h"

namespace ak {

/// Rates of the model. `clock` is the data sheet's and `l2` the width of the port; a free fit finds nearly the same
/// (2,010 and 63). `dram` was measured with a copy. The others are fitted to the times of every tile on an H200
/// (bench/results/nvidia-h200/gemm_tiles.csv).
struct GemmRates {
  double clock = 1980;     ///< cycles per microsecond below the power limit
  double power = 1.85e8;   ///< multiply-adds per microsecond at the power limit
  double dram = 4.25e6;    ///< bytes per microsecond of a copy, reads and writes
  double reduce = 1.35e6;  ///< bytes of fp32 per microsecond that are added to C: red in L2
  double crossing = 0.36;  ///< share of an operand read by both halves of the chip that comes from the other half's L2
  double l2 = 64;          ///< bytes per cycle into one SM, its own or multicast
  double start = 2500;     ///< cycles outside the waves: launch, barriers, first loads and last store
  double turn = 1700;      ///< cycles from a tile's last wgmma to the next tile's first, beyond the epilogue's
  double hand_over = 27;   ///< cycles per k step for a consumer to wait for a stage and release it

  bool operator==(const GemmRates&) const = default;
};

/// Place of the 128 bytes that TMA reads of an operand's row at a time: one line of L2, or parts of two, whose 32-byte
/// sectors are read whole or in part.
enum class GemmRows : uint8_t { kLines, kSectors, kSplitSectors };

/// Rows of `length` elements at multiples of `bytes`. Rows of less than 128 bytes count as lines.
inline GemmRows gemm_rows(int length, uint64_t bytes) {
  return length < 64 || bytes % 128 == 0 ? GemmRows::kLines
         : bytes % 32 == 0               ? GemmRows::kSectors
                                         : GemmRows::kSplitSectors;
}

/// The GPU and the kernels compiled for it.
struct GemmChip {
  int sm_count = 132;
  int capability = 90;   ///< 10 major + minor
  bool geforce = false;  ///< an NVIDIA GeForce: half of the multiply-adds with fp32 sums
  bool sm90 = true, sm80 = true;
  GemmRates rates;
};

/// Inputs of the plan.
struct GemmRequest {
  int m = 1, n = 1, k = 1, batch = 1;  ///< of the product of A and B
  bool m_major_a = false, n_major_b = false;
  bool tma_a = true;          ///< A and the strides between its rows and matrices are multiples of 16 bytes
  bool tma_b = true;          ///< the same for B
  bool tma_output = true;     ///< the same for C, whose type is the inputs' or fp32
  bool row_output = true;     ///< C is of such a type and row-major
  bool odd_operands = false;  ///< A or B is only 2-byte aligned
  GemmRows rows_a = GemmRows::kLines, rows_b = GemmRows::kLines;  ///< as gemm_sm90 reads them, copied or not
  GemmPhases phases;   ///< aligned phases of unaligned operands: gemm_phases()
  int out_bytes = 2;   ///< per element of C; 8: accumulated
  int side_bytes = 0;  ///< of other tensors of the epilogue, per element of C
  Activation activation = Activation::none;
  bool backward = false, keeps_z = false, column_sums = false;
  bool plain = true;             ///< no epilogue: is_plain()
  bool in_registers = true;      ///< alpha or a bias at most: gemm_sm90_in_registers()
  bool tma_epilogue = true;      ///< TMA can move every operand: gemm_sm90_tma_epilogue()
  bool batch_invariant = false;  ///< the kernel follows from the GPU and the dtypes alone, and K is not split
  bool chained = false;          ///< the sums start from C: is_chained()
  bool symmetric = false;        ///< the lower triangle, mirrored

  bool tma_operands() const { return tma_a && tma_b; }

  bool operator==(const GemmRequest&) const = default;
};

namespace detail {

constexpr double kNever = 1e300;
constexpr double kIssue = 0.9;    // instructions per cycle of a warp scheduler, at most
constexpr double kOperand = 400;  // cycles until an epilogue's first operand arrives from L2
// An epilogue takes longer while the other consumer runs wgmma, which reads and writes its accumulators in the same
// register file: 1.74 with bias and gelu (65536x3072x768: 592 us), 1.63 with the pre-activation as well.
constexpr double kDuringProducts = 1.7;
inline double whole(double x, double y) {
  return static_cast<double>((static_cast<int64_t>(x) + static_cast<int64_t>(y) - 1) / static_cast<int64_t>(y));
}

/// Time of two overlapped phases, which slow each other down most if they are equally long.
inline double side_by_side(double a, double b) { return std::cbrt(a * a * a + b * b * b); }

/// `microseconds` at the full clock, stretched by the power limit. Power grows with the cube of the clock, because
/// voltage follows it, so the clock falls with the cube root of the excess.
inline double under_power(double microseconds, double multiply_adds, const GemmRates& rates) {
  return microseconds * std::cbrt(std::max(1.0, multiply_adds / (microseconds * rates.power)));
}

inline double multiply_adds_of(const GemmRequest& r) { return static_cast<double>(r.batch) * r.m * r.n * r.k; }

inline bool halves_columns(const GemmRequest& q) { return q.activation == Activation::swiglu && !q.backward; }

/// Microseconds of DRAM traffic for a C of `tiles_m` x `tiles_n` tiles or clusters: each tensor moves once.
inline double memory_time(const GemmRequest& r, const GemmRates& rates, double tiles_m, double tiles_n) {
  const double columns = r.activation != Activation::swiglu ? r.n : r.backward ? 2.0 * r.n : r.n / 2.0;
  const double a = 2.0 * r.k * r.m * (tiles_n > 1 ? 1 + rates.crossing : 1);
  const double b = 2.0 * r.k * r.n * (tiles_m > 1 ? 1 + rates.crossing : 1);
  const double stored = r.out_bytes / rates.dram;
  const double c = r.out_bytes == 8 && !r.chained ? std::max(stored, 4 / rates.reduce) : stored;  // 8: accumulated
  return r.batch * ((a + b) / rates.dram + r.m * columns * (c + r.side_bytes / rates.dram));
}

/// Instructions per element of C of an activation or its derivative, as nvcc compiles activation/formula.h.
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

/// Epilogue routes of gemm_sm90 (DirectStore and FusedEpilogue in gemm/sm90/tile.cuh): sums, sums with alpha or bias,
/// the same stored by the threads, TMA epilogue, elementwise epilogue.
enum class Sm90Finish { kPlain, kInRegisters, kUnaligned, kTma, kElementwise };

inline Sm90Finish sm90_finish(const GemmRequest& r, const GemmTile& t, bool swap) {
  if (swap || !r.row_output || (r.out_bytes > 2 && t.n % 64 != 0)) return Sm90Finish::kElementwise;
  if (!r.in_registers) return r.tma_epilogue ? Sm90Finish::kTma : Sm90Finish::kElementwise;
  if (!r.tma_output) return Sm90Finish::kUnaligned;
  return r.plain ? Sm90Finish::kPlain : Sm90Finish::kInRegisters;
}

/// A consumer's warp between two tiles, per tile and per accumulator of a thread (with swiglu two make an element of
/// C): the instructions it issues, and the cycles in which a lone warp issues nothing, since the next instruction needs
/// the results of the ones before.
struct Sm90Epilogue {
  struct Part {
    double tile, sum;
    double of(double sums) const { return tile + sum * sums; }
  };
  Part instructions, idle;

  double lone_cycles(double sums) const { return instructions.of(sums) + idle.of(sums); }
};

/// Instructions per accumulator of stores by the threads: a fixed part per row of a warp's 16, and a part per word of
/// the row that a lane stores.
inline double sm90_word_instructions(bool as_float, const GemmTile& t) {
  const int columns = as_float ? 64 : gemm_sm90_stage_columns(t.n);
  const double words = whole(columns * (as_float ? 4 : 2) / 4, 32), sums = columns / 2;
  return 16 * (as_float ? 10 + 5 * words : 16 + 8 * words) / sums;
}

/// Counted in the machine code (tests/build/test_epilogue_instructions.py).
inline Sm90Epilogue sm90_epilogue(const GemmRequest& q, Sm90Finish finish, const GemmTile& t) {
  const double rows = t.n % 64 == 0 ? 0 : 2.6;  // without full boxes the threads store the rows
  const double activation = activation_instructions(q), of_element = halves_columns(q) ? 2 : 1;
  const bool residual = !q.backward && q.side_bytes > (q.keeps_z ? q.out_bytes : 0);
  switch (finish) {
    case Sm90Finish::kPlain:
      return {{75, 0.9 + rows}, {210, 1.1}};
    case Sm90Finish::kInRegisters:
      return {{85, 2.7 + rows}, {290, 1.6}};
    case Sm90Finish::kUnaligned:
      return {{80, 2 + sm90_word_instructions(q.out_bytes > 2, t)}, {200, 8}};
    case Sm90Finish::kTma: {
      const double chunks = 32 * whole(t.n, 32) / t.n;  // the last chunk of 32 columns may be partial
      const double element = 7 + activation + (residual ? 2 : 0);
      return {{q.keeps_z ? 145.0 : 120.0,
               chunks * (element / of_element + (q.column_sums ? 3.9 : 0)) + (q.keeps_z ? 3.1 + rows : 0)},
              {q.keeps_z ? 600.0 : 400.0, chunks * (12 + (q.column_sums ? 5 : 0))}};
    }
    case Sm90Finish::kElementwise: {
      const int others = q.keeps_z + (q.backward || residual);
      const double sum = (72 + 26 * others + activation) / of_element + (q.column_sums ? 7.5 : 0);
      return {{80, sum}, {300, 3.3 * sum}};
    }
  }
  return {};
}

/// Elements of the operands that gemm_sm90 cannot read directly.
inline double unaligned_elements(const GemmRequest& r) {
  return r.batch * static_cast<double>(r.k) * ((r.tma_a ? 0 : r.m) + (r.tma_b ? 0.0 : r.n));
}
/// Microseconds of gemm_repack, which copies them.
inline double repack_time(const GemmRequest& r, const GemmRates& rates) {
  return r.tma_operands() ? 0 : rates.start / rates.clock + 4 * unaligned_elements(r) / rates.dram;
}

/// Request for a product's phases (gemm_in_phases).
inline GemmRequest in_phases(const GemmRequest& request) {
  GemmRequest r = request;
  r.m = request.phases.rows(request.m), r.n = request.phases.columns(request.n), r.k = request.phases.lines(request.k);
  r.batch = request.phases.count;
  r.tma_a = r.tma_b = r.tma_output = r.row_output = r.plain = true;
  r.rows_a = r.rows_b = GemmRows::kLines;
  r.odd_operands = false;
  r.out_bytes = 4;
  return r;
}
/// Microseconds of gemm_add_phases.
inline double add_phases_time(const GemmRequest& r, const GemmRates& rates) {
  const double bytes = 4.0 * r.phases.size(r.m, r.n) + static_cast<double>(r.m) * r.n * r.out_bytes;
  return rates.start / rates.clock + bytes / rates.dram;
}

/// Bytes per cycle that an SM's own loads get from L2 while a share of the SMs is busy. Rows across lines were measured
/// on an H200 in tiles of 128 x 128 with pingpong: 4096x4096x4096 takes 1.40 times as long with rows of 8,208 bytes as
/// with 8,192, and 23328x1152x4304, with rows of 8,608, 1.19 times as long as whole lines would.
inline double load_rate(GemmRows rows, const GemmRates& rate, double busy) {
  return rows == GemmRows::kLines ? rate.l2 : std::min(rate.l2, (rows == GemmRows::kSectors ? 42 : 30) / busy);
}

/// Cycles of a k step of gemm_sm90.
inline double sm90_step(const GemmRequest& r, const GemmTile& t, const GemmRates& rate, double busy,
                        bool swap = false) {
  const double wgmma = 4 * (t.m / 64) * std::max(t.n / 2.0, 16 + t.n / 4.0);
  const double loads = (t.m + t.n) * 128 / rate.l2;  // out of bounds TMA writes zeros at the same rate
  const double own_m = 128.0 * t.m / t.cluster_n, own_n = 128.0 * t.n / t.cluster_m;  // the rest is multicast to it
  const double own = own_m / load_rate(swap ? r.rows_b : r.rows_a, rate, busy) +
                     own_n / load_rate(swap ? r.rows_a : r.rows_b, rate, busy);
  return std::max({wgmma, loads, own}) + t.consumers * rate.hand_over;
}
/// Cycles in which the consumers of a tile work on `sums` accumulators between two main loops. The warps of a
/// scheduler, one per group of four, fill each other's idle cycles.
inline double sm90_between(const Sm90Epilogue& warp, double sums, const GemmTile& t) {
  const double groups = t.pingpong ? 1 : t.consumers, of_warp = sums / 128 / groups;
  const double alone = warp.lone_cycles(of_warp) * (t.pingpong ? kDuringProducts : 1);
  return std::max(alone, groups * warp.instructions.of(of_warp) / kIssue);
}
/// Cycles from the last wgmma of a tile with `sums` accumulators to the next tile.
inline double sm90_finish_cycles(const GemmRequest& r, Sm90Finish finish, double sums, const GemmTile& t,
                                 const GemmRates& rate) {
  return rate.turn + (finish == Sm90Finish::kPlain ? 0 : kOperand) + sm90_between(sm90_epilogue(r, finish, t), sums, t);
}
/// Cycles of waves of tiles.
inline double sm90_waves(double rounds, double product, double epilogue, const GemmTile& t) {
  return t.pingpong ? rounds * std::max(product, (product + epilogue) / 2) + epilogue : rounds * (product + epilogue);
}

/// Microseconds of a product with a tile of gemm_sm90; kNever if it is not worth considering.
inline double sm90_time(const GemmRequest& r, const GemmChip& chip, const GemmTile& t, int splits, bool swap) {
  const GemmRates& rate = chip.rates;
  const int m = swap ? r.n : r.m, n = swap ? r.m : r.n;
  const bool halved = halves_columns(r);
  const double columns = halved ? n / 2 : n, tile_columns = halved ? t.n / 2 : t.n;
  const double cluster = t.cluster_m * t.cluster_n;
  const double clusters_m = whole(m, t.m * t.cluster_m), clusters_n = whole(columns, tile_columns * t.cluster_n);
  const double works = r.batch * clusters_m * clusters_n * splits;
  const double rounds = whole(works, std::max(1.0, std::floor(chip.sm_count / cluster)));
  if (splits > 1 && works > 2 * splits * chip.sm_count / cluster) return kNever;  // whole tiles already fill the chip
  const double busy = std::min(1.0, works * cluster / chip.sm_count);
  const double product = whole(whole(r.k, 64), splits) * sm90_step(r, t, rate, busy, swap);

  const Sm90Finish finish = sm90_finish(r, t, swap);
  const double sums = finish >= Sm90Finish::kTma  // only these skip columns out of bounds
                          ? std::min<double>(t.m, m) * std::min(tile_columns, columns) * (halved ? 2 : 1)
                          : t.m * t.n;
  const double epilogue =
      sm90_finish_cycles(r, finish, sums, t, rate) + (r.chained ? kOperand + t.m * t.n * 4.0 / rate.l2 : 0);
  double outside = rate.start;
  // Parts are written to memory, and the last to arrive reads them.
  if (splits > 1) outside += rounds * (2 * rate.start + t.m * t.n * 4.0 * (splits + 1) / rate.l2);
  const double cycles = sm90_waves(rounds, product, epilogue, t);
  return outside / rate.clock +
         side_by_side(under_power(cycles / rate.clock, multiply_adds_of(r), rate),
                      memory_time(r, rate, swap ? clusters_n : clusters_m, swap ? clusters_m : clusters_n));
}

/// Microseconds of gemm_sm90_grouped for groups of these numbers of rows, of which `r` tells n and k. Tiles go to the
/// SMs in turn, and a group's last one may be half a tile. A group's matrix, which few tiles share, is read once.
inline double grouped_sm90_time(const GemmRequest& r, const GemmChip& chip, const std::vector<int>& sizes) {
  constexpr int kRows = kGemmSm90GroupTile;
  const GemmRates& rate = chip.rates;
  const auto finish = [&](const GemmTile& t) {
    return sm90_finish_cycles(r, sm90_finish(r, t, false), t.m * t.n, t, rate);
  };
  const auto cycles = [&](const GemmTile& t) {
    return sm90_waves(1, whole(r.k, 64) * sm90_step(r, t, rate, 1), finish(t), t) - finish(t);
  };
  const GemmTile tile{kRows, kRows, 1, 1, 2, true}, half{kRows / 2, kRows, 1, 1, 2, true};
  const double of_tile = cycles(tile), of_half = cycles(half);
  const int line_length = static_cast<int>(whole(halves_columns(r) ? r.n / 2 : r.n, halves_columns(r) ? 64 : kRows));
  std::vector<double> busy(static_cast<size_t>(chip.sm_count));
  double memory = 0, multiply_adds = 0;
  size_t next = 0;
  for (const int size : sizes) {
    GemmRequest group = r;
    group.m = static_cast<int>(whole(size, 64)) * 64;  // loaded and multiplied
    const int lines = static_cast<int>(whole(size, kRows));
    if (lines > 0) memory += memory_time(group, rate, 1, line_length);
    multiply_adds += multiply_adds_of(group);
    for (int i = 0; i < lines * line_length; i++) {
      const bool is_half = place_in_group(i, lines, line_length).line == lines - 1 && group.m % kRows != 0;
      busy[next++ % busy.size()] += is_half ? of_half : of_tile;
    }
  }
  const double product = *std::max_element(busy.begin(), busy.end()) + finish(tile);
  return rate.start / rate.clock + side_by_side(under_power(product / rate.clock, multiply_adds, rate), memory);
}

/// Microseconds of a symmetric product with a tile of gemm_sm90: a consumer's warp stores its sums twice.
inline double symmetric_sm90_time(const GemmRequest& r, const GemmChip& chip, const GemmTile& t) {
  constexpr Sm90Epilogue kStore{{100, 3.0}, {500, 4.0}};
  const GemmRates& rate = chip.rates;
  const double works = r.batch * static_cast<double>(gemm_sm90_triangle_tiles(t, r.n));
  const double rounds = whole(works, chip.sm_count);
  const double product = whole(r.k, 64) * sm90_step(r, t, rate, std::min(1.0, works / chip.sm_count));
  const double epilogue = rate.turn + (r.side_bytes ? 4 * kOperand : 0) + sm90_between(kStore, t.m * t.n, t);
  const double cycles = sm90_waves(rounds, product, epilogue, t);
  const double computed = r.batch * (r.n + std::min<double>(t.m, r.n)) / 2 * r.n * r.k;  // below the strips' right ends
  const double bytes =
      2.0 * r.n * r.k * (1 + rate.crossing) + static_cast<double>(r.n) * r.n * (2 + r.side_bytes / 2.0);
  return rate.start / rate.clock +
         side_by_side(under_power(cycles / rate.clock, computed, rate), r.batch * bytes / rate.dram);
}

struct Sm80TileCost {
  int m, n, resident;  // resident: blocks per SM
};
/// Indexed by GemmSm80Tile.
inline constexpr Sm80TileCost kSm80Tiles[] = {{128, 256, 1}, {128, 128, 2}, {64, 64, 4}};

/// Microseconds of a product with a tile of gemm_sm80.
inline double sm80_time(const GemmRequest& r, const GemmChip& chip, const Sm80TileCost& t, int splits) {
  constexpr double kL2Bytes = 32, kStoreBytes = 16, kFill = 2000;
  const double multiply_adds =  // per cycle
      chip.capability == 90   ? 1270
      : chip.capability == 80 ? 1024
      : chip.geforce          ? 256
                              : 512;
  const bool halved = halves_columns(r);
  const double columns = halved ? r.n / 2 : r.n, tile_columns = halved ? t.n / 2 : t.n;
  const double tiles_m = whole(r.m, t.m), tiles_n = whole(columns, tile_columns);
  const double works = r.batch * (r.symmetric ? tiles_m * (tiles_m + 1) / 2 : tiles_m * tiles_n) * splits;
  const double rounds = whole(works, static_cast<double>(chip.sm_count) * t.resident);
  const double together = std::min<double>(t.resident, whole(works, chip.sm_count));
  const double depth = whole(whole(r.k, 64), splits) * 64;
  const double loads = (t.m + t.n) * 2.0 / kL2Bytes * (r.tma_operands() ? 1 : r.odd_operands ? 2.5 : 1.5);
  const double elements = t.m * tile_columns;
  double finish = std::max(elements * (r.out_bytes + r.side_bytes) / kStoreBytes,
                           elements * ((r.side_bytes ? 8 : 4) + activation_instructions(r)) / 128);
  if (splits > 1) finish += elements * 4 / kStoreBytes + splits * elements * 4 / kL2Bytes / 2;
  const double cycles = rounds * (kFill + together * (depth * std::max(t.m * t.n / multiply_adds, loads) + finish));
  const double outside = splits > 1 ? 2 * chip.rates.start : 0;
  return outside / chip.rates.clock +
         side_by_side(under_power(cycles / chip.rates.clock, multiply_adds_of(r), chip.rates),
                      memory_time(r, chip.rates, tiles_m, tiles_n));
}

}  // namespace detail
}  // namespace ak

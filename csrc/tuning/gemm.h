// Which GEMM kernel, tile and split of k serves a problem: a pure function of shape, layout and GPU, on the host.
//
// Nothing is timed when a program runs: a result would then depend on noise. The candidates stand in kGemmTiles
// (kernels/gemm_sm90.h) and kGemmSm80Tiles, a reason beside each; a model of the work ranks them. It counts what a tile
// costs one multiprocessor, in cycles, from rates of the data sheet: wgmma reads 128 bytes of shared memory a cycle and
// makes 2,048 multiply-adds, so instructions narrower than 64 columns starve (measured by arXiv:2402.13499: 63 % at 32
// columns, 38 % at 16; the formula below gives 67 and 40). Ties go to the first row of a table.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/gemm_sm80.h"
#include "kernels/gemm_sm90.h"

namespace ak {

/// The GPU, and what was compiled for it.
struct GemmChip {
  int sm_count = 132;
  int capability = 90;  ///< 10 major + minor
  bool sm90 = true, sm80 = true;
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
};

enum class GemmKernel { kNone, kSm80, kSm90 };

struct GemmPlan {
  GemmKernel kernel = GemmKernel::kNone;
  int tile = 0;  ///< number in the table of the kernel
  int splits = 1;
  bool swapped = false;
};

namespace detail {

constexpr double kNever = 1e300;

inline double whole(double x, double y) {
  return static_cast<double>((static_cast<int64_t>(x) + static_cast<int64_t>(y) - 1) / static_cast<int64_t>(y));
}

inline bool halves_columns(const GemmRequest& q) { return q.activation == Activation::swiglu && !q.backward; }

/// Instructions per element of C that an activation takes, or its derivative, as nvcc compiles csrc/math.
inline double activation_instructions(const GemmRequest& q) {
  switch (q.activation) {
    case Activation::none:
      return 0;
    case Activation::relu:
      return 2;
    case Activation::gelu:
      return 57;
    case Activation::gelu_tanh:
      return 56;
    case Activation::silu:
      return 51;
    case Activation::swiglu:
      return q.backward ? 67 : 56;
  }
  return 0;
}

/// Instructions per element of C between the last wgmma of a tile and the next tile, in a consumer of gemm_sm90;
/// counted in its machine code (tests/build/test_epilogue_instructions.py). `in_registers`: nothing is done to a sum,
/// or alpha or a bias.
inline double sm90_epilogue_instructions(const GemmRequest& q, bool in_registers) {
  if (in_registers) return q.plain ? 1.2 : 4;
  return 12.5 + (q.side_bytes ? 1.5 : 0) + (q.column_sums ? 7.5 : 0) + activation_instructions(q);
}

/// Cycles until the last tile is stored, for one of the wgmma kernel's tiles.
inline double sm90_cycles(const GemmRequest& r, const GemmChip& chip, const GemmTile& t, int splits, bool swap) {
  constexpr double kL2Bytes = 50, kStoreBytes = 16, kFill = 1500, kBarriers = 400;
  constexpr double kOneGroup = 0.6;  // of the instructions four warps issue that one alone, of four schedulers, can
  const int m = swap ? r.n : r.m, n = swap ? r.m : r.n;
  const bool halved = halves_columns(r), direct = !r.tma_output || swap || (r.out_bytes == 4 && t.n % 64 != 0);
  const double columns = halved ? n / 2 : n, tile_columns = halved ? t.n / 2 : t.n;
  const double cluster = t.cluster_m * t.cluster_n;
  const double works = r.batch * whole(m, t.m * t.cluster_m) * whole(columns, tile_columns * t.cluster_n) * splits;
  const double waves = whole(works, std::max(1.0, std::floor(chip.sm_count / cluster)));
  if (splits > 1 && works > 2 * splits * chip.sm_count / cluster) return kNever;  // whole tiles fill the chip
  const double steps = whole(whole(r.k, 64), splits);

  const double products = 4 * (t.m / 64) * std::max(t.n / 2.0, 16 + t.n / 4.0);
  const double loads = (t.m / t.cluster_n + t.n / t.cluster_m) * 128.0 / kL2Bytes;
  const double issued =
      t.consumers == 1 ? products / 0.9 : products;  // one group cannot always have the next wgmma ready
  // What is not the limit costs as well: the two get into each other's way, and traffic takes power from the products.
  const double product = steps * (std::max(issued, loads) + 0.15 * std::min(issued, loads));

  const double elements = t.m * tile_columns;
  const double bytes = elements * (r.out_bytes * (direct ? 2 : 1) + r.side_bytes);
  const double instructions = elements * sm90_epilogue_instructions(r, r.in_registers && !direct) / 128 /
                              (t.pingpong || t.consumers == 1 ? kOneGroup : 1);
  double finish = std::max(bytes / kStoreBytes, instructions) + kBarriers;
  if (splits > 1) finish += elements * 4 / kStoreBytes + splits * elements * 4 / kL2Bytes / 2 + kFill;
  const double tile = t.pingpong ? std::max(product, (product + finish) / 2) : product + finish;
  return kFill + waves * tile + (t.pingpong ? finish : 0);
}

inline bool sm90_takes(const GemmRequest& r, const GemmTile& t, bool swap) {
  const bool swiglu = r.activation == Activation::swiglu;
  if (!r.tma_operands || (swap && (swiglu || r.column_sums))) return false;
  const bool in_registers = r.in_registers && r.tma_output && !swap && (r.out_bytes == 2 || t.n % 64 == 0);
  if (!in_registers && !gemm_sm90_takes_epilogue(t)) return false;
  const bool n_major_b = swap ? r.m_major_a : r.n_major_b;
  if (n_major_b && t.n / t.cluster_m % 64 != 0) return false;
  return !halves_columns(r) || (t.n % 128 == 0 && !(n_major_b && r.n % 16 != 0));
}

struct Sm80TileCost {
  int m, n, resident;  // blocks that share a multiprocessor
};
/// By the number of the tile.
inline constexpr Sm80TileCost kSm80Tiles[] = {{128, 256, 1}, {128, 128, 2}, {64, 64, 4}};

/// The same for a tile of the mma.sync kernel.
inline double sm80_cycles(const GemmRequest& r, const GemmChip& chip, const Sm80TileCost& t, int splits) {
  constexpr double kL2Bytes = 32, kStoreBytes = 16, kFill = 2000;
  const double rate = chip.capability == 90 ? 1270 : chip.capability == 80 ? 1024 : 512;  // multiply-adds a cycle
  const bool halved = halves_columns(r);
  const double columns = halved ? r.n / 2 : r.n, tile_columns = halved ? t.n / 2 : t.n;
  const double works = r.batch * whole(r.m, t.m) * whole(columns, tile_columns) * splits;
  const double waves = whole(works, static_cast<double>(chip.sm_count) * t.resident);
  const double together = std::min<double>(t.resident, whole(works, chip.sm_count));
  const double depth = whole(whole(r.k, 64), splits) * 64;
  const double loads = (t.m + t.n) * 2.0 / kL2Bytes * (r.tma_operands ? 1 : r.odd_operands ? 2.5 : 1.5);
  const double elements = t.m * tile_columns;
  double finish = std::max(elements * (r.out_bytes + r.side_bytes) / kStoreBytes,
                           elements * ((r.side_bytes ? 8 : 4) + activation_instructions(r)) / 128);
  if (splits > 1) finish += elements * 4 / kStoreBytes + splits * elements * 4 / kL2Bytes / 2;
  return waves * (kFill + together * (depth * std::max(t.m * t.n / rate, loads) + finish));
}

}  // namespace detail

/// The plan for one call; kernel is kNone if no kernel of the build runs on the chip.
inline GemmPlan plan_gemm(const GemmRequest& request, const GemmChip& chip) {
  GemmRequest r = request;
  if (r.batch_invariant) {  // a row's result must not depend on how many there are: any fixed number will do
    r.m = 4096;
    r.batch = 1;
  }
  constexpr int kSplits[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
  constexpr int kLeastSteps = 4;  // of k a split: fewer would be all fill
  const int steps = (r.k + 63) / 64;
  GemmPlan best;
  double least = detail::kNever;
  const auto consider = [&](GemmKernel kernel, int tile, int splits, bool swap, double cycles) {
    if (cycles >= least) return;
    least = cycles;
    best = {kernel, tile, splits, swap};
  };
  const auto each_split = [&](auto f) {
    for (int splits : kSplits) {
      if (splits > 1 && (r.batch_invariant || steps / splits < kLeastSteps)) break;
      f(splits);
    }
  };
  if (chip.sm90 && chip.capability == 90) {
    for (int i = 0; i < kGemmTileCount; i++) {
      for (bool swap : {false, true}) {
        if (swap && (r.batch_invariant || r.m > 64)) continue;  // for few rows: C then leaves element by element
        if (!detail::sm90_takes(r, kGemmTiles[i], swap)) continue;
        each_split([&](int splits) {
          consider(GemmKernel::kSm90, i, splits, swap, detail::sm90_cycles(r, chip, kGemmTiles[i], splits, swap));
        });
      }
    }
    if (best.kernel != GemmKernel::kNone) return best;
  }
  if (chip.sm80 && chip.capability >= 80) {
    for (GemmSm80Tile tile : kGemmSm80Tiles) {
      const int i = static_cast<int>(tile);
      each_split([&](int splits) {
        consider(GemmKernel::kSm80, i, splits, false, detail::sm80_cycles(r, chip, detail::kSm80Tiles[i], splits));
      });
    }
  }
  return best;
}

/// What plan_gemm asks of a problem. `half`: the type of A and B.
inline GemmRequest request_of(const GemmProblem& q, GemmOutput output, DType half, bool batch_invariant) {
  const GemmEpilogue& e = q.epilogue;
  const auto bits = [&](const void* p, int64_t ld, int64_t batch_stride) {
    return reinterpret_cast<uintptr_t>(p) | static_cast<uint64_t>(ld * 2) |
           static_cast<uint64_t>(q.batch > 1 ? batch_stride * 2 : 0);
  };
  const uint64_t operands = bits(q.a, q.ld_a, q.batch_stride_a) | bits(q.b, q.ld_b, q.batch_stride_b);
  GemmRequest r;
  r.m = q.m, r.n = q.n, r.k = q.k, r.batch = q.batch;
  r.m_major_a = q.m_major_a, r.n_major_b = q.n_major_b;
  // A single row has no distance to the next one and any alignment; batch_invariant goes by what many would have.
  r.tma_operands = operands % 16 == 0 && (!batch_invariant || q.k % 8 == 0);
  r.odd_operands = operands % 4 != 0;
  r.tma_output = gemm_sm90_tma_writes(q, output == GemmOutput::kInputType ? half : DType::kFloat32);
  r.out_bytes = output == GemmOutput::kAccumulate ? 8 : bytes_of(q.c.type);
  for (const GemmValues* v : {&e.residual, &e.z, &e.preact}) {
    if (v->data) r.side_bytes += bytes_of(v->type);
  }
  r.activation = e.activation;
  r.plain = is_plain(e);
  r.in_registers = gemm_sm90_in_registers(q, half);
  r.backward = e.preact.data != nullptr;
  r.column_sums = e.column_sums != nullptr;
  r.batch_invariant = batch_invariant;
  return r;
}

}  // namespace ak

// Selects the GEMM kernel, tile and split of k: a pure function of shape, layout and GPU, on the host.
//
// Nothing is timed at run time, since results would then depend on noise; a profile of `tune` may name the plan of a
// product. The candidates are kGemmTiles
// (gemm/sm90/gemm.h) and kGemmSm80Tiles; the model of gemm/cost.h ranks them. Ties go to the first row of a table.
#pragma once
#include <optional>

#include "device/memo.h"
#include "gemm/cost.h"
#include "gemm/sm90/repack.h"

namespace ak {

enum class GemmKernel { kNone, kSm80, kSm90 };

/// A kernel's tile and split of k, as a profile of `tune` names them; kNone: the planner's.
struct GemmChoice {
  GemmKernel kernel = GemmKernel::kNone;
  int tile = 0;
  int splits = 1;
  bool swapped = false;

  bool operator==(const GemmChoice&) const = default;
};

/// A product as a profile knows it: not the addresses of its tensors.
struct GemmKey {
  int m, n, k, batch;
  bool m_major_a, n_major_b;
  int out_bytes;  ///< as in GemmRequest
  Activation activation;
  bool bias, residual, keeps_z, backward, column_sums;

  auto operator<=>(const GemmKey&) const = default;
};

struct GemmPlan {
  GemmKernel kernel = GemmKernel::kNone;
  int tile = 0;  ///< index in the kernel's table; of a symmetric product on sm_90, in kGemmTriangles
  int splits = 1;
  bool swapped = false;
  bool repacked = false;    ///< run gemm_repack first, for operands that gemm_sm90 cannot read
  GemmPhases phases;        ///< if any: run gemm_in_phases, then gemm_add_phases
  double microseconds = 0;  ///< predicted by the model

  /// The operands as they are laid out, in one launch.
  bool is(const GemmChoice& c) const {
    return !repacked && phases.count == 0 && GemmChoice{kernel, tile, splits, swapped} == c;
  }
};

namespace detail {

// Predicted advantage that a split must have: there are many candidate splits, and the most optimistic of many errors
// would win.
constexpr double kSplitDoubt = 1.06;

inline bool sm90_takes(const GemmRequest& r, const GemmTile& t, bool swap) {
  const bool swiglu = r.activation == Activation::swiglu;
  if (swap && (swiglu || r.column_sums || r.chained)) return false;
  if (r.chained && !gemm_sm90_chains(t)) return false;
  if (sm90_finish(r, t, swap) >= Sm90Finish::kTma && !gemm_sm90_takes_epilogue(t)) return false;
  const bool n_major_b = swap ? r.m_major_a : r.n_major_b;
  if (!gemm_sm90_takes_layout(t, swap ? r.n_major_b : r.m_major_a, n_major_b)) return false;
  return !halves_columns(r) || (t.n % 128 == 0 && !(n_major_b && r.n % 16 != 0));
}

/// K of a symmetric product is not split. Its bits are those of any tile, so the tile may suit the batch.
inline GemmPlan plan_symmetric(const GemmRequest& r, const GemmChip& chip) {
  GemmPlan best;
  if (chip.sm90 && chip.capability == 90) {
    best = {.kernel = GemmKernel::kSm90, .repacked = !r.tma_operands(), .microseconds = kNever};
    for (int i = 0; i < kGemmTriangleCount; i++) {
      if (!gemm_sm90_takes_layout(kGemmTriangles[i], r.m_major_a, r.n_major_b)) continue;
      const double time = repack_time(r, chip.rates) + symmetric_sm90_time(r, chip, kGemmTriangles[i]);
      if (time < best.microseconds) best.tile = i, best.microseconds = time;
    }
    return best;
  }
  if (!chip.sm80 || chip.capability < 80) return best;
  best = {.kernel = GemmKernel::kSm80, .microseconds = kNever};
  for (GemmSm80Tile tile : {GemmSm80Tile::k128x128, GemmSm80Tile::k64x64}) {
    const int i = static_cast<int>(tile);
    const double time = sm80_time(r, chip, kSm80Tiles[i], 1);
    if (time < best.microseconds) best.tile = i, best.microseconds = time;
  }
  return best;
}

}  // namespace detail

/// The plan for one call; kernel is kNone if no kernel of the build runs on the chip.
///
/// batch_invariant: an element's sum over k is one chain in any tile, swapped or not, in any cluster, so the tile may
/// suit the number of rows. The kernel may not: the instructions of gemm_sm90 and gemm_sm80 group k differently.
///
/// see(plan) is called for each plan that would serve, but for symmetric products.
template <class See>
GemmPlan plan_gemm(const GemmRequest& r, const GemmChip& chip, const See& see) {
  if (r.symmetric) return detail::plan_symmetric(r, chip);
  constexpr int kSplits[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
  constexpr int kLeastSteps = 4;  // k steps per split: fewer would only fill the pipeline
  GemmPlan best;
  double least = detail::kNever;
  const auto consider = [&](const GemmPlan& plan) {
    see(plan);
    const double doubted = plan.microseconds * (plan.splits > 1 ? detail::kSplitDoubt : 1);
    if (doubted >= least) return;
    least = doubted;
    best = plan;
  };
  const auto each_split = [&](int k, auto f) {
    for (int splits : kSplits) {
      if (splits > 1 && (r.batch_invariant || (k + 63) / 64 / splits < kLeastSteps)) break;
      f(splits);
    }
  };
  // `extra`: microseconds of the kernels before or after it.
  const auto consider_sm90 = [&](const GemmRequest& q, double extra, GemmPhases phases = {}) {
    if (!chip.sm90 || chip.capability != 90) return;
    for (int i = 0; i < kGemmTileCount; i++) {
      for (bool swap : {false, true}) {
        if (swap && q.m > 64) continue;  // for few rows: its epilogue is elementwise
        if (!detail::sm90_takes(q, kGemmTiles[i], swap)) continue;
        each_split(q.k, [&](int splits) {
          const double time = extra + detail::sm90_time(q, chip, kGemmTiles[i], splits, swap);
          consider({GemmKernel::kSm90, i, splits, swap, !q.tma_operands(), phases, time});
        });
      }
    }
  };
  const auto consider_sm80 = [&](const GemmRequest& q, double extra, GemmPhases phases = {}) {
    if (!chip.sm80 || chip.capability < 80) return;
    for (GemmSm80Tile tile : kGemmSm80Tiles) {
      const int i = static_cast<int>(tile);
      if (q.chained && !gemm_sm80_chains(tile)) continue;
      each_split(q.k, [&](int splits) {
        const double time = extra + detail::sm80_time(q, chip, detail::kSm80Tiles[i], splits);
        consider({GemmKernel::kSm80, i, splits, false, false, phases, time});
      });
    }
  };
  consider_sm90(r, detail::repack_time(r, chip.rates));
  if (best.kernel != GemmKernel::kNone && (r.tma_operands() || r.batch_invariant)) return best;
  consider_sm80(r, 0);
  // Phases are not worth it if their results need more memory than copies of the operands.
  const bool small = 4 * r.phases.size(r.m, r.n) <= 2 * detail::unaligned_elements(r);
  if (r.phases.count > 0 && small && !r.batch_invariant) {
    const double add = detail::add_phases_time(r, chip.rates);
    consider_sm90(detail::in_phases(r), add, r.phases);
    consider_sm80(detail::in_phases(r), add, r.phases);
  }
  return best;
}

inline GemmPlan plan_gemm(const GemmRequest& r, const GemmChip& chip) {
  return plan_gemm(r, chip, [](const GemmPlan&) {});
}

/// The plan that is `wanted`, if it would serve, else plan_gemm's. Memoized per thread.
inline GemmPlan plan_gemm_once(const GemmRequest& request, const GemmChip& chip, const GemmChoice& wanted = {}) {
  struct Key {
    GemmRequest r;
    int sm_count, capability;
    bool sm90;  // false for what gemm_sm90 could not do
    bool geforce;
    GemmChoice wanted;
    bool operator==(const Key&) const = default;
    std::size_t hash() const {
      const bool flags[] = {r.m_major_a,    r.n_major_b,       r.tma_a,   r.tma_b,       r.tma_output, r.row_output,
                            r.odd_operands, r.backward,        r.keeps_z, r.column_sums, r.plain,      r.in_registers,
                            r.tma_epilogue, r.batch_invariant, r.chained, r.symmetric,   sm90};
      unsigned bits = 0;
      for (const bool flag : flags) bits = bits << 1 | flag;
      return hash_of(r.m, r.n, r.k, r.batch, bits, r.out_bytes, r.side_bytes, static_cast<int>(r.activation));
    }
  };
  thread_local Memo<Key, GemmPlan> made(1 << 12);
  const Key key{request, chip.sm_count, chip.capability, chip.sm90, chip.geforce, wanted};
  if (const GemmPlan* known = made.find(key)) return *known;
  std::optional<GemmPlan> found;
  const GemmPlan best = plan_gemm(request, chip, [&](const GemmPlan& p) {
    if (p.is(wanted)) found = p;
  });
  const GemmPlan plan = found.value_or(best);
  made.keep(key, plan);
  return plan;
}

inline GemmKey key_of(const GemmProblem& q) {
  const GemmEpilogue& e = q.epilogue;
  return {.m = q.m,
          .n = q.n,
          .k = q.k,
          .batch = q.batch,
          .m_major_a = q.m_major_a,
          .n_major_b = q.n_major_b,
          .out_bytes = q.accumulate ? 8 : bytes_of(q.c.type),
          .activation = e.activation,
          .bias = e.bias.data != nullptr,
          .residual = e.residual.data != nullptr,
          .keeps_z = e.z.data != nullptr,
          .backward = e.preact.data != nullptr,
          .column_sums = e.column_sums != nullptr};
}

/// Sets where gemm_sm90 finds the rows of A and B: at multiples of so many bytes, or in copies.
inline void set_rows(GemmRequest& r, uint64_t a, uint64_t b) {
  const int of_a = r.m_major_a ? r.m : r.k, of_b = r.n_major_b ? r.n : r.k;
  r.rows_a = gemm_rows(of_a, r.tma_a ? a : 2 * gemm_repack_pitch(of_a));
  r.rows_b = gemm_rows(of_b, r.tma_b ? b : 2 * gemm_repack_pitch(of_b));
}

/// plan_gemm's request for a problem.
inline GemmRequest request_of(const GemmProblem& q) {
  const GemmEpilogue& e = q.epilogue;
  const auto bits = [&](const void* p, int64_t ld, int64_t batch_stride) {
    return reinterpret_cast<uintptr_t>(p) | static_cast<uint64_t>(ld * 2) |
           static_cast<uint64_t>(q.batch > 1 ? batch_stride * 2 : 0);
  };
  const uint64_t a = bits(q.a, q.ld_a, q.batch_stride_a);
  const uint64_t b = bits(q.b, q.ld_b, q.batch_stride_b);
  GemmRequest r;
  r.m = q.m, r.n = q.n, r.k = q.k, r.batch = q.batch;
  r.m_major_a = q.m_major_a, r.n_major_b = q.n_major_b;
  r.tma_a = a % 16 == 0, r.tma_b = b % 16 == 0;
  r.odd_operands = (a | b) % 4 != 0;
  set_rows(r, a, b);
  if (!r.tma_operands()) r.phases = gemm_phases(q);
  r.tma_output = gemm_sm90_tma_writes(q);
  r.row_output = gemm_sm90_has_rows(q);
  r.out_bytes = q.accumulate ? 8 : bytes_of(q.c.type);
  for (const GemmValues* v : {&e.residual, &e.z, &e.preact}) {
    if (v->data) r.side_bytes += bytes_of(v->type);
  }
  r.activation = e.activation;
  r.plain = is_plain(e);
  r.in_registers = gemm_sm90_in_registers(q);
  r.tma_epilogue = gemm_sm90_tma_epilogue(q);
  r.keeps_z = e.z.data != nullptr;
  r.backward = e.preact.data != nullptr;
  r.column_sums = e.column_sums != nullptr;
  r.batch_invariant = q.batch_invariant;
  r.chained = is_chained(q);
  r.symmetric = q.symmetric;
  return r;
}

}  // namespace ak

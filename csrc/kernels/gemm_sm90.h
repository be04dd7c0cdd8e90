// 16-bit matrix product on Hopper's tensor cores, fp32 inside: batched, in all four layouts, without transposing
// copies.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/gemm.h"

namespace ak {

/// A tile configuration that is compiled: its rows and columns, the cluster of blocks that works on neighbouring tiles
/// (2 x 1: they share B; 1 x 2: they share A), and the consumer warpgroups, which share a tile's rows or, pingpong,
/// take tiles in turn.
struct GemmTile {
  int m, n, cluster_m, cluster_n, consumers;
  bool pingpong;
};
/// What fits which shape is for csrc/tuning to say; gemm_sm90_refuses says what is possible.
inline constexpr GemmTile kGemmTiles[] = {
    {128, 256, 2, 1, 2, false},  // large products
    {192, 192, 1, 1, 3, false},  // the same, for the waves; n = 768
    {192, 128, 2, 1, 3, false},  // 66 x 2 of them are one wave on 132 SMs
    {128, 176, 2, 1, 2, false},  // n = 2112
    {128, 144, 2, 1, 2, false},  // n = 576
    {128, 128, 2, 1, 2, false},
    {128, 128, 1, 2, 2, true},  // short k, long epilogues, which hide under the next tile's main loop
    {128, 64, 1, 1, 2, false},
    {64, 128, 1, 1, 1, false},  // few rows, small products
    {64, 128, 2, 1, 1, false},
    {64, 64, 1, 1, 1, false},  // and splits: little to add for the last of many parts
    {64, 32, 1, 1, 1, false},  // few columns; swapped: few rows
    {64, 16, 1, 1, 1, false},
};
inline constexpr int kGemmTileCount = static_cast<int>(sizeof kGemmTiles / sizeof *kGemmTiles);

/// The tile's number in kGemmTiles, or -1.
constexpr int gemm_tile_index(int m, int n, bool pingpong = false) {
  for (int i = 0; i < kGemmTileCount; i++) {
    if (kGemmTiles[i].m == m && kGemmTiles[i].n == n && kGemmTiles[i].pingpong == pingpong) return i;
  }
  return -1;
}

/// Sums that a thread of a consumer holds.
constexpr int gemm_sm90_accumulators(const GemmTile& t) { return t.m / (t.pingpong ? 1 : t.consumers) / 64 * t.n / 2; }

/// Whether a tile takes any epilogue, and a C without rows: beside more sums there are no registers for that.
constexpr bool gemm_sm90_takes_epilogue(const GemmTile& t) {
  return gemm_sm90_accumulators(t) <= (t.consumers == 3 ? 64 : 128);
}

/// Columns of a tile's 16-bit results that are staged at a time: one or two boxes of 64, or all if these do not divide.
constexpr int gemm_sm90_stage_columns(int n) { return n % 128 == 0 ? 128 : n % 64 == 0 ? 64 : n; }

/// Whether C has rows of `type`, whose elements are neighbours.
inline bool gemm_sm90_has_rows(const GemmProblem& q, DType type) { return q.c.type == type && q.c.column_stride == 1; }

/// Whether TMA can write the results of this product's columns, n of them, as `type`: C has aligned rows of it. The
/// last 16 bytes of a row are whole, too, since what a store leaves out of such a chunk may belong to somebody else.
inline bool gemm_sm90_tma_writes(const GemmProblem& q, DType type) {
  const auto aligned = [&](int64_t elements) { return elements * bytes_of(type) % 16 == 0; };
  return gemm_sm90_has_rows(q, type) && reinterpret_cast<uintptr_t>(q.c.data) % 16 == 0 && aligned(q.n) &&
         q.c.row_stride >= 1 && aligned(q.c.row_stride) &&
         (q.batch == 1 || (q.c.batch_stride >= 1 && aligned(q.c.batch_stride)));
}

/// Whether threads load the bias, if there is one, in pairs: it lies along the columns and is of fp32 or of `half`, the
/// type of A and B.
inline bool gemm_sm90_bias_in_pairs(const GemmEpilogue& e, DType half) {
  return !e.bias.data || (e.bias.row_stride == 0 && e.bias.column_stride == 1 &&
                          reinterpret_cast<uintptr_t>(e.bias.data) % (2 * bytes_of(e.bias.type)) == 0 &&
                          (e.bias.type == half || e.bias.type == DType::kFloat32));
}

/// Whether a sum becomes an element of C on its way out of its register, with nothing, alpha or a bias per column;
/// `half` is the type of A and B. All tiles do that, into a C that has rows.
inline bool gemm_sm90_in_registers(const GemmProblem& q, DType half) {
  const GemmEpilogue& e = q.epilogue;
  if (e.activation != Activation::none || e.residual.data || e.z.data || e.preact.data || e.column_sums) return false;
  return !e.bias.data || (e.alpha == 1.0f && gemm_sm90_bias_in_pairs(e, half));
}

/// Whether TMA moves all that the epilogue reads and writes, C and z as `type`; what it does not goes element by
/// element. The layers of a training step are here; addmm and baddbmm are not with an input that is broadcast, or in
/// fp32 beside a C of 16 bits.
inline bool gemm_sm90_in_boxes(const GemmProblem& q, DType half, DType type) {
  const GemmEpilogue& e = q.epilogue;
  const bool gated = e.activation == Activation::swiglu, backward = e.preact.data != nullptr;
  const int columns = columns_of_sums(q);
  const auto aligned = [&](int64_t elements) { return elements >= 1 && elements * bytes_of(type) % 16 == 0; };
  for (const GemmValues* t : {&q.c, &e.residual, &e.z, &e.preact}) {
    if (!t->data) continue;
    if (t->type != type || t->column_stride != 1 || reinterpret_cast<uintptr_t>(t->data) % 16 != 0) return false;
    if (!aligned(columns) || !aligned(t->row_stride)) return false;
    const bool one_for_all = t->batch_stride == 0 && (t == &e.residual || t == &e.preact);
    if (q.batch > 1 && !one_for_all && !aligned(t->batch_stride)) return false;
  }
  if (!gemm_sm90_bias_in_pairs(e, half)) return false;
  // The halves of z, or of the gradients and of what they take, are the matrices of their maps.
  if (gated && (backward || e.z.data) && q.batch > 1) return false;
  // Backward there is usually nothing but `preact`, and no registers for more, nor for it in fp32.
  if (backward && (e.bias.data || e.residual.data || e.z.data || type != half)) return false;
  return !e.z.data || e.alpha == 1.0f || !e.bias.data;  // z leaves as the sums do without an epilogue
}

/// How a product is worked on.
struct GemmSm90Config {
  int tile = 0;          ///< number in kGemmTiles
  int splits = 1;        ///< parts of k that run side by side, for few tiles and long k
  bool swapped = false;  ///< C^T = B^T A^T is computed, for few rows: then n runs along the tile's rows
};

/// The product with rows and columns of C exchanged.
inline GemmProblem swapped(const GemmProblem& q) {
  GemmProblem s = q;
  s.a = q.b, s.b = q.a;
  s.m = q.n, s.n = q.m;
  s.ld_a = q.ld_b, s.ld_b = q.ld_a;
  s.m_major_a = q.n_major_b, s.n_major_b = q.m_major_a;
  s.batch_stride_a = q.batch_stride_b, s.batch_stride_b = q.batch_stride_a;
  GemmEpilogue& e = s.epilogue;
  for (GemmValues* v : {&s.c, &e.bias, &e.residual, &e.z, &e.preact}) {
    const int64_t row_stride = v->row_stride;
    v->row_stride = v->column_stride;
    v->column_stride = row_stride;
  }
  return s;
}

/// Parts of k that have work: k steps of 64 are rounded up in each, so fewer parts may be needed than `splits`.
inline int gemm_sm90_splits(int k, int splits) {
  const int steps = (k + 63) / 64, per_split = (steps + splits - 1) / splits;
  return (steps + per_split - 1) / per_split;
}

/// Tiles of C, in clusters, of one matrix of the batch.
inline int64_t gemm_sm90_clusters(const GemmProblem& q, const GemmTile& t) {
  const bool halved = is_halved(q);
  const int64_t m = t.m * t.cluster_m, n = t.n * t.cluster_n / (halved ? 2 : 1), columns = columns_of_sums(q);
  return (q.m + m - 1) / m * ((columns + n - 1) / n);
}

/// Scratch of a product; nothing is needed without splits.
inline GemmScratchSize gemm_sm90_scratch(const GemmProblem& problem, const GemmSm90Config& config) {
  const int splits = gemm_sm90_splits(problem.k, config.splits);
  if (splits == 1) return {};
  const GemmTile& t = kGemmTiles[config.tile];
  const int64_t tiles =
      gemm_sm90_clusters(config.swapped ? swapped(problem) : problem, t) * t.cluster_m * t.cluster_n * problem.batch;
  return {static_cast<size_t>(tiles * splits * t.m * t.n), static_cast<size_t>(tiles * (t.pingpong ? 1 : t.consumers))};
}

/// Whether TMA can read an operand: its lines and matrices begin at multiples of 16 bytes.
inline bool gemm_sm90_reads(const void* p, int64_t ld, int64_t batch_stride) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && ld >= 1 && ld % 8 == 0 && batch_stride >= 0 &&
         batch_stride % 8 == 0;
}

/// Why this configuration cannot do this problem, or null. C and the operands of the epilogue may lie anywhere: what
/// TMA cannot write goes a slower way.
inline const char* gemm_sm90_refuses(const GemmProblem& problem, const GemmSm90Config& config) {
  if (config.tile < 0 || config.tile >= kGemmTileCount) return "gemm_sm90: there is no such tile";
  if (config.splits < 1) return "gemm_sm90: splits is at least 1";
  const GemmTile& t = kGemmTiles[config.tile];
  if (config.swapped && (problem.epilogue.activation == Activation::swiglu || problem.epilogue.column_sums))
    return "gemm_sm90: swiglu and column sums do not go with rows and columns exchanged";
  const GemmProblem q = config.swapped ? swapped(problem) : problem;
  if (q.m < 1 || q.n < 1 || q.k < 1 || q.batch < 1) return "gemm_sm90: m, n, k and batch are at least 1";
  if (!gemm_sm90_reads(q.a, q.ld_a, q.batch_stride_a) || !gemm_sm90_reads(q.b, q.ld_b, q.batch_stride_b))
    return "gemm_sm90: A, B, and the distances between their rows and matrices are multiples of 16 bytes";
  if (q.n_major_b && t.n / t.cluster_m % 64 != 0)
    return "gemm_sm90: a B that is n-major takes tiles whose n / cluster_m is a multiple of 64";
  if (is_halved(q) && (t.n % 128 != 0 || (q.n_major_b && q.n % 16 != 0)))
    return "gemm_sm90: swiglu takes tiles whose n is a multiple of 128, and halves of an n-major B of multiples of 8";
  if (gemm_sm90_clusters(q, t) * q.batch * config.splits * t.cluster_m * t.cluster_n > INT32_MAX)
    return "gemm_sm90: more tiles than an int counts";
  return nullptr;
}

/// The message of gemm_sm90's Status if the driver makes no tensor map of an operand. Nothing was launched then, and
/// gemm_sm80, which needs none, can do the same product.
inline constexpr const char* kGemmSm90HasNoMap = "gemm_sm90: the CUDA driver made no tensor map of an operand";

/// One product in one launch. `T` is fp16 or bf16, `output` any but kPartials. Reproducible to the bit: the parts of a
/// split product are added in the order of k.
template <class T>
Status gemm_sm90(const GemmProblem& problem, const GemmSm90Config& config, GemmOutput output,
                 const GemmScratch& scratch, Stream stream);

}  // namespace ak

// 16-bit GEMM on Hopper's tensor cores with fp32 accumulation: batched, in all four layouts, without transposing
// copies.
#pragma once
#include <cstddef>
#include <cstdint>

#include "gemm/call.h"

namespace ak {

/// A compiled tile configuration: rows and columns, cluster shape (2 x 1 shares B, 1 x 2 shares A), and consumer
/// warpgroups, which share a tile's rows or, if pingpong, alternate tiles.
struct GemmTile {
  int m, n, cluster_m, cluster_n, consumers;
  bool pingpong;
};
/// gemm/plan.h chooses a tile for a shape; gemm_sm90_refuses() says which are possible.
inline constexpr GemmTile kGemmTiles[] = {
    {128, 256, 2, 1, 2, false},  // large products
    {192, 192, 1, 1, 3, false},  // large products with fewer waves; n = 768
    {192, 128, 2, 1, 3, false},  // 66 clusters of 2 are one wave on 132 SMs
    {192, 128, 1, 2, 3, false},  // n = 256: each row of A is read once
    {128, 176, 2, 1, 2, false},  // n = 2112
    {128, 144, 2, 1, 2, false},  // n = 576
    {128, 128, 1, 2, 2, true},   // short k, long epilogues: they overlap the next tile's main loop
    {128, 64, 1, 1, 2, false},   // n = 64
    {128, 64, 1, 1, 2, true},    // n = 64 with many rows
    {64, 128, 1, 1, 1, false},   // few rows, small products
    {64, 128, 2, 1, 1, false},   // the same, more of them
    {64, 64, 1, 1, 1, false},    // and splits: a small reduction for the last of many parts
    {64, 32, 1, 1, 1, false},    // few columns, or swapped few rows
    {64, 16, 1, 1, 1, false},
};
inline constexpr int kGemmTileCount = static_cast<int>(sizeof kGemmTiles / sizeof *kGemmTiles);

/// Index in kGemmTiles of the first of this size, or -1.
constexpr int gemm_tile_index(int m, int n, bool pingpong = false) {
  for (int i = 0; i < kGemmTileCount; i++) {
    if (kGemmTiles[i].m == m && kGemmTiles[i].n == n && kGemmTiles[i].pingpong == pingpong) return i;
  }
  return -1;
}

/// Accumulators per thread of a consumer.
constexpr int gemm_sm90_accumulators(const GemmTile& t) { return t.m / (t.pingpong ? 1 : t.consumers) / 64 * t.n / 2; }

/// Width of the TMA boxes in which a block loads `lines` rows of A or columns of B that are not k-major: a row of a
/// swizzle pattern of 128 bytes, or of a narrower one that they fill. 0 if they fill none.
constexpr int gemm_sm90_box_width(int lines) { return lines % 64 == 0 ? 64 : lines == 32 || lines == 16 ? lines : 0; }

/// True if a tile takes operands of this layout. A block of a cluster loads its own share of one.
constexpr bool gemm_sm90_takes_layout(const GemmTile& t, bool m_major_a, bool n_major_b) {
  return (!m_major_a || gemm_sm90_box_width(t.m / t.cluster_n) > 0) &&
         (!n_major_b || gemm_sm90_box_width(t.n / t.cluster_m) > 0);
}

/// True if a tile takes any epilogue and any C: with more accumulators there are no registers for that.
constexpr bool gemm_sm90_takes_epilogue(const GemmTile& t) {
  return gemm_sm90_accumulators(t) <= (t.consumers == 3 ? 64 : 128);
}

/// True if there is an instance of the tile whose sums start from C: gemm_sm90_chained.
constexpr bool gemm_sm90_chains(const GemmTile& t) {
  return t.n % 128 == 0 && gemm_sm90_takes_epilogue(t) && gemm_sm90_takes_layout(t, true, true);
}

/// Columns of 16-bit results staged at a time: one or two boxes of 64, or all if n is no multiple of 64.
constexpr int gemm_sm90_stage_columns(int n) { return n % 128 == 0 ? 128 : n % 64 == 0 ? 64 : n; }

/// True if C is row-major, in fp32 or the type of A and B.
inline bool gemm_sm90_has_rows(const GemmProblem& q) {
  return (q.c.type == q.type || q.c.type == DType::kFloat32) && q.c.column_stride == 1;
}

/// True if TMA can write the n columns of this product: C is row-major with aligned rows, and n fills whole chunks of
/// 16 bytes, since TMA clips a store within such a chunk.
inline bool gemm_sm90_tma_writes(const GemmProblem& q) {
  const auto aligned = [&](int64_t elements) { return elements * bytes_of(q.c.type) % 16 == 0; };
  return gemm_sm90_has_rows(q) && reinterpret_cast<uintptr_t>(q.c.data) % 16 == 0 && aligned(q.n) &&
         q.c.row_stride >= 1 && aligned(q.c.row_stride) &&
         (q.batch == 1 || (q.c.batch_stride >= 1 && aligned(q.c.batch_stride)));
}

/// True if threads can load the bias, if any, in pairs: one per column, in fp32 or the type of A and B.
inline bool gemm_sm90_bias_in_pairs(const GemmProblem& q) {
  const GemmValues& bias = q.epilogue.bias;
  return !bias.data || (bias.row_stride == 0 && bias.column_stride == 1 &&
                        reinterpret_cast<uintptr_t>(bias.data) % (2 * bytes_of(bias.type)) == 0 &&
                        (bias.type == q.type || bias.type == DType::kFloat32));
}

/// True if C can be stored directly from the accumulators: identity, alpha or a bias per column. All tiles do this into
/// a row-major C.
inline bool gemm_sm90_in_registers(const GemmProblem& q) {
  const GemmEpilogue& e = q.epilogue;
  if (e.activation != Activation::none || e.residual.data || e.z.data || e.preact.data || e.column_sums) return false;
  return !e.bias.data || (e.alpha == 1.0f && gemm_sm90_bias_in_pairs(q));
}

/// True if TMA can move every operand of the epilogue, C and z in the type of C; otherwise the epilogue is elementwise.
/// The layers of a training step qualify. addmm and baddbmm with a broadcast input, or an fp32 input and a 16-bit C, do
/// not.
inline bool gemm_sm90_tma_epilogue(const GemmProblem& q) {
  if (!gemm_sm90_has_rows(q)) return false;
  const DType type = q.c.type;
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
  if (!gemm_sm90_bias_in_pairs(q)) return false;
  // The matrices of a map are the halves of z or of the gradients, so there is no dimension left for a batch.
  if (gated && (backward || e.z.data) && q.batch > 1) return false;
  // Backward has registers for `preact` in 16 bits and nothing else.
  if (backward && (e.bias.data || e.residual.data || e.z.data || type != q.type)) return false;
  return !e.z.data || e.alpha == 1.0f || !e.bias.data;  // z is a direct store
}

struct GemmSm90Config {
  int tile = 0;          ///< index in kGemmTiles, or of a symmetric product in kGemmTriangles
  int splits = 1;        ///< parts of k that run in parallel, for few tiles and long k
  bool swapped = false;  ///< computes C^T = B^T A^T, for few rows: n runs along the tile's rows
};

/// The transposed product.
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

/// Number of non-empty parts of k: the 64-wide steps per part are rounded up, so it may be below `splits`.
inline int gemm_sm90_splits(int k, int splits) {
  const int steps = (k + 63) / 64, per_split = (steps + splits - 1) / splits;
  return (steps + per_split - 1) / per_split;
}

/// Clusters' tiles of one matrix of the batch.
inline int64_t gemm_sm90_clusters(const GemmProblem& q, const GemmTile& t) {
  const bool halved = is_halved(q);
  const int64_t m = t.m * t.cluster_m, n = t.n * t.cluster_n / (halved ? 2 : 1), columns = columns_of_sums(q);
  return (q.m + m - 1) / m * ((columns + n - 1) / n);
}

/// Scratch of a product; none without splits.
inline GemmScratchSize gemm_sm90_scratch(const GemmProblem& problem, const GemmSm90Config& config) {
  const int splits = gemm_sm90_splits(problem.k, config.splits);
  if (splits == 1) return {};
  const GemmTile& t = kGemmTiles[config.tile];
  const int64_t tiles =
      gemm_sm90_clusters(config.swapped ? swapped(problem) : problem, t) * t.cluster_m * t.cluster_n * problem.batch;
  return {static_cast<size_t>(tiles * splits * t.m * t.n), static_cast<size_t>(tiles * (t.pingpong ? 1 : t.consumers))};
}

/// True if TMA can read an operand: its lines and matrices begin at multiples of 16 bytes.
inline bool gemm_sm90_reads(const void* p, int64_t ld, int64_t batch_stride) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && ld >= 1 && ld % 8 == 0 && batch_stride >= 0 &&
         batch_stride % 8 == 0;
}

/// True if the matrices of A, if there are several, are such as gemm_sm90 reads. Their tensor maps are passed in place
/// of those of an epilogue on TMA boxes.
inline bool gemm_sm90_takes_segments(const GemmProblem& q) {
  if (!is_segmented(q)) return true;
  if (q.batch != 1 || !gemm_sm90_in_registers(q)) return false;
  int previous = 0;
  for (const GemmSegment& s : q.more_a) {
    if (!s.data) continue;
    if (s.begin <= previous || s.begin >= (q.m_major_a ? q.m : q.k) || s.begin % 64 != 0) return false;
    if (!gemm_sm90_reads(s.data, s.ld, 0)) return false;
    previous = s.begin;
  }
  return true;
}

/// Reason why this configuration cannot run this problem, or null. C and the epilogue's operands may have any
/// alignment; if TMA cannot move them a slower path does.
inline const char* gemm_sm90_refuses(const GemmProblem& problem, const GemmSm90Config& config) {
  if (config.tile < 0 || config.tile >= kGemmTileCount) return "gemm_sm90: there is no such tile";
  if (config.splits < 1) return "gemm_sm90: splits is at least 1";
  const GemmTile& t = kGemmTiles[config.tile];
  if (config.swapped && (problem.epilogue.activation == Activation::swiglu || problem.epilogue.column_sums))
    return "gemm_sm90: swiglu and column sums do not go with rows and columns exchanged";
  if (!gemm_sm90_takes_segments(problem) || (config.swapped && is_segmented(problem)))
    return "gemm_sm90: matrices of A begin at multiples of 64 within A, without an epilogue, a batch or an exchange";
  const GemmProblem q = config.swapped ? swapped(problem) : problem;
  if (q.m < 1 || q.n < 1 || q.k < 1 || q.batch < 1) return "gemm_sm90: m, n, k and batch are at least 1";
  if (!gemm_sm90_reads(q.a, q.ld_a, q.batch_stride_a) || !gemm_sm90_reads(q.b, q.ld_b, q.batch_stride_b))
    return "gemm_sm90: A, B, and the distances between their rows and matrices are multiples of 16 bytes";
  if (!gemm_sm90_takes_layout(t, q.m_major_a, q.n_major_b))
    return "gemm_sm90: an m-major A takes tiles whose m / cluster_n, an n-major B those whose n / cluster_m is 16, 32 "
           "or a multiple of 64";
  if (is_halved(q) && (t.n % 128 != 0 || (q.n_major_b && q.n % 16 != 0)))
    return "gemm_sm90: swiglu takes tiles whose n is a multiple of 128, and halves of an n-major B of multiples of 8";
  if (gemm_sm90_clusters(q, t) * q.batch * config.splits * t.cluster_m * t.cluster_n > INT32_MAX)
    return "gemm_sm90: more tiles than an int counts";
  return nullptr;
}

/// The message of gemm_sm90's Status if the driver makes no tensor map of an operand. Nothing was launched then, and
/// gemm_sm80, which needs none, can do the same product.
inline constexpr const char* kGemmSm90HasNoMap = "gemm_sm90: the CUDA driver made no tensor map of an operand";

/// Tiles of a symmetric product: of each strip of `m` rows, from its first column to its last row's diagonal.
inline constexpr GemmTile kGemmTriangles[] = {
    {128, 128, 1, 1, 2, true},   // large products and batches: the stores overlap the next tile's main loop
    {256, 160, 1, 1, 2, false},  // n = 3072: 130 tiles are one wave on 132 SMs
    {128, 208, 1, 1, 2, false},  // n = 2304 and 3584
    {128, 144, 1, 1, 2, false},  // n = 2048: 128 tiles
    {64, 128, 1, 1, 1, false},   // n = 1280
    {64, 80, 1, 1, 1, false},    // n = 1024: 115 tiles
};
inline constexpr int kGemmTriangleCount = static_cast<int>(sizeof kGemmTriangles / sizeof *kGemmTriangles);

/// Tiles of `m` x `n` in a strip below `strip` others.
AK_HD int gemm_sm90_tiles_of_strip(int m, int n, int strip) { return ((strip + 1) * m + n - 1) / n; }

/// Tiles of a symmetric product of `rows` rows.
inline int64_t gemm_sm90_triangle_tiles(const GemmTile& t, int rows) {
  int64_t tiles = 0;
  for (int strip = 0; strip <= (rows - 1) / t.m; strip++) tiles += gemm_sm90_tiles_of_strip(t.m, t.n, strip);
  return tiles;
}

/// A symmetric product whose C begins at a multiple of 16 bytes, as its rows and matrices do; there may be garbage in C
/// up to the next multiple of 16 bytes of a row. `tile` is an index in kGemmTriangles, and does not change a bit of C.
/// A residual is read in pairs: it is aligned to 4 bytes, and so are its rows and matrices, and a last single column is
/// followed by another element.
template <class T>
Status gemm_sm90_symmetric(const GemmProblem& problem, int tile, Stream stream);

/// A product with is_chained(): the accumulators start from C. A is m-major and B n-major, as in the gradient of a
/// weight; neither splits nor `swapped`.
template <class T>
Status gemm_sm90_chained(const GemmProblem& problem, const GemmSm90Config& config, Stream stream);

/// Rows and columns of a tile of a grouped product.
inline constexpr int kGemmSm90GroupTile = 128;

struct GroupPlace {
  int line, column;
};
/// Place of a group's `index`-th tile, in lines of `line_length`. Eight lines are rasterized together, so that their
/// slices of A and B stay in L2. Each column begins one line later than the one before: a block takes every 132nd tile,
/// and of 3, 4 or 6 lines it would otherwise always take the same, such as the last, whose tiles may be half tiles.
AK_HD GroupPlace place_in_group(int index, int lines, int line_length) {
  constexpr int kRaster = 8;
  const int raster = index / (kRaster * line_length), in_raster = index - raster * (kRaster * line_length);
  const int left = lines - raster * kRaster, together = left < kRaster ? left : kRaster;
  const int column = in_raster / together, down = (in_raster + column) % together;
  return {raster * kRaster + down, column};
}

/// The most tiles that the groups may have: each, and the rows in none, may end with a tile that is not full.
inline int64_t gemm_sm90_group_tiles(const GroupedProblem& p) {
  const auto tiles = [](int x, int by) { return (x + int64_t{by} - 1) / by; };
  const GemmProblem& q = p.product;
  const int64_t rows =
      p.sums ? tiles(q.m, kGemmSm90GroupTile) * p.groups : q.m / kGemmSm90GroupTile + int64_t{p.groups} + 1;
  return rows * tiles(columns_of_sums(q), kGemmSm90GroupTile / (is_halved(q) ? 2 : 1));
}

/// Reason why gemm_sm90_grouped cannot run this problem, or null.
inline const char* gemm_sm90_refuses_groups(const GroupedProblem& p) {
  const GemmProblem& q = p.product;
  const GemmEpilogue& e = q.epilogue;
  if (q.m < 1 || q.n < 1 || q.k < 1 || p.groups < 1) return "gemm_sm90: m, n, k and groups are at least 1";
  if (p.sums ? !q.m_major_a || !q.n_major_b : q.m_major_a)
    return "gemm_sm90: groups of rows take a row-major A, sums over groups an m-major A and an n-major B";
  if (!gemm_sm90_reads(q.a, q.ld_a, 0) || !gemm_sm90_reads(q.b, q.ld_b, p.sums ? 0 : q.batch_stride_b))
    return "gemm_sm90: A, B, and the distances between their rows and matrices are multiples of 16 bytes";
  if (e.alpha != 1.0f || e.residual.data || e.preact.data || e.column_sums || (p.sums && !is_plain(e)))
    return "gemm_sm90: groups of rows take a bias, an activation and z, sums none";
  if (is_halved(q) && q.n_major_b && q.n % 16 != 0)
    return "gemm_sm90: swiglu takes halves of an n-major B of multiples of 8";
  if ((p.sums ? q.k : q.m) > 1 << 30) return "gemm_sm90: groups lie within 2^30 rows or terms";
  if (gemm_sm90_group_tiles(p) > INT32_MAX / 2) return "gemm_sm90: more tiles than an int counts";
  return nullptr;
}

/// A grouped product in one launch. K is not split, so the bits of a group do not depend on the others.
template <class T>
Status gemm_sm90_grouped(const GroupedProblem& problem, Stream stream);

/// One product in one launch. `T` is the type of A and B. Bitwise reproducible: the parts of a
/// split product are added in the order of k.
template <class T>
Status gemm_sm90(const GemmProblem& problem, const GemmSm90Config& config, const GemmScratch& scratch, Stream stream);

}  // namespace ak

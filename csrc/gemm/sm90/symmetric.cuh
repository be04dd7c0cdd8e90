// Symmetric products, and their launch.
//
// Work: n (n + m) k flops with tiles of m rows, of which those above the diagonal are not used, against 2 or 4 n k
// bytes of operands and 2 n^2 of C, which a residual makes 3 n^2. Plan: a lone product takes the tile that fills whole
// waves. Many tiles are squares in turns, so that the mirrored store of one overlaps the main loop of the next; every k
// step needs its 32 KB from L2 in the 512 cycles of its wgmma. K is never split, so the bits of a matrix depend neither
// on the tile nor on the batch. Both operands have the same layout, which halves the instances.
#pragma once
#include "gemm/sm90/gemm.cuh"

namespace ak {
namespace gemm {

template <int kIndex, int kStages>
using Triangle = Tile<kGemmTriangles[kIndex].m, kGemmTriangles[kIndex].n, kStages, 1, kGemmTriangles[kIndex].consumers,
                      kGemmTriangles[kIndex].pingpong, false, true>;
template <int kIndex>
constexpr int triangle_stages() {
  constexpr int kTwo = shared_bytes<false, Triangle<kIndex, 2>>(), kThree = shared_bytes<false, Triangle<kIndex, 3>>();
  return 2 + (kSharedLimit - kTwo) / (kThree - kTwo);
}

inline const char* refuses_symmetric(const GemmProblem& q, int tile) {
  if (tile < 0 || tile >= kGemmTriangleCount) return "gemm_sm90: there is no such tile";
  const GemmEpilogue& e = q.epilogue;
  const auto by = [](int64_t bytes, const GemmValues& t) {
    return t.column_stride == 1 && reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && t.row_stride * 2 % bytes == 0 &&
           t.batch_stride * 2 % bytes == 0;
  };
  if (q.m != q.n || q.m < 1 || q.k < 1 || q.batch < 1) return "gemm_sm90: a symmetric C has m = n rows, at least 1";
  if (!gemm_sm90_reads(q.a, q.ld_a, q.batch_stride_a) || !gemm_sm90_reads(q.b, q.ld_b, q.batch_stride_b))
    return "gemm_sm90: A, B, and the distances between their rows and matrices are multiples of 16 bytes";
  if (q.m_major_a != q.n_major_b) return "gemm_sm90: the operands of a symmetric C have the same layout";
  if (q.c.type != q.type || !by(16, q.c) || q.c.row_stride < q.n)
    return "gemm_sm90: a symmetric C has the type of A, and begins at multiples of 16 bytes, as its rows do";
  if (e.residual.data && (e.residual.type != q.type || !by(4, e.residual)))
    return "gemm_sm90: the residual of a symmetric C has its type, and rows that begin at multiples of 4 bytes";
  if (e.activation != Activation::none || e.bias.data || e.z.data || e.preact.data || q.accumulate)
    return "gemm_sm90: a symmetric C takes alpha, a residual and a diagonal";
  if (!gemm_sm90_takes_layout(kGemmTriangles[tile], q.m_major_a, q.n_major_b))
    return "gemm_sm90: operands that are not k-major take tiles of a multiple of 64 columns";
  if (gemm_sm90_triangle_tiles(kGemmTriangles[tile], q.n) * q.batch > INT32_MAX)
    return "gemm_sm90: more tiles than an int counts";
  return nullptr;
}

inline Schedule triangular_schedule(const GemmProblem& q, const GemmTile& tile) {
  Schedule s{};
  s.tile_columns = tile.n;
  s.tiles = static_cast<int>(gemm_sm90_triangle_tiles(tile, q.n));
  s.splits = 1;
  s.k_steps = s.k_steps_per_split = divide_up(q.k, kBlockK);
  s.work_count = s.tiles * q.batch;
  s.clusters = divide_up(s.work_count, divide_up(s.work_count, std::max(device_sm_count(), 1)));
  s.batch_a = q.batch_stride_a != 0;
  s.batch_b = q.batch_stride_b != 0;
  return s;
}

template <class T, Major kMajor, int kIndex>
Status launch_triangle(const GemmProblem& q, Stream stream) {
  using TriangleTile = Triangle<kIndex, triangle_stages<kIndex>()>;
  TensorMap map_a, map_b, map_c, map_tall{}, map_flat{};
  Status status = operand_map<T>(&map_a, q, kMajor, q.a, q.m, q.ld_a, q.batch_stride_a, TriangleTile::kBlockM);
  if (status.ok())
    status = operand_map<T>(&map_b, q, kMajor, q.b, q.n, q.ld_b, q.batch_stride_b, TriangleTile::kBlockN);
  const auto size = [](int64_t x) { return static_cast<uint64_t>(x); };
  const int64_t plane = q.batch == 1 ? q.c.row_stride * q.m : q.c.batch_stride;
  // TMA clips within 16 bytes of a row, so the rows of the map end at a multiple of that.
  const auto map_boxes = [&](TensorMap* to, uint32_t columns, uint32_t rows) {
    constexpr ElementType kType = std::is_same_v<T, bf16> ? ElementType::kBFloat16 : ElementType::kFloat16;
    if (!status.ok()) return;
    status = make_tensor_map(to, {q.c.data,
                                  kType,
                                  3,
                                  {size(divide_up(q.n, 8)) * 8, size(q.m), size(q.batch)},
                                  {size(q.c.row_stride), size(plane)},
                                  {columns, rows, 1},
                                  columns == 64 ? Swizzle::k128 : Swizzle::k32});
  };
  map_boxes(&map_c, 64, 64);
  if (!TriangleTile::kFullBoxes) map_boxes(&map_tall, kNarrowColumns, 64), map_boxes(&map_flat, 64, kNarrowColumns);
  if (!status.ok()) return {status.code, kGemmSm90HasNoMap};
  Args args = arguments<false, TriangleTile>(q, 1);
  args.path = {DirectStore::kNone, FusedEpilogue::kNone};
  args.schedule = triangular_schedule(q, kGemmTriangles[kIndex]);
  const LaunchConfig config{.name = "gemm_sm90",
                            .grid = args.schedule.clusters,
                            .block = TriangleTile::kThreads,
                            .shared_bytes = static_cast<std::size_t>(shared_bytes<false, TriangleTile>()),
                            .overlap_previous = true,
                            .stream = stream};
  return launch(gemm_sm90_kernel<T, kMajor, kMajor, false, TriangleTile>, config, map_a, map_b, map_c, map_tall,
                map_flat, args);
}

/// launch_triangle with the tile-th of kGemmTriangles, searched from kIndex on.
template <class T, Major kMajor, int kIndex>
Status launch_symmetric(const GemmProblem& q, int tile, Stream stream) {
  if constexpr (kIndex < kGemmTriangleCount) {
    if (tile != kIndex) return launch_symmetric<T, kMajor, kIndex + 1>(q, tile, stream);
    constexpr bool kAcross = kMajor == Major::kMN;
    if constexpr (gemm_sm90_takes_layout(kGemmTriangles[kIndex], kAcross, kAcross))
      return launch_triangle<T, kMajor, kIndex>(q, stream);
  }
  return {1, "gemm_sm90: there is no such tile"};
}

}  // namespace gemm

template <class T>
Status gemm_sm90_symmetric(const GemmProblem& q, int tile, Stream stream) {
  if (const char* why = gemm::refuses_symmetric(q, tile)) return {1, why};
  return q.m_major_a ? gemm::launch_symmetric<T, Major::kMN, 0>(q, tile, stream)
                     : gemm::launch_symmetric<T, Major::kK, 0>(q, tile, stream);
}

}  // namespace ak

// Instances of gemm_sm90_kernel for grouped products, and their launch.
//
// Work: 2 T k n flops, and those of the rows that complete each group's last 64: rows / (rows + 32) of the flops are
// used on average at random sizes. Plan: square tiles in turns, each of one group. For rows, one map covers all rows of
// A, the rows of the next group that a tile loads make results that nobody stores, and the store of C clips at the end
// of the group. A tile whose rows end within its first slice of 64 leaves out the other. The rows past the last group
// are tiles without k steps, whose zeros take the same way. For sums, the maps of A and B clip at the end of the group,
// so a group may begin at any term. Traps: a tile without k steps is not the end mark. A group's ends are known to the
// device alone, so the grid is what the largest number of tiles would fill. 32 KB per k step from L2 in the 512 cycles
// of its wgmma, as in symmetric.cuh; half a tile takes 24 KB, in 384 cycles where its wgmma take 256.
#pragma once
#include "gemm/sm90/gemm.cuh"

namespace ak {
namespace gemm {

template <int kStages, Grouping kGrouping>
using GroupTile = Tile<kGemmSm90GroupTile, kGemmSm90GroupTile, kStages, 1, 2, true, false, false, kGrouping>;
template <bool kFloat, Grouping kGrouping>
constexpr int group_stages() {
  constexpr int kTwo = shared_bytes<kFloat, GroupTile<2, kGrouping>>(),
                kThree = shared_bytes<kFloat, GroupTile<3, kGrouping>>();
  return 2 + (kSharedLimit - kTwo) / (kThree - kTwo);
}

template <class Tile>
Schedule grouped_schedule(const GroupedProblem& p, const Args& args) {
  const GemmProblem& q = p.product;
  Schedule s{};
  s.tile_columns = args.tile_columns;
  s.lines = divide_up(q.m, Tile::kBlockM);
  s.line_length = divide_up(args.columns, args.tile_columns);
  s.splits = 1;
  s.k_steps = s.k_steps_per_split = divide_up(q.k, kBlockK);
  s.batch_b = Tile::kRowGroups && q.batch_stride_b != 0;
  s.clusters = static_cast<int>(std::min<int64_t>(gemm_sm90_group_tiles(p), std::max(device_sm_count(), 1)));
  return s;
}

/// Maps of A and B. Sums: both clip at the end of a group.
template <class T, Major kMajorB, class Tile>
Status group_maps(const GroupedProblem& p, bool halved, TensorMap* map_a, TensorMap* map_b) {
  constexpr ElementType kType = std::is_same_v<T, bf16> ? ElementType::kBFloat16 : ElementType::kFloat16;
  GemmProblem q = p.product;
  if constexpr (Tile::kTermGroups) {
    const Status status = make_tensor_map(map_a, ragged_lines(q.a, kType, q.m, q.ld_a, 64, kBlockK));
    return status.ok() ? make_tensor_map(map_b, ragged_lines(q.b, kType, q.n, q.ld_b, 64, kBlockK)) : status;
  } else {
    q.batch = p.groups;
    const Status status = operand_map<T>(map_a, q, Major::kK, q.a, q.m, q.ld_a, 0, 64);
    const int columns = halved ? Tile::kBlockN / 2 : Tile::kBlockN;
    return status.ok() ? operand_map<T>(map_b, q, kMajorB, q.b, q.n, q.ld_b, q.batch_stride_b, columns) : status;
  }
}

template <class T, Major kMajorA, Major kMajorB, bool kFloat, Grouping kGrouping>
Status launch_groups(const GroupedProblem& p, Stream stream) {
  using Tile = GroupTile<group_stages<kFloat, kGrouping>(), kGrouping>;
  constexpr ElementType kType = kFloat                    ? ElementType::kFloat32
                                : std::is_same_v<T, bf16> ? ElementType::kBFloat16
                                                          : ElementType::kFloat16;
  GemmProblem q = p.product;
  q.batch = Tile::kTermGroups ? p.groups : 1;
  Args args = arguments<kFloat, Tile>(q, 1);
  args.groups = {p.offs, p.offs_stride, p.groups, p.sums ? q.k : q.m};
  args.schedule = grouped_schedule<Tile>(p, args);
  TensorMap map_a, map_b, map_c{}, map_z{};
  Status status = group_maps<T, kMajorB, Tile>(p, is_halved(q), &map_a, &map_b);
  const auto map_boxes = [&](TensorMap* to, const GemmValues& t) {
    const uint32_t columns = kFloat ? 32 : 64;
    if (Tile::kRowGroups)
      return make_tensor_map(to, ragged_lines(t.data, kType, args.columns, t.row_stride, columns, 64));
    const auto size = [](int64_t x) { return static_cast<uint64_t>(x); };
    const int64_t plane = q.batch == 1 ? t.row_stride * q.m : t.batch_stride;
    return make_tensor_map(to, {t.data,
                                kType,
                                3,
                                {size(args.columns), size(q.m), size(q.batch)},
                                {size(t.row_stride), size(plane)},
                                {columns, 64, 1}});
  };
  const bool boxes = args.path.fused == FusedEpilogue::kTma;
  if (boxes || (args.path.direct != DirectStore::kNone && args.path.direct != DirectStore::kUnaligned)) {
    if (status.ok()) status = map_boxes(&map_c, q.c);
    if (status.ok() && boxes && q.epilogue.z.data) status = map_boxes(&map_z, q.epilogue.z);
  }
  if (!status.ok()) return {status.code, kGemmSm90HasNoMap};
  const LaunchConfig config{.name = "gemm_sm90_grouped",
                            .grid = args.schedule.clusters,
                            .block = Tile::kThreads,
                            .shared_bytes = static_cast<std::size_t>(shared_bytes<kFloat, Tile>()),
                            .overlap_previous = true,
                            .stream = stream};
  return launch(gemm_sm90_kernel<T, kMajorA, kMajorB, kFloat, Tile>, config, map_a, map_b, map_c, map_z, map_c, args);
}

template <class T, bool kFloat>
Status launch_groups(const GroupedProblem& p, Stream stream) {
  constexpr Major kK = Major::kK, kMN = Major::kMN;
  if (p.sums) return launch_groups<T, kMN, kMN, kFloat, Grouping::kSums>(p, stream);
  return p.product.n_major_b ? launch_groups<T, kK, kMN, kFloat, Grouping::kRows>(p, stream)
                             : launch_groups<T, kK, kK, kFloat, Grouping::kRows>(p, stream);
}

}  // namespace gemm

template <class T>
Status gemm_sm90_grouped(const GroupedProblem& p, Stream stream) {
  if (const char* why = gemm_sm90_refuses_groups(p)) return {1, why};
  return p.product.c.type == DType::kFloat32 ? gemm::launch_groups<T, true>(p, stream)
                                             : gemm::launch_groups<T, false>(p, stream);
}

}  // namespace ak

// gemm_sm80_grouped: grouped products with mma.sync, and their launch.
//
// Work: that of gemm_sm80, for rows and terms whose groups the device alone knows. Plan: a block per tile, as in
// gemm_sm80, of as many as the groups may have; those beyond the last tile exit at once. Every warp finds the block's
// group by itself, 32 groups at a time, a lane for each: the ends are the prefix maximum of the clamped offsets, the
// tiles before a group a prefix sum. Then the tile is one of an ordinary product, whose rows end with the group or
// whose operands begin at its first term. The rows past the last group are a group without terms. Traps: a group
// without terms has no step to copy, and its sums are zeros all the same. Rows in no group have no bias.
#include "gemm/sm80/launch.cuh"

namespace ak {
namespace mma_gemm {

struct GroupArgs {
  Args args;  // m: all rows, k: all terms; of terms, the stride of a batch is that of a line
  const int32_t* offs;
  int64_t offs_stride;
  int groups;
  bool sums;
  bool skips_empty;
  int place;  // in shared memory: row, column, group and end of the rows of the tile
};

/// The rows or terms of a block's group.
struct Group {
  int index, begin, end;
  int tile;  // of the group; -1: the block has none
};

/// Tiles of `lines` rows of C.
template <class Tile>
AK_DEVICE int tiles_of_lines(const Args& args, int lines) {
  return (lines + Tile::kBlockM - 1) / Tile::kBlockM * ((args.columns + args.tile_columns - 1) / args.tile_columns);
}

template <class Tile>
AK_DEVICE Group group_of_block(const GroupArgs& g) {
  const int lane = lane_index(), total = g.sums ? g.args.k : g.args.finish.m, all = g.groups + (g.sums ? 0 : 1);
  // op over the lanes up to this one
  const auto scan = [&](int value, auto op) {
    AK_UNROLL
    for (int apart = 1; apart < kWarpThreads; apart *= 2) {
      const int other = shuffle(value, lane < apart ? lane : lane - apart);
      if (lane >= apart) value = op(value, other);
    }
    return value;
  };
  int before = 0, first_begin = 0;  // tiles before the 32 groups, and where the first of them begins
  AK_NO_UNROLL
  for (int first = 0; first < all; first += kWarpThreads) {
    const int group = first + lane, given = group < g.groups ? load(g.offs + group * g.offs_stride) : total;
    const int end = scan(clamp(given, first_begin, total), [](int a, int b) { return a > b ? a : b; });
    const int previous = shuffle(end, lane == 0 ? 0 : lane - 1), begin = lane == 0 ? first_begin : previous;
    int tiles = tiles_of_lines<Tile>(g.args, g.sums ? g.args.finish.m : end - begin);
    if (group >= all || (g.skips_empty && begin == end)) tiles = 0;
    const int last = before + scan(tiles, [](int a, int b) { return a + b; });
    const int at = warp_sum(block_index() >= last ? 1 : 0);  // groups that end before the block's tile
    if (at < kWarpThreads)
      return {first + at, shuffle(begin, at), shuffle(end, at), block_index() - shuffle(last - tiles, at)};
    before = shuffle(last, kWarpThreads - 1);
    first_begin = shuffle(end, kWarpThreads - 1);
  }
  return {0, 0, 0, -1};
}

template <class T, class Tile>
AK_KERNEL(Tile::kThreads, Tile::kBlocks)
gemm_sm80_grouped_kernel(AK_PARAM(GroupArgs) g) {
  const Group group = group_of_block<Tile>(g);
  if (group.tile < 0) return;
  const int lines = g.sums ? g.args.finish.m : group.end - group.begin;
  const int rows = (lines + Tile::kBlockM - 1) / Tile::kBlockM,
            columns = (g.args.columns + g.args.tile_columns - 1) / g.args.tile_columns;
  const int raster = group.tile / (kRaster * columns), in_raster = group.tile % (kRaster * columns);
  const int high = rows - raster * kRaster < kRaster ? rows - raster * kRaster : kRaster;
  // Rows of the next group are multiplied, too, and not stored. A group of terms is a batch that begins at its line.
  Work work{};
  work.m = (g.sums ? 0 : group.begin) + (raster * kRaster + in_raster % high) * Tile::kBlockM;
  work.n = in_raster / high * g.args.tile_columns;
  work.batch = g.sums ? group.begin : group.index;
  work.k_end = g.sums ? group.end - group.begin : group.index < g.groups ? g.args.k : 0;
  // In registers this would be spilled.
  const uint32_t place = dynamic_shared() + g.place;
  const auto word = [](int x) { return static_cast<uint32_t>(x); };
  if (thread_index() == 0) {
    const int end = g.sums ? g.args.finish.m : group.end;
    store_shared_16(place, {{word(work.m), word(work.n), word(group.index), word(end)}});
  }
  float acc[Tile::kChunks][2][2][4] = {};
  if (work.k_end > 0) multiply<T, Tile>(g.args, work, acc);
  block_sync();
  const auto kept = load_shared_16(place);
  Work stored{};
  stored.m = static_cast<int>(kept[0]), stored.n = static_cast<int>(kept[1]), stored.batch = static_cast<int>(kept[2]);
  Args args = g.args;
  args.finish.m = static_cast<int>(kept[3]);
  if (!g.sums && stored.batch == g.groups) args.finish.epilogue.bias.data = nullptr;
  finish_tile<Tile>(args, stored, acc);
}

namespace {

const char* refuses(const GroupedProblem& p) {
  const GemmProblem& q = p.product;
  if (q.m < 1 || q.n < 1 || q.k < 1 || p.groups < 1) return "gemm_sm80: m, n, k and groups are at least 1";
  if (p.sums ? !q.m_major_a || !q.n_major_b : q.m_major_a)
    return "gemm_sm80: groups of rows take a row-major A, sums over groups an m-major A and an n-major B";
  if (p.sums && !is_plain(q.epilogue)) return "gemm_sm80: sums over groups take no epilogue";
  return nullptr;
}

}  // namespace
}  // namespace mma_gemm

template <class T>
Status gemm_sm80_grouped(const GroupedProblem& p, Stream stream) {
  using namespace mma_gemm;
  using Tile = mma_gemm::Tile<128, 128, 64, 64, 2>;
  if (const char* why = refuses(p)) return refuse(why);
  GemmProblem q = p.product;
  q.batch = p.groups;
  if (p.sums) q.batch_stride_a = q.ld_a, q.batch_stride_b = q.ld_b;
  GroupArgs g{arguments<Tile>(q, 1), p.offs, p.offs_stride, p.groups, p.sums, q.accumulate, 0};
  g.place = static_cast<int>(shared_bytes<Tile>(g.args));
  const int64_t columns = ceil_div(g.args.columns, g.args.tile_columns);
  // At most: each group, and the rows in none, may end with a tile that is not full.
  const int64_t rows =
      p.sums ? int64_t{ceil_div(q.m, Tile::kBlockM)} * p.groups : q.m / Tile::kBlockM + int64_t{p.groups} + 1;
  if (rows * columns > INT32_MAX) return refuse("gemm_sm80: more than 2^31 - 1 blocks");
  const LaunchConfig config{.name = "gemm_sm80_grouped",
                            .grid = static_cast<int>(rows * columns),
                            .block = Tile::kThreads,
                            .shared_bytes = static_cast<size_t>(g.place) + 16,
                            .stream = stream};
  return launch(gemm_sm80_grouped_kernel<T, Tile>, config, g);
}

template Status gemm_sm80_grouped<fp16>(const GroupedProblem&, Stream);
template Status gemm_sm80_grouped<bf16>(const GroupedProblem&, Stream);

}  // namespace ak

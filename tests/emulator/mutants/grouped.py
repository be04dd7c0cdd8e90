"""Bugs in grouped products: the walk over groups, ragged maps, tiles without terms, biases, on both architectures."""

from . import Mutant

TEST = "test_grouped"
MAP = "device/tensor_map.cuh"
TILE = "gemm/sm90/tile.cuh"
PRODUCER = "gemm/sm90/producer.cuh"
KERNEL = "gemm/sm90/gemm.cuh"
LOOP = "gemm/sm90/main_loop.cuh"
PLACE = "gemm/sm90/gemm.h"
STORE = "gemm/sm90/direct_store.cuh"
HOST = "gemm/sm90/grouped.cuh"
SM80 = "gemm/sm80/grouped.cu"

MUTANTS = [
    # ---- the end of a group
    Mutant(MAP, "return kRaggedLines - end + line;", "return kRaggedLines - end + line - 1;", "a group is one line longer"),
    Mutant(MAP, "(uint64_t{1} << 34) - pitch", "uint64_t{1} << 34", "the base is not moved back"),
    Mutant(STORE, "ragged_line(row, end), kRaggedLines, end);", "ragged_line(row, end + 64), kRaggedLines, end + 64);", "a tile is stored beyond its group"),
    Mutant(TILE, "Tile::kRowGroups ? work.end : args.m;", "args.m;", "words and elements are stored beyond the group"),
    Mutant(PRODUCER, "end < begin_ ? begin_ : end > groups.total ? groups.total : end;", "end > groups.total ? groups.total : end;", "an end before the previous one"),
    Mutant(PRODUCER, "end < begin_ ? begin_ : end > groups.total ? groups.total : end;", "end < begin_ ? begin_ : end;", "an end past the last row"),
    Mutant(PRODUCER, "load(groups.offs + group_ * groups.stride)", "load(groups.offs + group_)", "the stride of the ends is forgotten"),
    Mutant(PRODUCER, "work.end = number(a[3]),", "work.end = 0,", "a consumer does not hear of the end"),
    Mutant(PRODUCER, "if constexpr (Tile::kRowGroups) work.end = static_cast<int>(place[3]);", "", "the warp that moves boxes does not hear of the end"),
    Mutant(HOST, "p.sums ? q.k : q.m}", "p.sums ? q.m : q.k}", "the wrong dimension has the groups"),
    # ---- terms
    Mutant(PRODUCER, "ragged_line(k, end), kRaggedLines, end);", "ragged_line(k, end + 64), kRaggedLines, end + 64);", "terms of the next group are multiplied"),
    Mutant(PRODUCER, "load_terms<kRowsB>(b, map_b, full, work.n, work.begin + k, work.end);", "load_terms<kRowsB>(b, map_b, full, work.n, work.begin + k, work.end + 64);",
           "only one operand is clipped: 0 x NaN"),
    Mutant(PRODUCER, "load_terms<kRowsA>(a, maps_a.first, full, work.m, work.begin + k, work.end);", "load_terms<kRowsA>(a, maps_a.first, full, work.m, k, work.end);", "A begins at the first term of all"),
    Mutant(PRODUCER, "Tile::kTermGroups ? blocks(end_ - begin_, kBlockK)", "Tile::kTermGroups ? (end_ - begin_) / kBlockK", "the last terms are left out"),
    # ---- tiles without terms
    Mutant(TILE, "kEndMark = kGrouping == Grouping::kNone ? 0 : -1;", "kEndMark = 0;", "a tile without steps is the end mark"),
    Mutant(PRODUCER, "if (!exists) work.steps = Tile::kEndMark;", "", "there is no end mark"),
    Mutant(LOOP, "|| previous >= 0) release(previous);", "|| true) release(previous);", "a stage that was not used is released"),
    Mutant(LOOP, "acc[i][j] = 0.0f;", ";", "sums of no terms are what was in the registers"),
    Mutant(KERNEL, "if (work.steps == Tile::kEndMark && first && consumer == 0)", "if (false)", "a block without tiles leaves a barrier behind"),
    Mutant(PRODUCER, "begin_ == end_ && args_.output == Output::kAccumulate ? 0", "begin_ == end_ ? 0", "the sums of empty groups are not written"),
    Mutant(PRODUCER, "begin_ == end_ && args_.output == Output::kAccumulate ? 0", "false ? 0", "empty groups are added to"),
    # ---- the walk
    Mutant(PRODUCER, "(Tile::kRowGroups ? begin_ : 0) + place.line * Tile::kBlockM;", "place.line * Tile::kBlockM;", "every group begins at the first row"),
    Mutant(PRODUCER, "tile_ -= tiles;", "", "the tiles of groups passed are not subtracted"),
    Mutant(PLACE, "together = left < kRaster ? left : kRaster;", "together = kRaster;", "the last raster of a group is taken for a whole one"),
    Mutant(PLACE, "(in_raster + column) % together;", "(in_raster + index) % together;", "the lines turn within a column: a tile is left out"),
    Mutant(PLACE, "(in_raster + column) % together;", "in_raster % together;", "the lines do not turn", missed="blocks have other tiles, all are computed"),
    # ---- a last tile of 64 rows or fewer
    Mutant(TILE, "work.end <= work.m + 64;", "work.end <= work.m + 65;", "the 65th row is left out"),
    Mutant(TILE, "work.end <= work.m + 64;", "work.end <= work.m + 63;", "of 64 rows the next 64 are read as well"),
    Mutant(PRODUCER, "(lone ? kSliceBytes : Tile::kBytesA)", "Tile::kBytesA", "bytes are awaited that do not come"),
    Mutant(PRODUCER, "if (!lone) load_rows", "load_rows", "rows that nobody needs are read"),
    Mutant(PRODUCER, "full, work.m + 64, k, batch_a);", "full, work.m, k, batch_a);", "the first 64 rows twice"),
    Mutant(PRODUCER, "load_rows<kMajorA, 64, false>(a + kSliceBytes,", "load_rows<kMajorA, 64, false>(a,", "both slices go to one place"),
    Mutant(HOST, "q.m, q.ld_a, 0, 64);", "q.m, q.ld_a, 0, Tile::kBlockM);", "boxes of A have all rows of a tile"),
    Mutant(KERNEL, "if (has_lone_slice<Tile>(work)) {", "if (Tile::kRowGroups) {", "the second slice is never multiplied"),
    Mutant(KERNEL, "if (has_lone_slice<Tile>(work)) {", "if (false) {", "rows that were not loaded are multiplied"),
    Mutant(LOOP, "if (previous >= 0) release(previous);", "if (previous >= 0 && kSlices == Tile::kSlicesM) release(previous);", "a lone slice keeps its stages"),
    Mutant(STORE, "if (slice > 0 && has_lone_slice<Tile>(work)) break;", "if (has_lone_slice<Tile>(work)) break;", "a lone slice is not stored"),
    Mutant(STORE, "if (slice > 0 && has_lone_slice<Tile>(work)) break;", "", "what is in the registers of the missing slice is stored",
           missed="past the end of the group, where the map clips"),
    Mutant(PRODUCER, "args_.groups.count + (Tile::kRowGroups ? 1 : 0);", "args_.groups.count;", "rows in no group are not written"),
    Mutant(PRODUCER, "group_ < args_.groups.count ? s.k_steps : 0;", "s.k_steps;", "rows in no group are multiplied"),
    Mutant(HOST, "q.batch = Tile::kTermGroups ? p.groups : 1;", "q.batch = 1;", "one matrix of results"),
    Mutant(HOST, "s.batch_b = Tile::kRowGroups && q.batch_stride_b != 0;", "s.batch_b = 0;", "the B of the first group for all"),
    # ---- epilogue
    Mutant(TILE, "batch < args.groups.count ? bias.data + batch * bias.batch_bytes : nullptr;", "bias.data + batch * bias.batch_bytes;", "rows in no group have a bias"),
    Mutant(TILE, "? bias.data + batch * bias.batch_bytes", "? bias.data", "the bias of the first group for all"),
    Mutant(TILE, "if (Tile::kRowGroups && halved && e.z.data) args.path", "if (false) args.path", "the halves of z are two matrices of a map that has none"),
    # ---- sm_80
    Mutant(SM80, "clamp(given, first_begin, total)", "given", "ends are not clamped"),
    Mutant(SM80, "return a > b ? a : b;", "return a;", "an end before the previous one"),
    Mutant(SM80, "lane == 0 ? first_begin : previous;", "previous;", "the first of 32 groups is empty"),
    Mutant(SM80, "before = shuffle(last, kWarpThreads - 1);", "", "tiles are counted anew every 32 groups"),
    Mutant(SM80, "first_begin = shuffle(end, kWarpThreads - 1);", "", "the 33rd group begins at 0"),
    Mutant(SM80, "block_index() - shuffle(last - tiles, at)", "block_index() - shuffle(last, at)", "the tile is counted from the next group"),
    Mutant(SM80, "if (work.k_end > 0) multiply", "multiply", "a group without terms multiplies what is in shared memory"),
    Mutant(SM80, "if (!g.sums && stored.batch == g.groups)", "if (false)", "rows in no group have a bias"),
    Mutant(SM80, "|| (g.skips_empty && begin == end)", "", "empty groups are added to"),
    Mutant(SM80, "g.sums ? group.begin : group.index;", "group.index;", "the terms of another group"),
    Mutant(SM80, "const int end = g.sums ? g.args.finish.m : group.end;", "const int end = g.args.finish.m;", "a tile is stored beyond its group"),
    Mutant(SM80, "g.groups + (g.sums ? 0 : 1);", "g.groups;", "rows in no group are not written"),
    Mutant(SM80, "q.m / Tile::kBlockM + int64_t{p.groups} + 1;", "q.m / Tile::kBlockM + int64_t{p.groups};", "one block too few"),
    Mutant(SM80, "work.m = (g.sums ? 0 : group.begin)", "work.m = 0", "every group begins at the first row"),
]  # fmt: skip

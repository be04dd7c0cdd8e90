"""Bugs in symmetric products: the triangle of tiles, the mirrored stores of gemm_sm90 and gemm_sm80."""

from . import Mutant

TEST = "test_gemm_symmetric"
STORE = "gemm/sm90/mirrored_store.cuh"
HOST = "gemm/sm90/symmetric.cuh"
TILES = "gemm/sm90/gemm.h"
TILE = "gemm/sm90/tile.cuh"
SCHEDULER = "gemm/sm90/producer.cuh"
KERNEL = "gemm/sm90/gemm.cuh"
LOOP = "gemm/sm90/main_loop.cuh"
SM80 = "gemm/sm80/gemm.cuh"
SM80_OUTPUT = "gemm/sm80/output.cuh"
SM80_TILE = "gemm/sm80/tile.cuh"
SM80_HOST = "gemm/sm80/launch.cuh"

MUTANTS = [
    # ---- the triangle
    Mutant(SM80_TILE, "return tiles * (tiles + 1) / 2;", "return tiles * tiles / 2;", "the diagonal tiles are not counted"),
    Mutant(SM80_TILE, "int length = tiles + 1 - tiles % 2,", "int length = tiles + 1,", "odd rows of tiles are folded as even ones"),
    Mutant(SM80_TILE, "if (across < lower)", "if (across <= lower)", "a tile above the diagonal, and one of the upper row never"),
    Mutant(SM80_TILE, "return {lower - 1, across};", "return {across, lower - 1};", "the wrong triangle"),
    Mutant(SM80_TILE, "return {line - tiles % 2,", "return {line,", "of odd rows of tiles, the upper row is one too low"),
    Mutant(SCHEDULER, "work.m = strip_ * Tile::kBlockM;", "work.m = strip_ * Tile::kBlockN;", "strips are as high as tiles are wide"),
    Mutant(SCHEDULER, "work.n = (in_matrix - before_strip_) * Tile::kBlockN;", "work.n = (in_matrix - before_strip_) * Tile::kBlockM;", "tiles are as wide as high"),
    Mutant(SCHEDULER, "while (in_matrix >= before_strip_ + tiles())", "while (in_matrix > before_strip_ + tiles())", "the first tile of a strip is one more of the strip above"),
    Mutant(SCHEDULER, "if (in_matrix < before_strip_) strip_ = before_strip_ = 0;", "", "the next matrix begins at the strip of the last"),
    Mutant(SCHEDULER, "if (in_matrix < before_strip_) strip_ = before_strip_ = 0;", "if (in_matrix < before_strip_) strip_ = 0;", "the next matrix counts on"),
    Mutant(TILES, "return ((strip + 1) * m + n - 1) / n; }", "return ((strip + 1) * m + n - 64) / n; }", "a strip's last columns have no tile"),
    Mutant(TILES, "strip <= (rows - 1) / t.m; strip++", "strip < rows / t.m; strip++", "the last rows have no strip"),
    Mutant(TILE, "if (Tile::kTriangular) return kTwoBoxes;", "", "no room for the transposed box of narrow tiles"),
    Mutant(HOST, "s.work_count = s.tiles * q.batch;", "s.work_count = s.tiles;", "only the first matrix of a batch"),
    Mutant(HOST, "s.batch_b = q.batch_stride_b != 0;", "s.batch_b = 0;", "B of the first matrix for all"),
    Mutant(HOST, "s.batch_a = q.batch_stride_a != 0;", "s.batch_a = 1;", "a shared A is read beyond its end"),
    Mutant(HOST, "q.batch == 1 ? q.c.row_stride * q.m : q.c.batch_stride;", "q.c.row_stride * q.m;", "matrices without the gap"),
    Mutant(HOST, "{size(divide_up(q.n, 8)) * 8,", "{size(q.n),", "the rows of C's map end within 16 bytes"),
    # ---- the mirrored store
    Mutant(STORE, "column >= row + 64) return;", "column > row) return;", "no boxes that meet the diagonal right of their corner"),
    Mutant(STORE, "column >= row + 64) return;", "column >= row) return;", "no boxes on the diagonal"),
    Mutant(STORE, "if (column + kColumns > row) {", "if (column + kColumns > row + 64) {", "boxes across the diagonal are stored whole"),
    Mutant(STORE, "tma_store(kNarrow ? maps.flat : maps.square, staging + kSliceBytes, row, column, batch);", "tma_store(kNarrow ? maps.flat : maps.square, staging + kSliceBytes, column, row, batch);",
           "the mirror goes where the box goes"),
    Mutant(STORE, "staging + kSliceBytes, row, column, batch);", "staging + kSliceBytes, row, column, 0);", "the mirror of every matrix goes to the first"),
    Mutant(STORE, "kNarrow ? maps.tall : maps.square", "maps.square", "a narrow box is stored as wide as others"),
    Mutant(STORE, "kNarrow ? maps.flat : maps.square", "kNarrow ? maps.tall : maps.square", "the mirror of a narrow box has its shape"),
    Mutant(HOST, "columns == 64 ? Swizzle::k128 : Swizzle::k32", "Swizzle::k128", "narrow boxes have wide rows"),
    Mutant(HOST, "map_boxes(&map_flat, 64, kNarrowColumns)", "map_boxes(&map_flat, 64, 64)", "the mirror of a narrow box has 64 rows"),
    Mutant(STORE, "stmatrix_x4_trans(turned + j * 128, r);", "stmatrix_x4(turned + j * 128, r);", "blocks of 8 x 8 are not transposed"),
    Mutant(STORE, "stmatrix_x4_trans(turned + j * 128, r);", "stmatrix_x4_trans(turned ^ j * 2, r);", "the mirror advances along its rows"),
    Mutant(STORE, "box_offset(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);", "box_offset(lane / 8 % 2 * 8 + lane % 8, 2 * warp + lane / 16);",
           "two blocks of the mirror are exchanged"),
    Mutant(STORE, "named_barrier(consumer + 1, kWarpgroupThreads); return", "return", "threads store a box before it is staged"),
    Mutant(STORE, "if (c <= r && r < args.m) {", "if (c < r && r < args.m) {", "no chunk that begins on the diagonal"),
    Mutant(STORE, "if (c <= r && r < args.m) {", "if (c <= r) {", "rows out of bounds"),
    Mutant(STORE, "if (c + 8 > r) {", "if (c + 8 > r + 8) {", "the upper elements of a chunk across the diagonal are its own"),
    Mutant(STORE, "box_offset(r - column, line / 8));", "box_offset(line, line / 8));", "a chunk's mirror image lies in its own line of the transpose"),
    Mutant(STORE, "box_offset(r - column, line / 8));", "box_offset(r - column, chunk));", "a chunk's mirror image lies in its own place of the line"),
    Mutant(STORE, "box_offset<(kColumns < 64)>(line, chunk));", "box_offset(line, chunk));", "a narrow box is read with wide rows"),
    Mutant(STORE, "above > column + turned_line &&", "above + 8 > column + turned_line &&", "the transpose is stored across the diagonal, too"),
    Mutant(STORE, "above > column + turned_line && above < args.m)", "above > column + turned_line)", "columns out of bounds"),
    Mutant(STORE, "turned_line = i / 8, turned_chunk = i % 8,", "turned_line = i / kChunks, turned_chunk = i % kChunks,", "the mirror of a narrow box is read as narrow"),
    Mutant(STORE, "below >= 2 * j + 2 ?", "below >= 2 * j + 1 ?", "the first element above the diagonal is kept"),
    Mutant(STORE, "below == 2 * j + 1 ? 0xffffu", "below == 2 * j + 1 ? 0xffff0000u", "the wrong element of the pair on the diagonal"),
    Mutant(STORE, "r + 1 - c);", "r - c);", "the diagonal comes from the transpose",
           missed="an element of the diagonal is its own mirror image"),
    Mutant(STORE, "wait_for_staging(thread, consumer);", "", "the boxes of the box before are overwritten"),
    Mutant(STORE, "publish_staging(consumer);", "named_barrier(consumer + 1, kWarpgroupThreads);", "no fence before TMA reads"),
    Mutant(STORE, "bulk_commit();", "", "stores that no wait covers"),
    Mutant(STORE, "&& c <= r ?", "?", "the residual is read above the diagonal and beyond its end"),
    Mutant(STORE, "r < args.m && c <= r ?", "c <= r ?", "rows of the residual out of bounds"),
    Mutant(STORE, "args.epilogue.residual, batch, r, c);", "args.epilogue.residual, 0, r, c);", "the residual of the first matrix"),
    Mutant(STORE, "row + thread_in_warpgroup() / kWarpThreads * 16 + lane / 4;", "row + lane / 4;", "the residual of the first warp's rows"),
    Mutant(STORE, "c = column + i / 2 * 8 + lane % 4 * 2;", "c = column + i % 8 * 8 + lane % 4 * 2;", "pairs of the residual in another order"),
    Mutant(STORE, "widen_pair<T>(pairs[j / 4 + i], low, high);", "widen_pair<T>(pairs[i], low, high);", "the residual of the first 16 columns"),
    Mutant(STORE, "v[i] = e.alpha * sums[j / 2 + i];", "v[i] = sums[j / 2 + i];", "alpha is lost"),
    Mutant(STORE, "acc[slice] + at / 2,", "acc[0] + at / 2,", "the second 64 rows are the first"),
    Mutant(STORE, "if (row + warp * 16 == column + j) {", "if (warp * 16 == j) {", "a diagonal in every box"),
    Mutant(STORE, "if (row + warp * 16 == column + j) {", "if (row == column + j) {", "the diagonal of the first 16 rows alone"),
    Mutant(STORE, "if (row + warp * 16 == column + j) {", "if (row == column && j == warp * 16) {", "the diagonal of boxes that begin on it alone"),
    Mutant(STORE, "i / 4 == i / 2 % 2 &&", "", "the diagonal of a block of 8 in its neighbour, too"),
    Mutant(KERNEL, "store_mirrored<T, Tile>(acc, maps, p.staging_of(consumer), consumer,", "store_mirrored<T, Tile>(acc, maps, p.staging_of(0), consumer,",
           "both consumers stage in one buffer"),
    Mutant(LOOP, "a + LayoutA::offset(i, k16), b + LayoutB::offset(0, k16), accumulate);",
           "a + LayoutA::offset(i, Tile::kSlicesM == 2 ? 3 - k16 : k16), b + LayoutB::offset(0, Tile::kSlicesM == 2 ? 3 - k16 : k16), accumulate);",
           "tiles of two slices add up the products of a step in another order"),
    # ---- gemm_sm80
    Mutant(SM80_TILE, "tile = block_index() % tiles;", "tile = block_index() % (tiles - 1);", "the last tile is another one again"),
    Mutant(SM80_TILE, "block_index(), block_index() / tiles, 0, 0, args.k};", "block_index(), 0, 0, 0, args.k};", "only the first matrix"),
    Mutant(SM80_OUTPUT, "column_[1] + kColumns > row) {", "column_[1] > row) {", "whole rows are stored across the diagonal"),
    Mutant(SM80_OUTPUT, "column > first_row + row) continue;", "column >= first_row + row) continue;", "no diagonal"),
    Mutant(SM80_OUTPUT, "column >= first_row + r) continue;", "column > first_row + r + 1) continue;", "the mirror below the diagonal"),
    Mutant(SM80_OUTPUT, "column < first_row && first_row + 16 <=", "column < first_row + 16 && first_row + 16 <=", "whole words of a mirror across the diagonal"),
    Mutant(SM80_OUTPUT, "first_row + 16 <= args_.finish.m) {", "first_row <= args_.finish.m) {", "the mirror of rows out of bounds"),
    Mutant(SM80_OUTPUT, "store_vec(to + 4, rows[1]);", "store_vec(to + 4, rows[0]);", "eight rows of the mirror twice"),
    Mutant(SM80_OUTPUT, "r % 2 == 0 ? pair : pair >> 16", "pair", "every second element of a mirror is its neighbour"),
    Mutant(SM80_OUTPUT, "add_diagonal(args.finish.epilogue.diagonal,", "add_diagonal(2 * args.finish.epilogue.diagonal,", "the diagonal twice"),
    Mutant(SM80_HOST, "if (q.symmetric) return q.batch * triangle_of(columns);", "", "more blocks than tiles"),
]  # fmt: skip

"""Bugs in the epilogue of the wgmma GEMM."""

from . import Mutant

TEST = "test_gemm_epilogue"
TILE = "kernels/gemm_sm90_epilogue.cuh"
STORE = "kernels/gemm_sm90_store.cuh"
ARGS = "kernels/gemm_sm90_tile.cuh"
HOST = "kernels/gemm_sm90.h"
SUMS = "kernels/gemm_column_sums.cu"

MUTANTS = [
    # ---- in registers
    Mutant(STORE, "return alpha * sum;", "return sum;", "alpha is forgotten"),
    Mutant(STORE, "return sum + to_float(pair[i]);", "return sum + to_float(pair[0]);", "two columns share a bias"),
    Mutant(STORE, "x < end ? load_vec<2>(bias + x) : Pair{}", "load_vec<2>(bias + x)", "the bias is read beyond the last column"),
    Mutant(STORE, "change.pair(x + 8 * j + lane_index() % 4 * 2)", "change.pair(x + 8 * j)", "the lanes share a pair of the bias"),
    Mutant(STORE, "change.pair(x + 8 * j +", "change.pair(x + 16 * j +", "every other block of 8 columns is left out"),
    Mutant(STORE, "pairs[i / 2]", "pairs[i % 2]", "rows and columns of the bias change places"),
    Mutant(STORE, "load_pairs(change, n + part * kColumns, pairs);", "load_pairs(change, n, pairs);", "all parts take the bias of the first"),
    Mutant(STORE, "pairs + 2 * j, r);", "pairs, r);", "16 columns' bias for all of a part"),
    Mutant(STORE, "load_pairs(change, n + 16 * j, pairs);", "load_pairs(change, n, pairs);", "rows: 16 columns' bias for all"),
    Mutant(STORE, "load_pairs(change, n + part * 64, pairs);", "load_pairs(change, part * 64, pairs);", "fp32: all tiles take the first one's bias"),
    Mutant(STORE, "change.apply(d[3], pairs[j], 1)", "change.apply(d[3], pairs[j], 0)", "fp32: the lower row's second column takes the first one's bias"),
    Mutant(STORE, "fence_proxy_async();", "", "no proxy fence before the store of staged results"),
    Mutant(STORE, "if (thread == 0) bulk_wait_read<0>();", "", "the staging buffer is reused under a store"),
    Mutant(STORE, "if (output == GemmOutput::kAccumulate) {", "if (false) {", "C is overwritten"),
    Mutant(HOST, "return e.alpha == 1.0f && in_pairs &&", "return in_pairs &&", "alpha is forgotten beside a bias"),
    Mutant(HOST, "reinterpret_cast<uintptr_t>(e.bias.data) % (2 * bytes_of(e.bias.type)) == 0;", "true;", "a bias moves in pairs wherever it lies"),
    Mutant(HOST, "e.bias.row_stride == 0 && e.bias.column_stride == 1 &&", "e.bias.column_stride == 1 &&", "a bias per row is taken for one per column",
           missed="a bias per row has no distance between columns, so the other condition holds it off"),
    Mutant(HOST, "aligned(q.n) && q.c.row_stride >= 1", "q.c.row_stride >= 1", "TMA clips a store within 16 bytes"),
    Mutant(ARGS, "if (e.bias.data) return e.bias.type == half ? Finish::kBias : Finish::kFloatBias;", "if (e.bias.data) return Finish::kBias;", "a bias in fp32 is read as one of 16 bits"),
    # ---- operands
    Mutant(ARGS, "t.column_stride == 1 && reinterpret_cast", "reinterpret_cast", "columns that lie apart move together"),
    Mutant(ARGS, "reinterpret_cast<uintptr_t>(t.data) % bytes == 0 &&", "", "neighbours move together wherever they begin"),
    Mutant(ARGS, "aligned(t.row_stride) &&", "", "neighbours move together wherever a row begins"),
    Mutant(ARGS, "(is_halved(q) ? q.n / 2 : q.n) % neighbours == 0", "true", "neighbours beyond the last column move as well"),
    Mutant(ARGS, "&& e.bias.row_stride == 0;", ";", "a bias per row moves as one per column"),
    Mutant(ARGS, "(bytes <= 16 || t == &e.bias)", "true", "eight fp32 neighbours are taken for 16-bit ones"),
    Mutant(ARGS, "vectors = vectors && !(e.preact.data && (e.bias.data || e.residual.data || e.z.data));", "", "a bias is forgotten in the backward"),
    Mutant(ARGS, "p.epilogue.residual = q.c;", "", "what is in C is forgotten where TMA cannot add to it"),
    Mutant(ARGS, "t.row_stride * size, t.column_stride * size,", "t.row_stride * 2, t.column_stride * 2,", "fp32 rows lie half as far apart"),
    Mutant(TILE, "t.data + batch * t.batch_bytes", "t.data", "every product of a batch uses the first one's operands"),
    Mutant(TILE, "raw.words[i / 2] >> (16 * (i % 2))", "raw.words[i / 2] >> (16 * (1 - i % 2))", "two neighbours change places"),
    Mutant(TILE, "v[0] = type == DType::kBFloat16 ? to_float(bf16{bits})", "v[0] = false ? to_float(bf16{bits})", "single bf16 are read as fp16"),
    Mutant(TILE, "type == DType::kBFloat16 ? round_to<bf16>(v[0]).bits", "true ? round_to<bf16>(v[0]).bits", "single fp16 values are rounded to bf16"),
    Mutant(TILE, "round_pair<T>(v[2 * i], v[2 * i + 1])", "round_pair<T>(v[2 * i + 1], v[2 * i])", "two results change places"),
    Mutant(TILE, "column < end ? rows : 0;", "rows;", "columns beyond the last are worked on"),
    Mutant(TILE, "args.m - row0 < 16 ? args.m - row0 : 16;", "16;", "rows beyond the last are worked on"),
    Mutant(TILE, "if (kForward && e.residual.data && r < last)", "if (kForward && e.residual.data)", "a row of the residual too far is fetched"),
    Mutant(TILE, "fetch_residual(r + row_step);", "", "the first residual serves all rows"),
    Mutant(TILE, "fetch_preact(r + row_step);", "", "the first pre-activation serves all rows"),
    # ---- staged rows
    Mutant(TILE, "return moved ^ ((moved >> 3) & 16);", "return plain;", "the staged rows are not turned",
           missed="only banks meet: the result is right"),
    Mutant(TILE, "const uint32_t to = mine ^ staged_offset<kColumns>(0, j);", "const uint32_t to = mine + staged_offset<kColumns>(0, j);", "the turn is added, not exchanged"),
    Mutant(TILE, "store_shared_2(to + staged_offset<kColumns>(8, 0), d[2], d[3]);", "store_shared_2(to + staged_offset<kColumns>(7, 0), d[2], d[3]);", "the lower rows lie one too high"),
    Mutant(TILE, "if (p != part) continue;", "if (p != 0) continue;", "every part is the first"),
    Mutant(TILE, "const int part = slice * kParts + first / kWidth;", "const int part = first / kWidth;", "the second slice repeats the first"),
    Mutant(TILE, "if (column >= kBlockN) break;", "if (column > kBlockN) break;", "sums beyond the tile's last are staged",
           missed="memory behind the accumulators is read, and staged where nobody looks"),
    Mutant(TILE, "warp_sync();  // the columns in front have been read", "", "columns are staged over those that are still read"),
    Mutant(TILE, "warp_sync();", "", "staged rows are read before they are written", nth=2),
    Mutant(TILE, "load_shared_16(at ^ (i * 4))", "load_shared_16(at + i * 4)", "the second half of a group is looked for behind the first"),
    Mutant(TILE, "warp % 4 * 16 * kColumns * 4;", "warp % 2 * 16 * kColumns * 4;", "two warps stage in one place"),
    Mutant(TILE, "consumer * staging_bytes<kFloat, Tile>() +", "0 * staging_bytes<kFloat, Tile>() +", "the consumers stage in one place"),
    Mutant(TILE, "(Tile::kPingpong ? 0 : consumer * Tile::kConsumerRows) +", "consumer * Tile::kConsumerRows +", "pingpong: the second consumer's rows are taken for another half"),
    Mutant(TILE, "slice * 64 + warp % 4 * 16,", "warp % 4 * 16,", "the second slice uses the rows of the first"),
    Mutant(TILE, "const int parts = (end - n + width - 1) >>", "const int parts = (end - n) >>", "the last columns of a tile are left out"),
    # ---- arithmetic
    Mutant(TILE, "for (int i = 0; i < kCount; i++) v[i] = e.alpha * v[i];", "", "alpha is forgotten"),
    Mutant(TILE, "if (kCount == 1) fetch_bias(r, 0);", "", "single elements have no bias"),
    Mutant(TILE, "v[i] = fma(e.beta, added[i], v[i]);", "v[i] = v[i] + added[i];", "beta is taken for 1"),
    Mutant(TILE, "store_line(e.z, line(e.z, 0), r, v);", "", "z is not written"),
    Mutant(TILE, "store_line(e.z, line(e.z, value), r, w);", "", "z of the values is not written"),
    Mutant(TILE, "load_bias<T>(e.bias.type, line(e.bias, value) +", "load_bias<T>(e.bias.type, line(e.bias, 0) +", "the values take the gates' bias"),
    Mutant(TILE, "v[i] = swiglu(v[i], w[i]);", "v[i] = swiglu(w[i], v[i]);", "gate and value change places"),
    Mutant(TILE, "const int value = halved ? args.n / 2 : args.n;", "const int value = args.n;", "the values begin behind the last column"),
    Mutant(TILE, "load_line(e.preact, line(e.preact, value), r)", "load_line(e.preact, line(e.preact, 0), r)", "the gate is read as the value"),
    Mutant(TILE, "v[i] = g.gate; up_z[i] = g.up;", "v[i] = g.up; up_z[i] = g.gate;", "the two gradients of swiglu change places"),
    # ---- column sums
    Mutant(TILE, "for (int r = rows; r < 16; r++) {", "for (int r = 16; r < 16; r++) {", "rows beyond the last count"),
    Mutant(TILE, "apart < 8; apart *= 2", "apart < 4; apart *= 2", "half of the rows are left out"),
    Mutant(TILE, "(batch * groups + row0 / 16) * pitch", "(row0 / 16) * pitch", "the batches write to one place"),
    Mutant(TILE, "pitch = gated ? 2 * args.n : args.n;", "pitch = args.n;", "the sums' rows are too short with swiglu"),
    Mutant(TILE, "if (column < end) store(sums", "store(sums", "sums of columns beyond the last are stored"),
    Mutant(TILE, "if (e.column_sums) store_staged<kCount, kColumns>(staged, r, x + x0 + kColumns / 2, up_z);", "", "the value's gradients are not summed"),
    Mutant(TILE, "warp_sync();", "", "results are summed before they are written", nth=3),
    Mutant(SUMS, "for (int w = 1; w < kSumWarps; w++) sum += of_warp", "for (int w = 2; w < kSumWarps; w++) sum += of_warp", "a warp's sum is left out"),
    Mutant(SUMS, "block_sync();", "", "the warps do not wait for each other"),
    Mutant(SUMS, "for (; row < rows; row += kSumWarps) sum +=", "for (; false; row += kSumWarps) sum +=", "the last rows are left out"),
]  # fmt: skip

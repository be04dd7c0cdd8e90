"""Bugs in the epilogue of the GEMM kernels."""

from . import Mutant

TEST = "test_gemm_epilogue"
EPILOGUE = "kernels/gemm_epilogue.cuh"
TILE = "kernels/gemm_sm90_epilogue.cuh"
SUMS = "kernels/gemm_column_sums.cu"

MUTANTS = [
    # ---- operands
    Mutant(EPILOGUE, "column + 8 * kBlocks - 7 < end &&", "true &&", "pairs are read beyond the last column"),
    Mutant(EPILOGUE, "inside[2] = {row < rows, row + 8 < rows}", "inside[2] = {true, true}", "rows beyond the last are read"),
    Mutant(
        EPILOGUE,
        "reinterpret_cast<uintptr_t>(p) % (2 * sizeof(T)) == 0",
        "true",
        "two values move as one access wherever they lie",
    ),
    Mutant(EPILOGUE, "t.column_stride == 1 && reinterpret", "reinterpret", "columns that lie apart move as pairs"),
    Mutant(EPILOGUE, "inside[i / 2 % 2] && column + x < end", "inside[i / 2 % 2]", "single columns beyond the last are read"),
    Mutant(EPILOGUE, "raw[i / 4][i / 2 % 2][i % 2], t.type)", "raw[i / 4][i % 2][i / 2 % 2], t.type)", "rows and columns of a block change places"),
    Mutant(EPILOGUE, "type == DType::kBFloat16 ? to_float(bf16{x.bits})", "false ? to_float(bf16{x.bits})", "bf16 is read as fp16"),
    Mutant(EPILOGUE, "type == DType::kBFloat16 ? round_pair<bf16>(x, y)", "true ? round_pair<bf16>(x, y)", "pairs of fp16 are rounded to bf16"),
    Mutant(EPILOGUE, "type == DType::kBFloat16 ? round_to<bf16>(x).bits", "true ? round_to<bf16>(x).bits", "single fp16 values are rounded to bf16"),
    Mutant(EPILOGUE, "row + 8 * r >= rows || x >= end", "x >= end", "rows beyond the last are written"),
    Mutant(EPILOGUE, "row + 8 * r >= rows || x >= end", "row + 8 * r >= rows", "columns beyond the last are written"),
    Mutant(EPILOGUE, "if (pairs && x + 1 < end) {", "if (pairs) {", "the last odd column is written as a pair"),
    Mutant(EPILOGUE, "if (x + 1 < end) store_value", "store_value", "a single last column is followed by another"),
    Mutant(EPILOGUE, "batch * t.batch_stride + row", "row", "every product of a batch uses the first one's operands"),
    # ---- arithmetic
    Mutant(EPILOGUE, "return e.alpha * x + bias;", "return e.alpha * (x + bias);", "alpha multiplies the bias as well"),
    Mutant(EPILOGUE, "} else if (e.alpha != 1.0f) {", "} else if (false) {", "without a bias alpha is forgotten"),
    Mutant(EPILOGUE, "return fma(e.beta, r, x);", "return x + r;", "beta is taken for 1"),
    Mutant(EPILOGUE, "if (e.z.data) write_values(e.z, args.m, at, h, 0, v[0]);", "", "z is not written"),
    Mutant(EPILOGUE, "f(opaque(h));", "f(0);", "both halves use the operands of the first"),
    Mutant(EPILOGUE, "v[1][i / 4][i % 4] = x;", "", "the halves do not change places"),
    Mutant(EPILOGUE, "return swiglu(gate, up);", "return swiglu(up, gate);", "gate and value change places"),
    Mutant(EPILOGUE, "if (gated && !backward) each(v[1]", "if (gated) each(v[1]", "swiglu is applied in its backward, too"),
    Mutant(EPILOGUE, "read_values(e.preact, args.m, at, h, args.n, up);", "read_values(e.preact, args.m, at, h, 0, up);", "the gate is read as the value"),
    Mutant(EPILOGUE, "v[0][i / 4][i % 4] = g.gate; up[i / 4][i % 4] = g.up;", "v[0][i / 4][i % 4] = g.up; up[i / 4][i % 4] = g.gate;", "the two gradients of swiglu change places"),
    Mutant(EPILOGUE, "if (h == 1 && gated && !backward) return;", "", "the value's half is stored as a result"),
    Mutant(EPILOGUE, "args.epilogue.residual = q.c;", "", "what is in C is forgotten where TMA cannot add to it"),
    # ---- column sums
    Mutant(EPILOGUE, "(at.row < args.m ? v[j][i] : 0.0f)", "v[j][i]", "rows beyond the last count",
           missed="such rows are 0 anyway: TMA fills A with zeros beyond its edge"),
    Mutant(EPILOGUE, "int mask = 4; mask < kWarpThreads", "int mask = 8; mask < kWarpThreads", "half of the rows are left out"),
    Mutant(EPILOGUE, "(static_cast<int64_t>(at.batch) * groups + group) * pitch", "static_cast<int64_t>(group) * pitch", "the batches write to one place"),
    Mutant(EPILOGUE, "Activation::swiglu ? 2 * args.n : args.n;", "Activation::swiglu ? args.n : args.n;", "the sums' rows are too short with swiglu"),
    Mutant(EPILOGUE, "if (lane < 4 && group < groups && x", "if (lane < 4 && x", "sums of rows beyond the last are stored"),
    Mutant(EPILOGUE, "if (e.column_sums) sum_columns(args, at, h, args.n, up);", "", "the value's gradients are not summed"),
    Mutant(SUMS, "for (int w = 1; w < kSumWarps; w++) sum += of_warp", "for (int w = 2; w < kSumWarps; w++) sum += of_warp", "a warp's sum is left out"),
    Mutant(SUMS, "block_sync();", "", "the warps do not wait for each other"),
    Mutant(SUMS, "for (; row < rows; row += kSumWarps) sum +=", "for (; false; row += kSumWarps) sum +=", "the last rows are left out"),
    # ---- the tile
    Mutant(TILE, "at.end[1] = halved ? args.n : args.columns;", "at.end[1] = args.columns;", "the value's columns end where the gate's do"),
    Mutant(TILE, "(kHalvesApart ? args.second_half : kHalfPitch);", "kHalfPitch;", "the value is taken for a column of the tile"),
    Mutant(TILE, "chunk % kChunks * (kChunkPitch / 2) + j / 4", "j / 4", "every chunk is the first"),
    Mutant(TILE, "row = m + i / kChunks * 64;", "row = m;", "the second slice uses the rows of the first"),
    Mutant(TILE, "kHalvesApart && !halved ? 2 : 1", "kHalvesApart ? 2 : 1", "with swiglu a tile stores the values beside its results"),
    Mutant(TILE, "fence_proxy_async();", "", "no proxy fence before the store of staged results"),
    Mutant(TILE, "if (thread == 0) bulk_wait_read<0>();", "", "the staging buffer is reused under a store"),
    Mutant(TILE, "h * kSliceBytes : 0) + box_offset", "0 : 0) + box_offset", "both halves are staged in one box"),
]  # fmt: skip

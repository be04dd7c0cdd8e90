"""Bugs in the mma.sync GEMM and in what it stands on."""

from . import Mutant

TEST = "test_gemm_sm80"
KERNEL = "gemm/sm80/gemm.cuh"
OPERAND = "gemm/sm80/operand.cuh"
HOST = "gemm/sm80/gemm.cu"
EPILOGUE = "gemm/epilogue.cuh"
ELEMENT = "base/element.cuh"

MUTANTS = [
    # ---- the ring of steps
    Mutant(
        KERNEL,
        "args.stages - (shifted ? 3 : 2);",
        "args.stages - (shifted ? 2 : 1);",
        "a barrier waits for one step too few",
    ),
    Mutant(KERNEL, "(shifted ? 3 : 2)", "2", "the words of shifted operands are not waited for a step earlier"),
    Mutant(KERNEL, "if (newer == 0)", "if (newer == 3)", "with three stages, the wait leaves one copy too many"),
    Mutant(
        KERNEL,
        "wait_for_copies(newer); block_sync();  // the next stage has arrived",
        "block_sync();  // the next stage has arrived",
        "no wait for the copies of a step",
    ),
    Mutant(
        KERNEL,
        "block_sync();  // the next stage has arrived, and no warp reads the current one any more",
        "",
        "no barrier between steps",
    ),
    Mutant(
        KERNEL,
        "wait_for_copies(newer); block_sync(); if (shifted)",
        "wait_for_copies(newer); if (shifted)",
        "no barrier before the first fragments",
    ),
    Mutant(KERNEL, "shift(ring); block_sync();", "shift(ring);", "no barrier after the first shift"),
    Mutant(KERNEL, "if (shifted && !last) shift(next);", "", "only the first step is shifted"),
    Mutant(KERNEL, "if (shifted && !last) shift(next);", "if (shifted) shift(next);", "shifts a step that never comes"),
    Mutant(KERNEL, "shift(next);", "shift(stage);", "shifts the step in use"),
    Mutant(KERNEL, "fill = ring_end - stage_bytes;", "fill = ring;", "a copy fills the stage in use"),
    Mutant(KERNEL, "fill = stage;", "fill = next;", "a copy fills the stage that is read next"),
    Mutant(
        KERNEL,
        "copy_commit();  // also if empty, so that groups count steps",
        "if (k < work.k_end) copy_commit();",
        "the last steps have no group, so the waits count wrong",
    ),
    Mutant(
        KERNEL, "copy(k + (args.stages - 1) * kBlockK, fill);", "copy(k + args.stages * kBlockK, fill);", "skips a step"
    ),
    Mutant(
        KERNEL,
        "block_sync();  // no warp reads the ring any more",
        "",
        "the epilogue overwrites the ring while another warp reads it",
    ),
    # ---- operands in shared memory
    Mutant(
        OPERAND,
        "((offset / 16) ^ (mine / 2 % 4)) * 16",
        "offset / 16 * 16",
        "copies do not exchange the chunks of a strip",
    ),
    Mutant(OPERAND, "lane % 8 / 2;", "lane % 8 / 4;", "fragments exchange the chunks otherwise than copies"),
    Mutant(
        OPERAND,
        "args.path == CopyPath::kShifted ? 0 : lane % 8 / 2",
        "lane % 8 / 2",
        "fragments exchange the chunks of shifted strips",
    ),
    Mutant(OPERAND, "? beside : at + 16 * pitch;", "? at + 16 * pitch : beside;", "k and rows of a block are swapped"),
    Mutant(
        OPERAND,
        "corner_[1][1] = beside + 16 * pitch;",
        "corner_[1][1] = beside;",
        "the fourth block lies over the second",
    ),
    Mutant(
        OPERAND,
        "thirty_two_strips_ = 32 * pitch;",
        "thirty_two_strips_ = 32 * kStripBytes;",
        "the pitch of shifted strips",
    ),
    Mutant(
        OPERAND,
        "const int row = kA ? low : high, k = kA ? high : low;",
        "const int row = low, k = high;",
        "B's registers in A's order",
    ),
    Mutant(OPERAND, "transposed_ = !k_major;", "transposed_ = false;", "m- and n-major operands are not transposed"),
    Mutant(
        OPERAND, "first / 16 % 2 * 2 + row", "row", "warps on odd blocks of 16 columns read those of their neighbours"
    ),
    Mutant(
        OPERAND,
        "constexpr int kShiftedPitch = 16 * kRawWords;",
        "constexpr int kShiftedPitch = 64;",
        "shifted strips overlap",
    ),
    # ---- copies within the edges
    Mutant(
        OPERAND, "if (whole_ && k + kBlockK <= k_end_ && !first)", "if (whole_ && !first)", "the last k are not cut off"
    ),
    Mutant(
        OPERAND,
        "if (whole_ && k + kBlockK <= k_end_ && !first)",
        "if (k + kBlockK <= k_end_ && !first)",
        "the last rows are not cut off",
    ),
    Mutant(
        OPERAND, "rows.first[1] + kRows / 2 <= rows.end[1];", "true;", "the end of the second half is not looked at"
    ),
    Mutant(OPERAND, "&& !first) {", ") {", "reads the word in front of the operand"),
    Mutant(OPERAND, "next_ += args_.next_step;", "next_ += kStripBytes;", "the next step of an m-major operand"),
    Mutant(
        OPERAND,
        "if (i + kBlock == kRows / 2) block = opaque(block + args_.second_half);",
        "",
        "gate columns twice, no value columns",
    ),
    Mutant(
        OPERAND, "block * 2 * (k_major ? ld : 1)", "block * 2 * ld", "blocks of an m-major operand lie apart by rows"
    ),
    Mutant(OPERAND, "at_once * 2 * ld,", "at_once * 2,", "strips of 32 lie apart by columns"),
    Mutant(
        OPERAND, "apart * 2 * (k_major ? ld : 1)", "apart * 2", "the second half of a k-major B begins in the same row"
    ),
    # ---- shifting
    Mutant(OPERAND, "ahead & 8 ? w[e + 2] : w[e]", "w[e]", "no shift by 8 bytes"),
    Mutant(OPERAND, "ahead & 4 ? w[e + 1] : w[e]", "w[e]", "no shift by 4 bytes"),
    Mutant(OPERAND, ">> (8 * (ahead & 2))", "", "no shift by 2 bytes"),
    Mutant(
        OPERAND,
        "copy_async<16, true>(to + i * kShiftedPitch + kStripBytes, start - ahead + kStripBytes, ahead);",
        "copy_async<16, true>(to + i * kShiftedPitch + kStripBytes, start - ahead + kStripBytes, 0);",
        "the fifth word stays empty",
    ),
    Mutant(
        OPERAND,
        "copy_async<16, true>(to + i * kShiftedPitch + kStripBytes, start - ahead + kStripBytes, ahead);",
        "copy_async<16, true>(to + i * kShiftedPitch + kStripBytes, start - ahead + kStripBytes);",
        "the fifth word is read beyond the strip, and beyond the operand",
    ),
    # ---- copies with edges
    Mutant(OPERAND, "clamp(s.bytes - offset, 0, kBytes)", "kBytes", "nothing is filled with zeros"),
    Mutant(
        OPERAND,
        "row < end ? 2 * clamp(k_end_ - k, 0, kBlockK) : 0",
        "2 * clamp(k_end_ - k, 0, kBlockK)",
        "rows beyond the edge",
    ),
    Mutant(
        OPERAND, "row < end ? 2 * clamp(k_end_ - k, 0, kBlockK) : 0", "row < end ? kStripBytes : 0", "k beyond the edge"
    ),
    Mutant(
        OPERAND,
        "depth < k_end_ ? 2 * clamp(end - row, 0, kBlockK) : 0",
        "2 * clamp(end - row, 0, kBlockK)",
        "k beyond the edge, m-major",
    ),
    Mutant(
        OPERAND,
        "depth < k_end_ ? 2 * clamp(end - row, 0, kBlockK) : 0",
        "depth < k_end_ ? kStripBytes : 0",
        "rows beyond the edge, m-major",
    ),
    Mutant(
        OPERAND,
        "clamp(s.bytes + ahead - offset, 0, 16)",
        "clamp(s.bytes - offset, 0, 16)",
        "a shifted strip loses its end",
    ),
    Mutant(
        OPERAND, "if (bytes > 0 && from < data_)", "if (false)", "the first word is read from in front of the operand"
    ),
    Mutant(
        OPERAND,
        "inside ? load(reinterpret_cast<const uint16_t*>(from + e)) : uint16_t{0}",
        "uint16_t{0}",
        "the first word stays empty",
    ),
    Mutant(
        OPERAND,
        "second ? rows_.first[1] - kRows / 2 : rows_.first[0]",
        "rows_.first[0]",
        "value columns where gate and value lie apart",
    ),
    Mutant(
        OPERAND,
        "const int end = second ? rows_.end[1] : rows_.end[0];",
        "const int end = rows_.end[0];",
        "the value columns end where the gate does",
    ),
    # ---- tensor cores
    Mutant(
        KERNEL,
        "mma_m16n8k16<T>(sums[1], from_a[k16][i], {r[2], r[3]});",
        "mma_m16n8k16<T>(sums[1], from_a[k16][i], {r[0], r[1]});",
        "the same eight columns twice",
    ),
    Mutant(
        KERNEL,
        "const auto& r = from_b[q % 2];",
        "const auto& r = from_b[0];",
        "odd pairs of columns multiply what is being loaded",
    ),
    Mutant(
        KERNEL,
        "address_a.load(from_a[k16][i], stage, 16 * i, k16);",
        "address_a.load(from_a[k16][i], stage, 16 * i, 0);",
        "A's first 16 k twice",
    ),
    Mutant(KERNEL, "q / Tile::kParts * kHalf + q % Tile::kParts * 16", "q * 16", "a warp's columns side by side"),
    Mutant(
        KERNEL,
        "float acc[Tile::kChunks][2][2][4] = {};",
        "float acc[Tile::kChunks][2][2][4]; acc[0][0][0][0] = 1;",
        "sums start from anything",
    ),
    # ---- which tile
    Mutant(
        KERNEL,
        "high = rows - group * kRaster < kRaster ? rows - group * kRaster : kRaster;",
        "high = kRaster;",
        "the last group of rows of tiles is full",
    ),
    Mutant(
        KERNEL,
        "args.k - work.k < args.k_per_split ? args.k : work.k + args.k_per_split;",
        "work.k + args.k_per_split;",
        "the last split runs over k",
    ),
    Mutant(KERNEL, "work.batch * (rows * columns) + tile;", "tile;", "batches share their counters and sums"),
    Mutant(
        OPERAND,
        "data_(args.data + batch * args.batch_stride)",
        "data_(args.data)",
        "every batch multiplies the first one",
    ),
    # ---- splits
    Mutant(
        KERNEL,
        "block_sync();  // every thread's part is ordered before thread 0's release, and the ring is free",
        "",
        "thread 0 counts before the others have stored",
    ),
    Mutant(KERNEL, "others ? 1u : 0u; } block_sync();", "others ? 1u : 0u; }", "threads do not wait for the verdict"),
    Mutant(
        KERNEL,
        "if (is_last[0] == 0u) return false;",
        "if (work.split != 0) return false;",
        "the first part adds, not the last",
    ),
    Mutant(
        KERNEL,
        "sum = split == 0 ? part[i / 4][i % 4] : sum + part[i / 4][i % 4];",
        "sum = sum + part[i / 4][i % 4];",
        "the last part counts twice",
    ),
    Mutant(
        KERNEL,
        "static_cast<uint32_t>(args.splits) - 1;",
        "static_cast<uint32_t>(args.splits);",
        "the last part waits for one more",
    ),
    Mutant(
        HOST,
        "int useful_splits(int k, int splits) { return ceil_div(k, k_per_split(k, splits)); }",
        "int useful_splits(int, int splits) { return splits; }",
        "splits without any k",
    ),
    Mutant(
        HOST,
        "ceil_div(ceil_div(k, kBlockK), splits) * kBlockK;",
        "ceil_div(k, splits);",
        "splits that begin within a step",
    ),
    # ---- output
    Mutant(
        KERNEL, "warp_sync(); const int row = row_", "const int row = row_", "lanes read rows that others still write"
    ),
    Mutant(
        KERNEL,
        "warp_sync();  // the rows have been read before the next chunk overwrites them",
        "",
        "the next chunk overwrites rows that are still read",
    ),
    Mutant(
        KERNEL,
        "corner_ = dynamic_shared() + warp_index() * kBytes;",
        "corner_ = dynamic_shared();",
        "warps share their corner",
    ),
    Mutant(KERNEL, "first_row + row >= args_.finish.m || left <= 0", "left <= 0", "rows beyond the edge are stored"),
    Mutant(
        KERNEL,
        "if (first_row + row >= args_.finish.m) continue;",
        "",
        "rows beyond the edge are stored, element by element",
    ),
    Mutant(KERNEL, "if (left >= each) {", "if (true) {", "columns beyond the edge are stored, 16 bit"),
    Mutant(KERNEL, "if (left >= each) {", "if (true) {", "columns beyond the edge are stored, fp32", nth=2),
    Mutant(KERNEL, "x + 2 <= size)", "x + 1 <= size)", "a pair runs over the last column"),
    Mutant(KERNEL, "x + e >= 0 && x + e < size", "x + e < size", "a row begins one element early"),
    Mutant(
        KERNEL, "kColumns / kEach + kEach - 1;", "kColumns / kEach;", "the last element of a skewed row is forgotten"
    ),
    Mutant(KERNEL, "const int skew = apart ? 0 :", "const int skew = true ? 0 :", "pairs that are not 4-byte aligned"),
    Mutant(KERNEL, "if (kEach == 2 && !apart &&", "if (kEach == 2 &&", "pairs where columns lie apart"),
    Mutant(KERNEL, "+ 8 * r;", "+ 4 * r;", "the lower eight rows of a chunk"),
    Mutant(KERNEL, "halves_ = halved ? 1 : 2;", "halves_ = 2;", "the value columns of swiglu are stored too"),
    Mutant(
        KERNEL,
        "type == DType::kBFloat16 ? round_pair<bf16>(x, y) : round_pair<fp16>(x, y)",
        "round_pair<bf16>(x, y)",
        "fp16 results rounded to bf16",
    ),
    Mutant(
        KERNEL,
        "acc[i + 1][e / 8][e / 4 % 2][e % 4];",
        "acc[i][e / 8][e / 4 % 2][e % 4];",
        "every chunk is the first one",
    ),
    Mutant(
        KERNEL,
        "output.put(c, acc[0]); AK_UNROLL for (int i = 0; i + 1",
        "AK_UNROLL for (int i = 0; i + 1",
        "a finished chunk is not stored",
    ),
    Mutant(HOST, "(q.m == 1 || wide(q.c.row_stride))", "true", "16-byte stores to rows that are not aligned"),
    Mutant(HOST, "q.c.column_stride == 1 &&", "", "16-byte stores where columns lie apart"),
    Mutant(HOST, "(q.batch == 1 || wide(q.c.batch_stride))", "true", "16-byte stores to batches that are not aligned"),
    # ---- how operands are copied
    Mutant(
        HOST, "distances |= static_cast<uint64_t>(ld * 2);", "distances |= 0;", "the leading dimension is not aligned"
    ),
    Mutant(
        HOST,
        "distances |= static_cast<uint64_t>(batch_stride * 2);",
        "distances |= 0;",
        "the batch stride is not aligned",
    ),
    Mutant(HOST, "| static_cast<uint64_t>(second_half * 2);", ";", "an n-major B whose value columns are not aligned"),
    Mutant(HOST, "rows_of_a(q) > 1 ? q.ld_a : 0", "q.ld_a", "the distance to a second row that does not exist"),
    Mutant(
        HOST,
        "distances % 4 == 0 ? CopyPath::k4Bytes",
        "distances % 2 == 0 ? CopyPath::k4Bytes",
        "4-byte copies of odd rows",
    ),
    Mutant(
        HOST, "args.finish.epilogue.beta = 1.0f;", "args.finish.epilogue.beta = 0.0f;", "C is overwritten, not added to"
    ),
    # ---- the epilogue: operands
    Mutant(EPILOGUE, "column + 8 * kBlocks - 7 < end &&", "true &&", "pairs are read beyond the last column"),
    Mutant(
        EPILOGUE,
        "inside[2] = {row < rows, row + 8 < rows}",
        "inside[2] = {true, true}",
        "rows beyond the last are read",
    ),
    Mutant(
        EPILOGUE,
        "reinterpret_cast<uintptr_t>(p) % (2 * sizeof(T)) == 0",
        "true",
        "two values move as one access wherever they lie",
    ),
    Mutant(EPILOGUE, "t.column_stride == 1 && reinterpret", "reinterpret", "columns that lie apart move as pairs"),
    Mutant(
        EPILOGUE,
        "inside[i / 2 % 2] && column + x < end",
        "inside[i / 2 % 2]",
        "single columns beyond the last are read",
    ),
    Mutant(
        EPILOGUE,
        "raw[i / 4][i / 2 % 2][i % 2], t.type)",
        "raw[i / 4][i % 2][i / 2 % 2], t.type)",
        "rows and columns of a block change places",
    ),
    Mutant(
        ELEMENT,
        "dtype == DType::kBFloat16 ? to_float(bf16{bits})",
        "false ? to_float(bf16{bits})",
        "bf16 is read as fp16",
    ),
    Mutant(
        EPILOGUE,
        "type == DType::kBFloat16 ? round_pair<bf16>(x, y)",
        "true ? round_pair<bf16>(x, y)",
        "pairs of fp16 are rounded to bf16",
    ),
    Mutant(
        ELEMENT,
        "dtype == DType::kBFloat16 ? round_to<bf16>(x).bits",
        "true ? round_to<bf16>(x).bits",
        "single fp16 values are rounded to bf16",
    ),
    Mutant(EPILOGUE, "row + 8 * r >= rows || x >= end", "x >= end", "rows beyond the last are written"),
    Mutant(EPILOGUE, "row + 8 * r >= rows || x >= end", "row + 8 * r >= rows", "columns beyond the last are written"),
    Mutant(EPILOGUE, "if (pairs && x + 1 < end) {", "if (pairs) {", "the last odd column is written as a pair"),
    Mutant(EPILOGUE, "if (x + 1 < end) store_value", "store_value", "a single last column is followed by another"),
    Mutant(EPILOGUE, "batch * t.batch_stride + row", "row", "every product of a batch uses the first one's operands"),
    # ---- its arithmetic
    Mutant(
        EPILOGUE, "return fma(e.alpha, x, bias);", "return e.alpha * (x + bias);", "alpha multiplies the bias as well"
    ),
    Mutant(EPILOGUE, "} else if (e.alpha != 1.0f) {", "} else if (false) {", "without a bias alpha is forgotten"),
    Mutant(EPILOGUE, "return fma(e.beta, r, x);", "return x + r;", "beta is taken for 1"),
    Mutant(EPILOGUE, "if (e.z.data) write_values(e.z, args.m, at, h, 0, v[0]);", "", "z is not written"),
    Mutant(EPILOGUE, "f(opaque(h));", "f(0);", "both halves use the operands of the first"),
    Mutant(EPILOGUE, "v[1][i / 4][i % 4] = x;", "", "the halves do not change places"),
    Mutant(EPILOGUE, "return swiglu(gate, up);", "return swiglu(up, gate);", "gate and value change places"),
    Mutant(
        EPILOGUE, "if (gated && !backward) each(v[1]", "if (gated) each(v[1]", "swiglu is applied in its backward, too"
    ),
    Mutant(
        EPILOGUE,
        "read_values(e.preact, args.m, at, h, args.n, up);",
        "read_values(e.preact, args.m, at, h, 0, up);",
        "the gate is read as the value",
    ),
    Mutant(
        EPILOGUE,
        "v[0][i / 4][i % 4] = g.gate; up[i / 4][i % 4] = g.up;",
        "v[0][i / 4][i % 4] = g.up; up[i / 4][i % 4] = g.gate;",
        "the two gradients of swiglu change places",
    ),
    # ---- its column sums
    Mutant(
        EPILOGUE,
        "(at.row < args.m ? v[j][i] : 0.0f)",
        "v[j][i]",
        "rows beyond the last count",
        missed="such rows are 0 anyway: TMA fills A with zeros beyond its edge",
    ),
    Mutant(
        EPILOGUE,
        "int mask = 4; mask < kWarpThreads",
        "int mask = 8; mask < kWarpThreads",
        "half of the rows are left out",
    ),
    Mutant(
        EPILOGUE,
        "(static_cast<int64_t>(at.batch) * groups + group) * pitch",
        "static_cast<int64_t>(group) * pitch",
        "the batches write to one place",
    ),
    Mutant(
        EPILOGUE,
        "Activation::swiglu ? 2 * args.n : args.n;",
        "Activation::swiglu ? args.n : args.n;",
        "the sums' rows are too short with swiglu",
    ),
    Mutant(
        EPILOGUE, "if (lane < 4 && group < groups && x", "if (lane < 4 && x", "sums of rows beyond the last are stored"
    ),
    Mutant(
        EPILOGUE, "if (e.column_sums) sum_columns(args, at, h, args.n, up);", "", "the value's gradients are not summed"
    ),
]

"""Bugs in the epilogue of the wgmma GEMM whose operands and results TMA moves."""

from . import Mutant

TEST = "test_gemm_boxes"
KERNEL = "kernels/gemm_sm90.cuh"
BOXES = "kernels/gemm_sm90_boxes.cuh"
STORE = "kernels/gemm_sm90_store.cuh"
ARGS = "kernels/gemm_sm90_tile.cuh"

MUTANTS = [
    # ---- which boxes
    Mutant(BOXES, "(Tile::kPingpong ? 0 : opaque(consumer) * Tile::kConsumerRows)", "opaque(consumer) * Tile::kConsumerRows", "pingpong: the second consumer's rows are taken for another half"),
    Mutant(BOXES, "batch(opaque(work.batch))", "batch(0)", "every product of a batch takes the first one's boxes"),
    Mutant(BOXES, "args.columns - n < args.tile_columns ? args.columns - n : args.tile_columns;", "args.tile_columns;", "boxes beside C are finished"),
    Mutant(BOXES, "m >= args.m ? 0 :", "", "a consumer whose rows lie below C finishes them",
           missed="TMA loads zeros and stores nothing there, and sums have their own check"),
    Mutant(BOXES, "Tile::kSlicesM == 1 || m + 64 >= args.m ? 1 : 2;", "1;", "the second slice is left out"),
    Mutant(BOXES, "(columns + kColumns - 1) / kColumns", "columns / kColumns", "a tile's last columns are left out"),
    Mutant(BOXES, "(step - slice(step) * in_slice) * kColumns;", "step * kColumns;", "the second slice lies beside the first"),
    Mutant(BOXES, "return m + slice(step) * 64;", "return m;", "the second slice takes the rows of the first"),
    Mutant(BOXES, "return pairs ? 0 : step % 2;", "return 0;", "the second box is loaded over the first"),
    Mutant(BOXES, "pairs ? 2 * kSliceBytes : kSliceBytes", "kSliceBytes", "of a pair one box is waited for"),
    Mutant(BOXES, "n + first_column(step), row(step), 1);", "n + first_column(step), row(step), 0);", "the gate is loaded as the value", nth=2),
    Mutant(BOXES, "tma_prefetch(beside, n + first_column(step), row(step), batch);", "", "nothing is asked into L2"),
    Mutant(BOXES, "if (pairs) tma_prefetch(beside, n + first_column(step), row(step), 1);", "", "the values are not asked into L2"),
    Mutant(BOXES, "bulk_wait_read<0>();", "", "a tile's first boxes are loaded under the last one's store"),
    Mutant(BOXES, "step < (pairs ? 1 : 2) && step < steps", "step < 2 && step < steps", "two pairs are loaded into one place"),
    Mutant(BOXES, "&& step < steps; step++) load", "; step++) load", "a box is loaded that nobody waits for"),
    # ---- values in a box
    Mutant(BOXES, "box_offset(warp * 16 + lane % 16, lane / 16)", "box_offset(warp * 16 + lane % 16, 0)", "the right 8 columns are taken for the left"),
    Mutant(BOXES, "box_offset(warp * 16 + lane / 4, lane % 4 / 2) + lane % 2 * 8", "box_offset(warp * 16 + lane / 4, lane % 4 / 2)", "fp32: two lanes share a pair"),
    Mutant(BOXES, "high = to_float(T{static_cast<uint16_t>(pair >> 16)});", "high = low;", "two columns share what is read"),
    Mutant(BOXES, "(at ^ (i / 4 << 5)) + i / 2 % 2 * 1024", "(at ^ (i / 4 << 5)) + i / 2 % 2 * 128", "fp32: the lower rows are read one below the upper"),
    Mutant(BOXES, "round_pair<T>(v[2 * i], v[2 * i + 1])", "round_pair<T>(v[2 * i + 1], v[2 * i])", "two results change places"),
    Mutant(BOXES, "half << (kFloat ? 6 : 5)", "half << 5", "fp32: the second 16 columns are the second 8"),
    Mutant(BOXES, "read_half<T, kFloat>(at ^ offset_of_half<kFloat>(1), v + 8);", "read_half<T, kFloat>(at, v + 8);", "16 columns of the residual serve 32"),
    Mutant(BOXES, "^ (in_box << 1)", "^ (in_box & 0)", "the second 32 columns take the place of the first"),
    # ---- bias
    Mutant(BOXES, "raw.words[i] = 0x80008000u;", "raw.words[i] = 0x3c003c00u;", "no bias is one"),
    Mutant(BOXES, "column + lane % 4 * 2;", "column;", "the lanes share a pair of the bias"),
    Mutant(BOXES, "if (column + kChunk <= end) {", "if (true) {", "the bias is read beyond the last column"),
    Mutant(BOXES, "static_cast<int>(first) + 8 * b < end", "column + 8 * b < end", "of 8 columns that are not all there the bias is read"),
    Mutant(BOXES, "load(from + 4 * b)", "load(from)", "8 columns of the bias serve 32"),
    Mutant(BOXES, "if (!is_float) {", "if (true) {", "a bias in fp32 is taken for one of 16 bits"),
    Mutant(BOXES, "Tile::kSlicesM == 1 || column + kChunk < in_slice * kColumns ? column + kChunk : 0;", "column + kChunk;", "the second slice takes the bias behind the first"),
    Mutant(BOXES, "boxes.n + column + end / 2, lane", "boxes.n + column, lane", "the values take the gates' bias"),
    Mutant(ARGS, "args.float_bias = e.bias.data && e.bias.type == DType::kFloat32;", "args.float_bias = e.bias.type == DType::kFloat32;", "no bias is taken for one in fp32"),
    # ---- the sums
    Mutant(BOXES, "if (chunk < kMiddle) {", "if (chunk <= kMiddle) {", "a chunk takes the sums in front of it"),
    Mutant(BOXES, "kFirst % kInSlice * kValues", "0 * kInSlice * kValues", "every chunk takes the first one's sums"),
    Mutant(BOXES, "acc[kFirst / kInSlice]", "acc[0]", "the second slice repeats the first"),
    Mutant(BOXES, "fma(alpha, sums[i], bias[i / 4 * 2 + i % 2])", "sums[i] + bias[i / 4 * 2 + i % 2]", "alpha is forgotten"),
    Mutant(BOXES, "bias[i / 4 * 2 + i % 2]", "bias[i / 2]", "rows and columns of the bias change places"),
    Mutant(BOXES, "chunk + Tile::kBlockN / 2 / kChunk", "chunk", "the gate is its own value"),
    Mutant(BOXES, "v[i] = swiglu(v[i], up[i]);", "v[i] = swiglu(up[i], v[i]);", "gate and value change places"),
    Mutant(BOXES, "v[i] = fma(e.beta, side[i], v[i]);", "v[i] = v[i] + side[i];", "beta is taken for 1"),
    Mutant(BOXES, "read_half<T, kFloat>(gates + kSliceBytes, up + 8 * half);", "read_half<T, kFloat>(gates, up + 8 * half);", "the gate is read as the value"),
    Mutant(BOXES, "v[i] = g.gate;", "v[i] = g.up;", "the gate's gradient is the value's"),
    Mutant(BOXES, "if (gated) write_box<T, kFloat>(at + kSliceBytes, up);", "", "the value's gradients are not written"),
    # ---- boxes take turns
    Mutant(BOXES, "loaded_phases ^= 1 << slot;", "", "the second time a box is not waited for"),
    Mutant(BOXES, "slot ^= boxes.pairs ? 0 : 1", "slot ^= 0", "all boxes go through one place"),
    Mutant(BOXES, "if (thread == 0 && step == 0) bulk_wait_read<0>();", "", "a tile's first box is written under the last one's store"),
    Mutant(BOXES, "if (thread == 0 && step != 0) bulk_wait_read<1>();", "", "a box is written under the store before the last"),
    Mutant(BOXES, "named_barrier(consumer + 1, kWarpgroupThreads);", "", "nobody waits until a box is free"),
    Mutant(BOXES, "if (reads) warp_sync();", "", "what was here has not been read by all",
           missed="the lanes of ldmatrix read what stmatrix writes at one time: the emulator runs both for a warp at once"),
    Mutant(BOXES, "publish_staging(consumer);", "", "a box is stored that is not finished"),
    Mutant(BOXES, "if (boxes.pairs) tma_store(map_c, slots + kSliceBytes, x, y, 1);", "", "the value's gradients are not stored"),
    Mutant(BOXES, "bulk_wait_read<0>();", "", "a box is loaded under its store", nth=3),
    Mutant(BOXES, "step + (boxes.pairs ? 1 : 2);", "step + 2;", "every other pair is left out"),
    Mutant(BOXES, "if (!reads || next >= boxes.steps) continue;", "if (!reads) continue;", "a box is loaded that nobody waits for"),
    # ---- column sums
    Mutant(BOXES, "if (rows < 16) {", "if (false) {", "rows below C count",
           missed="they are zeros times what B holds: only beside an infinity of its they change a sum, to NaN"),
    Mutant(BOXES, "if (lane / 4 + 8 >= rows) sum[i] = v[i / 2 * 4 + i % 2] + 0.0f;", "", "of the last 16 rows the lower ones count that are not there",
           missed="they are zeros times what B holds, as above"),
    Mutant(BOXES, "const bool second = lane & apart;", "const bool second = false;", "all lanes end with the first columns"),
    Mutant(BOXES, "sum[i] = kept + shuffle_xor(given, apart);", "sum[i] = kept + shuffle_xor(given, 1);", "columns are added, not rows"),
    Mutant(BOXES, "lane % 4 * 2 + lane / 16;", "lane % 4 * 2;", "two columns are stored in one place"),
    Mutant(BOXES, "if (column < columns) store(", "store(", "sums of columns beyond the last are stored"),
    Mutant(BOXES, "boxes.batch * static_cast<int64_t>((args.m + 15) / 16) +", "", "the batches write to one place"),
    Mutant(BOXES, "group * (gated ? 2 * end : end)", "group * end", "the sums' rows are too short with swiglu"),
    Mutant(BOXES, "&& row < args.m) {", ") {", "sums of rows below C are stored"),
    Mutant(BOXES, "if (gated) store_column_sums(", "if (false) store_column_sums(", "the value's gradients are not summed"),
    # ---- z, and what goes before what
    Mutant(STORE, "of_b += args.values_further;", "", "z: the values take the gates' bias"),
    Mutant(STORE, "x -= Tile::kBlockN / 2;", "", "z: the values lie half a tile further on"),
    Mutant(STORE, "matrix = 1;", "", "z: the values are stored over the gates"),
    Mutant(KERNEL, "store_tile<T, kFloat, Tile>(acc, change, e.z.data ? &map_z : &map_c,", "store_tile<T, kFloat, Tile>(acc, change, &map_c,", "z is stored into C"),
    Mutant(KERNEL, "if (args.reads_early) boxes.first_loads", "if (true) boxes.first_loads", "boxes are loaded that are not free, or nobody finishes"),
    Mutant(KERNEL, "args.reads && !args.reads_early &&", "false &&", "boxes are not loaded where they cannot be at first"),
    Mutant(KERNEL, "if (args.reads && thread_of_warpgroup() == 0 && work.split == 0) {", "if (args.reads && thread_of_warpgroup() == 1 && work.split == 0) {", "the first loads wait for another thread's stores"),
    Mutant(KERNEL, "mbarrier_init(loaded + 8 * i, 1);", "mbarrier_init(loaded + 8 * i, 2);", "a box never comes"),
    Mutant(KERNEL, "map_boxes(&map_c, q.c, pairs)", "map_boxes(&map_c, q.c, false)", "the value's gradients have no matrix"),
    Mutant(KERNEL, "e.residual.data ? e.residual : q.c, false", "q.c, false", "C is taken for the residual"),
    Mutant(KERNEL, "in_halves ? columns :", "", "the halves are looked for a batch apart"),
]  # fmt: skip

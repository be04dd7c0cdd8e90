"""Bugs in the order of sums over k, and in sums that start from C."""

from . import Mutant

TEST = "test_gemm_chains"
MAIN = "gemm/sm90/gemm.cuh"
LOOP = "gemm/sm90/main_loop.cuh"
HOST = "gemm/sm90/chained.cuh"
SM80 = "gemm/sm80/gemm.cuh"
OUTPUT = "gemm/sm80/output.cuh"
SM80_HOST = "gemm/sm80/gemm.cu"

MUTANTS = [
    # ---- wgmma
    Mutant(LOOP, "Tile::kChained || !first || k16 != 0", "!first || k16 != 0", "the first wgmma overwrites what was loaded"),
    Mutant(MAIN, "if constexpr (Tile::kChained) start_from_c<Tile>(acc, work, group, args);", "if constexpr (Tile::kChained) { for (auto& slice : acc) for (float& sum : slice) sum = 0.0f; }",
           "C is not loaded"),
    Mutant(LOOP, "const int row = work.m + group * Tile::kConsumerRows + thread / kWarpThreads * 16 + lane / 4;",
           "const int row = work.m + thread / kWarpThreads * 16 + lane / 4;", "both consumers load the first one's rows"),
    Mutant(LOOP, "const int column = work.n + lane % 4 * 2;", "const int column = work.n + lane % 4;", "columns of the wrong lanes"),
    Mutant(LOOP, "row + i / 2 * 64 + i % 2 * 8", "row + i / 2 * 64", "the second eight rows are the first"),
    Mutant(LOOP, "row + i / 2 * 64 + i % 2 * 8", "row + i % 2 * 8", "the second slice is the first",),
    Mutant(LOOP, "r < args.m ? args.columns - column - 8 * b : 0", "args.columns - column - 8 * b", "rows below C are read"),
    Mutant(LOOP, "left > 0 ? load_vec<2>", "true ? load_vec<2>", "columns beside C are read"),
    Mutant(LOOP, "left > e ? load(", "left > 0 ? load(", "the column after an odd number is read"),
    Mutant(LOOP, "(8 * b + e) * args.epilogue.c.column_bytes", "(8 * b + e) * 4", "a C by columns is read by rows"),
    Mutant(LOOP, "address_in(args.epilogue.c, work.batch, r, column)", "address_in(args.epilogue.c, 0, r, column)", "every matrix starts from the first"),
    Mutant(HOST, "q.accumulate = false;", "q.accumulate = true;", "C is added once more at the end"),
    Mutant(HOST, "!problem.m_major_a ||", "", "another layout of A is taken for this one"),
    Mutant("gemm/sm90/gemm.h", "t.n % 128 == 0 && gemm_sm90_takes_epilogue(t)", "gemm_sm90_takes_epilogue(t)", "a tile that the tests know to be refused is taken"),
    # ---- mma.sync
    Mutant(SM80, "for (int c = 0; c < Tile::kChunks; c++) load_chunk(args.finish, output.chunk(c), acc[c]);", "load_chunk(args.finish, output.chunk(0), acc[0]);",
           "only the first chunk starts from C"),
    Mutant(OUTPUT, "row < finish.m && column < at.end_of(i / 8)", "true", "C is read out of bounds"),
    Mutant("gemm/sm80/launch.cuh", "if (q.accumulate && !Tile::kChained) {", "if (q.accumulate) {", "C is added once more at the end"),
    Mutant(SM80_HOST, "splits > 1 || !gemm_sm80_chains(config.tile)", "splits > 1", "a tile without an instance is taken for another"),
]  # fmt: skip

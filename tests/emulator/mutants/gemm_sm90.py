"""Bugs in the wgmma GEMM and in what it stands on."""

from . import Mutant

TEST = "test_gemm_sm90"
KERNEL = "kernels/gemm_sm90.cuh"
HOST = "kernels/gemm_sm90.cu"

MUTANTS = [
    # ---- the ring of stages
    Mutant(
        KERNEL,
        "release(previous); previous = p.stage;",
        "release(p.stage); previous = p.stage;",
        "releases the stage in use, not the previous one",
    ),
    Mutant(
        KERNEL,
        "mbarrier_wait(p.empty + 8 * p.stage, p.phase ^ 1);",
        "mbarrier_wait(p.empty + 8 * p.stage, p.phase);",
        "the producer waits for the wrong parity",
    ),
    Mutant(
        KERNEL, "mbarrier_wait(p.empty + 8 * p.stage, p.phase ^ 1);", "", "the producer does not wait for empty stages"
    ),
    Mutant(KERNEL, "mbarrier_wait(p.full + 8 * p.stage, p.phase);", "", "the consumers do not wait for full stages"),
    Mutant(
        KERNEL,
        "mbarrier_wait(p.full + 8 * p.stage, p.phase);",
        "if (thread == 0) mbarrier_wait(p.full + 8 * p.stage, p.phase);",
        "only one consumer thread waits for full stages",
    ),
    Mutant(KERNEL, "phase ^= 1;", "", "the phase bit never flips"),
    Mutant(
        KERNEL, "wgmma_wait<0>(); release(previous);", "wgmma_wait<0>();", "the last stage of a tile is never released"
    ),
    Mutant(
        KERNEL,
        "wgmma_wait<1>();  // the previous step is complete, this one keeps the tensor cores busy if (previous >= 0) release(previous);",
        "if (previous >= 0) release(previous); wgmma_wait<1>();",
        "a stage is released before the wait",
    ),
    Mutant(KERNEL, "wgmma_wait<1>();", "wgmma_wait<2>();", "a stage is released one step too early"),
    Mutant(
        KERNEL,
        "mbarrier_init(empty + 8 * i, Tile::kConsumers * Tile::kCluster);",
        "mbarrier_init(empty + 8 * i, Tile::kCluster);",
        "the count of the empty barriers misses a consumer",
    ),
    Mutant(KERNEL, "mbarrier_init_fence();", "", "the copy engine is not told of the barriers"),
    Mutant(KERNEL, "} else { block_sync(); }", "}", "nobody waits for the barriers to be initialised"),
    Mutant(
        KERNEL,
        "mbarrier_arrive_expect_tx(full, Tile::kBytesA + Tile::kBytesB);",
        "mbarrier_arrive_expect_tx(full, Tile::kBytesA);",
        "the bytes of B are not expected",
    ),
    Mutant(
        KERNEL,
        "a = (dynamic_shared() + 1023) & ~1023u;",
        "a = dynamic_shared();",
        "the stages are not aligned to the swizzle pattern",
    ),
    Mutant(
        KERNEL,
        "empty = full + 8 * Tile::kStages;",
        "empty = full + 8 * Tile::kStages - 8;",
        "two barriers share their bytes",
    ),
    Mutant(
        KERNEL,
        "staging = b + Tile::kStages * Tile::kBytesB;",
        "staging = b + (Tile::kStages - 1) * Tile::kBytesB;",
        "the staging buffer lies over the last stage",
    ),
    Mutant(
        KERNEL,
        "constexpr int kAlignment = 1024,",
        "constexpr int kAlignment = 0,",
        "no room to round the shared memory up",
    ),
    # ---- tensor cores
    Mutant(
        KERNEL,
        "address + k16 * 32, 16, 1024",
        "address + k16 * 64, 16, 1024",
        "a k step within a row is twice too long",
    ),
    Mutant(
        KERNEL,
        "address + k16 * 2048, kSliceBytes, 1024",
        "address + k16 * 2048, kSliceBytes / 2, 1024",
        "the leading distance is halved",
    ),
    Mutant(
        KERNEL,
        "address + k16 * 2048, kSliceBytes, 1024",
        "address + k16 * 2048, kSliceBytes, 2048",
        "the stride is doubled",
    ),
    Mutant(
        KERNEL,
        "address + k16 * 2048, kSliceBytes, 1024",
        "address + k16 * 1024, kSliceBytes, 1024",
        "an MN-major k step is halved",
    ),
    Mutant(KERNEL, "step != work.first_step || k16 != 0", "true", "the first k step adds to the old registers"),
    Mutant(KERNEL, "step != work.first_step || k16 != 0", "k16 != 0", "every k step starts from zero"),
    Mutant(KERNEL, "wgmma_fence();", "", "no wgmma_fence"),
    Mutant(KERNEL, "wgmma_wait<0>();", "wgmma_wait<1>();", "the epilogue does not wait for the last group"),
    Mutant(KERNEL, "wgmma_wait<0>();", "", "the epilogue does not wait at all"),
    Mutant(KERNEL, "wgmma_commit();", "", "the group is never closed"),
    Mutant(KERNEL, "consumer * Tile::kSlicesM * kSliceBytes;", "0;", "both consumers multiply the same rows"),
    Mutant(
        KERNEL,
        "operand<kMajorA>(a + i * kSliceBytes, k16)",
        "operand<kMajorA>(a, k16)",
        "the second slice of a consumer repeats the first",
    ),
    # ---- clusters
    Mutant(KERNEL, "kEveryBlock = (1 << Tile::kCluster) - 1;", "kEveryBlock = 1;", "the multicast reaches one block"),
    Mutant(
        KERNEL,
        "p.stage * Tile::kBytesB + rank * kShareN * kBlockK * 2;",
        "p.stage * Tile::kBytesB;",
        "both blocks bring their share of B to the same place",
    ),
    Mutant(
        KERNEL,
        "const int n = work.n + rank * kShareN;",
        "const int n = work.n;",
        "both blocks bring the same share of B",
    ),
    Mutant(
        KERNEL,
        "if (thread < Tile::kCluster) mbarrier_arrive_cluster(p.empty + 8 * stage, thread);",
        "if (thread < 1) mbarrier_arrive_cluster(p.empty + 8 * stage, thread);",
        "stages are not released to the peer",
    ),
    Mutant(
        KERNEL,
        "if constexpr (Tile::kCluster > 1) { cluster_sync(); } else { block_sync(); }",
        "block_sync();",
        "a block does not wait for its peer's barriers",
    ),
    Mutant(
        KERNEL,
        "if constexpr (Tile::kCluster > 1) cluster_sync();  // and",
        "// and",
        "a block exits while its peer may still arrive",
    ),
    Mutant(
        KERNEL,
        "* Tile::kCluster + rank_) * Tile::kBlockM",
        "* Tile::kCluster) * Tile::kBlockM",
        "both blocks of a cluster work on the same rows",
    ),
    # ---- epilogues
    Mutant(KERNEL, "fence_proxy_async();", "", "no proxy fence before the 16-bit store"),
    Mutant(KERNEL, "fence_proxy_async();", "", "no proxy fence before the fp32 store", nth=2),
    Mutant(KERNEL, "if (thread == 0) bulk_wait_read<0>();", "", "the 16-bit staging buffer is reused under a store"),
    Mutant(
        KERNEL, "if (thread == 0) bulk_wait_read<0>();", "", "the fp32 staging buffer is reused under a store", nth=2
    ),
    Mutant(
        KERNEL,
        "bulk_wait_read<0>();  // the last store has left the staging buffer named_barrier(consumer + 1, kGroupThreads);",
        "bulk_wait_read<0>();",
        "nobody waits for the thread that waits for the store",
    ),
    Mutant(
        KERNEL,
        "fence_proxy_async(); named_barrier(consumer + 1, kGroupThreads);",
        "fence_proxy_async();",
        "the store does not wait for the writers",
    ),
    Mutant(
        KERNEL,
        "fence_proxy_async(); named_barrier(consumer + 1, kGroupThreads);",
        "named_barrier(consumer + 1, kGroupThreads); if (thread != 0) fence_proxy_async();",
        "the writers fence too late",
        nth=2,
    ),
    Mutant(
        KERNEL,
        "named_barrier(consumer + 1, kGroupThreads);",
        "named_barrier(1, kGroupThreads);",
        "both consumers meet at one barrier",
    ),
    Mutant(KERNEL, "(chunk ^ (row & 7)) << 4", "chunk << 4", "the staging buffer is not swizzled"),
    Mutant(KERNEL, "bulk_commit();", "", "the store's group is never closed"),
    Mutant(KERNEL, "if (thread == 0) bulk_wait<0>();", "", "the block exits under a store"),
    Mutant(
        KERNEL,
        "work.m + consumer * Tile::kConsumerM + i * 64",
        "work.m + i * 64",
        "both consumers store to the same rows",
    ),
    Mutant(
        KERNEL,
        "warp_sync(); for (int i = lane;",
        "for (int i = lane;",
        "rows are read before all lanes have written them",
    ),
    Mutant(
        KERNEL, "warp_sync();  // the rows", "// the rows", "rows are overwritten while other lanes still read them"
    ),
    Mutant(
        KERNEL,
        "if (y >= args.m || x >= args.n) continue;",
        "if (x >= args.n) continue;",
        "rows beyond the last are stored",
    ),
    Mutant(KERNEL, "if (x + 8 <= args.n) {", "if (true) {", "columns beyond the last are stored"),
    Mutant(
        KERNEL,
        "acc[8 * j + 2 * i], acc[8 * j + 2 * i + 1]",
        "acc[8 * j + 2 * i + 1], acc[8 * j + 2 * i]",
        "neighbouring columns are swapped",
    ),
    # ---- scheduling, splits, host
    Mutant(KERNEL, "registers_increase<232>();", "registers_increase<240>();", "more registers than the block has"),
    Mutant(KERNEL, "next_ += grid_blocks() / Tile::kCluster;", "next_ += grid_blocks();", "a cluster skips tiles"),
    Mutant(
        KERNEL,
        "rows_ - first_row < args_.raster ? rows_ - first_row : args_.raster",
        "args_.raster",
        "the last group of rows is taken as full",
    ),
    Mutant(
        KERNEL,
        "work.first_step + steps < all_steps ? work.first_step + steps : all_steps",
        "work.first_step + steps",
        "the last split runs beyond k",
        missed="TMA fills with zeros beyond k, so only time is lost: the result is right",
    ),
    Mutant(
        KERNEL,
        "tma_store(map_c, from, x, m, split);",
        "tma_store(map_c, from, x, m, 0);",
        "all splits store to the first part",
    ),
    Mutant(KERNEL, "c.size[0] = ld_c;", "", "the padding of the partial sums stays unwritten"),
    Mutant(
        HOST,
        "return (gemm::steps_per_split(k, 1) + steps - 1) / steps;",
        "return splits;",
        "an empty last split stores garbage",
    ),
    Mutant(HOST, "sum[e] += part[e];", "sum[e] = part[e];", "only the last part counts"),
    Mutant(HOST, "if (row >= m) return;", "", "threads beyond the last row go on"),
]

"""Bugs in the main loop of the wgmma GEMM and in what it stands on."""

from . import Mutant

TEST = "test_gemm_sm90"
KERNEL = "gemm/sm90/gemm.cuh"
PRODUCER = "gemm/sm90/producer.cuh"
TILE = "gemm/sm90/tile.cuh"
HOST = "gemm/sm90/gemm.h"

MUTANTS = [
    # ---- the ring of stages
    Mutant(
        KERNEL,
        "release(previous); previous = p.stage;",
        "release(p.stage); previous = p.stage;",
        "releases the stage in use, not the previous one",
    ),
    Mutant(
        PRODUCER,
        "mbarrier_wait(p.empty + 8 * p.stage, p.phase ^ 1);",
        "mbarrier_wait(p.empty + 8 * p.stage, p.phase);",
        "the producer waits for the wrong parity",
    ),
    Mutant(
        PRODUCER,
        "mbarrier_wait(p.empty + 8 * p.stage, p.phase ^ 1);",
        "",
        "the producer does not wait for empty stages",
    ),
    Mutant(KERNEL, "mbarrier_wait(p.full + 8 * p.stage, p.phase);", "", "the consumers do not wait for full stages"),
    Mutant(
        KERNEL,
        "mbarrier_wait(p.full + 8 * p.stage, p.phase);",
        "if (thread == 0) mbarrier_wait(p.full + 8 * p.stage, p.phase);",
        "only one consumer thread waits for full stages",
    ),
    Mutant(PRODUCER, "phase ^= 1;", "", "the phase bit never flips"),
    Mutant(
        KERNEL, "wgmma_wait<0>(); release(previous);", "wgmma_wait<0>();", "the last stage of a tile is never released"
    ),
    Mutant(
        KERNEL,
        "wgmma_wait<1>();  // the previous step is complete, this one stays in flight if (previous >= 0) release(previous);",
        "if (previous >= 0) release(previous); wgmma_wait<1>();",
        "a stage is released before the wait",
    ),
    Mutant(KERNEL, "wgmma_wait<1>();", "wgmma_wait<2>();", "a stage is released one step too early"),
    Mutant(
        PRODUCER,
        "mbarrier_init(empty + 8 * i, Tile::kGroups * Tile::kCluster);",
        "mbarrier_init(empty + 8 * i, Tile::kCluster);",
        "the count of the empty barriers misses a consumer",
    ),
    Mutant(PRODUCER, "mbarrier_init_fence();", "", "the copy engine is not told of the barriers"),
    Mutant(KERNEL, "} else { block_sync(); }", "}", "nobody waits for the barriers to be initialised"),
    Mutant(
        PRODUCER,
        "mbarrier_arrive_expect_tx(full, Tile::kBytesA + Tile::kBytesB);",
        "mbarrier_arrive_expect_tx(full, Tile::kBytesA);",
        "the bytes of B are not expected",
    ),
    Mutant(
        PRODUCER,
        "a = (dynamic_shared() + 1023) & ~1023u;",
        "a = dynamic_shared();",
        "the stages are not aligned to the swizzle pattern",
    ),
    Mutant(
        PRODUCER,
        "empty = full + 8 * Tile::kStages;",
        "empty = full + 8 * Tile::kStages - 8;",
        "two barriers share their bytes",
    ),
    Mutant(
        PRODUCER,
        "staging = b + Tile::kStages * Tile::kBytesB;",
        "staging = b + (Tile::kStages - 1) * Tile::kBytesB;",
        "the staging buffer lies over the last stage",
    ),
    Mutant(
        TILE,
        "constexpr int kAlignment = 1024;",
        "constexpr int kAlignment = 0;",
        "no room to round the shared memory up",
    ),
    # ---- tensor cores
    Mutant(
        KERNEL,
        "kMajor == Major::kK ? 32 : 2048",
        "kMajor == Major::kK ? 64 : 2048",
        "a k step within a row is twice too long",
    ),
    Mutant(
        KERNEL,
        "kMajor == Major::kK ? 16 : kSliceBytes, 1024",
        "kMajor == Major::kK ? 16 : kSliceBytes / 2, 1024",
        "the leading distance is halved",
    ),
    Mutant(
        KERNEL,
        "kMajor == Major::kK ? 16 : kSliceBytes, 1024",
        "kMajor == Major::kK ? 16 : kSliceBytes, 2048",
        "the stride is doubled",
    ),
    Mutant(
        KERNEL,
        "kMajor == Major::kK ? 32 : 2048",
        "kMajor == Major::kK ? 32 : 1024",
        "an MN-major k step is halved",
    ),
    Mutant(KERNEL, "step != 0 || k16 != 0", "true", "the first k step adds to the old registers"),
    Mutant(KERNEL, "step != 0 || k16 != 0", "k16 != 0", "every k step starts from zero"),
    Mutant(KERNEL, "wgmma_fence();", "", "no wgmma_fence"),
    Mutant(KERNEL, "wgmma_wait<0>();", "wgmma_wait<1>();", "the epilogue does not wait for the last group"),
    Mutant(KERNEL, "wgmma_wait<0>();", "", "the epilogue does not wait at all"),
    Mutant(KERNEL, "wgmma_commit();", "", "the group is never closed"),
    Mutant(KERNEL, "+ group * Tile::kSlicesM * kSliceBytes);", ");", "both consumers multiply the same rows"),
    Mutant(
        KERNEL,
        "a + slice_of_descriptor<kMajorA>(i, k16)",
        "a + slice_of_descriptor<kMajorA>(0, k16)",
        "the second slice of a consumer repeats the first",
    ),
    # ---- clusters
    Mutant(PRODUCER, "kBoth = 0b11;", "kBoth = 0b01;", "the multicast reaches one block"),
    Mutant(
        PRODUCER,
        "p.stage * Tile::kBytesB + my_row_b * kRowBytes;",
        "p.stage * Tile::kBytesB;",
        "both blocks bring their share of B to the same place",
    ),
    Mutant(
        PRODUCER,
        "work.n + rank * args.second_half, k",
        "work.n, k",
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
        "if constexpr (Tile::kCluster > 1) cluster_sync();  // shared",
        "// shared",
        "a block exits while its peer may still arrive",
    ),
    Mutant(
        PRODUCER,
        "Tile::kClusterM + (Tile::kClusterM > 1 ? rank : 0)",
        "Tile::kClusterM",
        "both blocks of a cluster work on the same rows",
    ),
    Mutant(
        PRODUCER,
        "Tile::kClusterN + (Tile::kClusterN > 1 ? rank : 0)",
        "Tile::kClusterN",
        "both blocks of a cluster work on the same columns",
    ),
    Mutant(PRODUCER, "work.m + my_row_a, k", "work.m, k", "both blocks bring the same share of A"),
    Mutant(
        PRODUCER,
        "p.stage * Tile::kBytesA + my_row_a * kRowBytes;",
        "p.stage * Tile::kBytesA;",
        "both blocks bring their share of A to the same place",
    ),
    Mutant(
        KERNEL,
        "Tile::kBlockM / Tile::kClusterN);",
        "Tile::kBlockM);",
        "the box of a shared A is as high as the whole tile",
    ),
    # ---- pingpong
    Mutant(
        PRODUCER,
        "Tile::kGroups * Tile::kCluster",
        "Tile::kConsumers * Tile::kCluster",
        "a stage waits for the consumer that does not read it",
    ),
    Mutant(
        PRODUCER,
        "if (other_goes_first && scheduler.next(work)) p.skip(work.steps);",
        "if (other_goes_first) scheduler.next(work);",
        "the other's stages are not passed over",
    ),
    Mutant(
        PRODUCER,
        "phase ^= to / Tile::kStages & 1;",
        "phase ^= to / Tile::kStages;",
        "the phase flips by more than one bit",
    ),
    Mutant(PRODUCER, "phase ^= to / Tile::kStages & 1;", "", "the phase does not flip over the other's stages"),
    Mutant(
        KERNEL,
        "named_barrier(kTurnBarrier + consumer, 2 * kWarpgroupThreads);",
        "",
        "nobody waits for the turn: the other's arrivals pile up",
    ),
    Mutant(
        KERNEL,
        "if (Tile::kPingpong && consumer == 1)  // the first turn is free named_barrier_arrive(kTurnBarrier, 2 * kWarpgroupThreads);",
        "",
        "the first tile waits for a turn that nobody gives",
    ),
    Mutant(
        KERNEL,
        "if (next.other_follows) named_barrier_arrive(kTurnBarrier + 1 - consumer, 2 * kWarpgroupThreads);",
        "",
        "the turn is not handed over",
    ),
    Mutant(
        KERNEL,
        "if (next.other_follows) named_barrier_arrive(",
        "named_barrier_arrive(",
        "the last tile hands the turn to nobody",
    ),
    Mutant(
        KERNEL,
        "named_barrier_arrive(kTurnBarrier + 1 - consumer,",
        "named_barrier_arrive(kTurnBarrier + consumer,",
        "who is done takes the turn again",
    ),
    Mutant(
        KERNEL,
        "constexpr int kTurnBarrier = 1 + Tile::kConsumers;",
        "constexpr int kTurnBarrier = 1;",
        "turns and epilogues share a barrier",
    ),
    Mutant(
        KERNEL,
        "Tile::kPingpong && consumer == 1)  // the first",
        "Tile::kPingpong && consumer == 0)  // the first",
        "the first turn is the second consumer's, and nobody begins",
    ),
    Mutant(
        PRODUCER,
        "more = post_next(scheduler, p, mailbox, Tile::kPingpong);",
        "more = post_next(scheduler, p, mailbox, false);",
        "from the second tile on both consumers take every tile",
    ),
    Mutant(
        PRODUCER,
        "Tile::kPingpong && consumer() == 1);",
        "false);",
        "both consumers begin with the first tile",
    ),
    # ---- scheduler warps
    Mutant(PRODUCER, "mbarrier_wait(mailbox.work_full(), phase);", "", "a consumer does not wait for its next tile"),
    Mutant(PRODUCER, "mbarrier_arrive(mailbox.work_full());", "", "a tile is posted without an arrival"),
    Mutant(PRODUCER, "work = {};  // that", "// that", "the consumer takes the other's last tile"),
    Mutant(
        PRODUCER,
        "word(p.stage * 2 + p.phase)",
        "word(p.stage * 2)",
        "a tile's place in the ring is said without its phase",
    ),
    Mutant(
        PRODUCER,
        "p.skip(posted(p, mailbox).work.steps);",
        "",
        "every tile begins where the first one did in the ring",
    ),
    Mutant(
        PRODUCER,
        "wait_phase(mailbox.work_empty(), kWorkEmpty);",
        "",
        "the next tile is written over one that has not been read",
    ),
    Mutant(
        PRODUCER,
        "mbarrier_init(d.work_empty(), kWarps);",
        "mbarrier_init(d.work_empty(), 1);",
        "one warp has read the tile: it is written over",
    ),
    Mutant(
        PRODUCER,
        "warp_sync(); if (lane_in_warp() == 0) mbarrier_arrive(mailbox.work_empty());",
        "if (lane_in_warp() == 0) mbarrier_arrive(mailbox.work_empty());",
        "one lane has read the tile: it is written over",
    ),
    Mutant(
        PRODUCER, "opaque(mailboxes) + consumer * Mailbox::kBytes", "opaque(mailboxes)", "the consumers share a mailbox"
    ),
    Mutant(TILE, "at + 24 + slot * 8;", "at + 16 + slot * 8;", "slot_ready() and slot_requested() share a barrier"),
    # ---- batch
    Mutant(PRODUCER, "work.batch * args.schedule.batch_a,", "work.batch,", "a shared A is looked for in every matrix"),
    Mutant(PRODUCER, "work.batch * args.schedule.batch_b;", "0;", "every product reads the first B"),
    Mutant(PRODUCER, "work.batch = cluster / tiles;", "work.batch = 0;", "every product is the first"),
    Mutant(
        PRODUCER,
        "const int in_matrix = cluster - work.batch * tiles;",
        "const int in_matrix = cluster;",
        "tiles are not counted from the matrix on",
    ),
    Mutant(
        KERNEL, "rows * columns * q.batch * splits", "rows * columns * splits", "only the first product is computed"
    ),
    Mutant(KERNEL, "{size(ld), size(batch_stride)}", "{size(ld), size(ld)}", "the matrices of a batch overlap"),
    # ---- splits
    Mutant(
        KERNEL,
        "named_barrier(consumer + 1, kWarpgroupThreads);  // every thread's sums",
        "// every thread's sums",
        "a part is counted before it is stored",
    ),
    Mutant(
        KERNEL,
        "named_barrier(consumer + 1, kWarpgroupThreads); if (shared_at<uint32_t>(flag)[0] == 0u)",
        "if (shared_at<uint32_t>(flag)[0] == 0u)",
        "threads look before the count is there",
    ),
    Mutant(
        KERNEL,
        "atomic_count_acq_rel(s.counters + work.tile * Tile::kGroups + group, last)",
        "atomic_add(s.counters + work.tile * Tile::kGroups + group, 1u)",
        "a relaxed count: it orders nothing, and is not 0 again",
    ),
    Mutant(
        KERNEL,
        "work.tile * Tile::kGroups + group, last)",
        "work.tile * Tile::kGroups, last)",
        "the consumers of a tile share a counter",
    ),
    Mutant(
        KERNEL, "s.counters + work.tile * Tile::kGroups", "s.counters + 0 * Tile::kGroups", "all tiles share a counter"
    ),
    Mutant(KERNEL, "last ? 1u : 0u);", "0 ? 1u : 0u);", "the first part finishes the tile"),
    Mutant(
        KERNEL,
        "static_cast<uint32_t>(s.splits) - 1;",
        "static_cast<uint32_t>(s.splits);",
        "everybody waits for one part more",
    ),
    Mutant(
        KERNEL,
        "parts + work.split * kPartSize + j * kVectorPitch",
        "parts + j * kVectorPitch",
        "all parts lie in one place",
    ),
    Mutant(
        KERNEL,
        "parts + of * kPartSize + at * kVectorPitch",
        "parts + (s.splits - 1 - of) * kPartSize + at * kVectorPitch",
        "the parts are added backwards",
    ),
    Mutant(
        KERNEL,
        "parts + of * kPartSize + at * kVectorPitch",
        "parts + (of + work.split) % s.splits * kPartSize + at * kVectorPitch",
        "the parts are added from the last one on",
    ),
    Mutant(KERNEL, "if (first + j < kVectors) store_vec(", "store_vec(", "sums are written beyond the tile's"),
    Mutant(KERNEL, "at < kVectors && of < s.splits", "at < kVectors", "parts that are not there are added"),
    Mutant(KERNEL, "if (shared_at<uint32_t>(flag)[0] == 0u) return false;", "", "every part finishes the tile"),
    Mutant(KERNEL, "+ group * (kPartSize / Tile::kGroups)", "", "the consumers of a tile share scratch"),
    Mutant(KERNEL, "work.tile * s.splits * kPartSize", "work.tile * kPartSize", "tiles overlap in scratch"),
    Mutant(
        HOST,
        "return (steps + per_split - 1) / per_split;",
        "return splits;",
        "an empty last part",
    ),
    Mutant(HOST, "tiles * (t.pingpong ? 1 : t.consumers)", "tiles", "too few counters"),
    Mutant(
        PRODUCER,
        "left < s_.k_steps_per_split ? left : s_.k_steps_per_split",
        "s_.k_steps_per_split",
        "the last split runs beyond k",
        missed="TMA fills with zeros beyond k, so only time is lost: the result is right",
    ),
    # ---- rows and columns exchanged
    Mutant(HOST, "s.a = q.b, s.b = q.a;", "s.a = q.a, s.b = q.b;", "swapped: A and B stay"),
    Mutant(HOST, "s.m_major_a = q.n_major_b, s.n_major_b = q.m_major_a;", "", "swapped: the layouts stay"),
    Mutant(HOST, "s.ld_a = q.ld_b, s.ld_b = q.ld_a;", "", "swapped: the leading dimensions stay"),
    Mutant(
        HOST,
        "s.batch_stride_a = q.batch_stride_b, s.batch_stride_b = q.batch_stride_a;",
        "",
        "swapped: the batch strides stay",
    ),
    Mutant(HOST, "v->column_stride = row_stride;", "", "swapped: C keeps its strides"),
    # ---- scheduling
    Mutant(
        KERNEL,
        "registers_increase<Tile::kConsumerRegisters>();",
        "registers_increase<Tile::kConsumerRegisters + 8>();",
        "more registers than the block has",
    ),
    Mutant(PRODUCER, "next_ += s_.clusters;", "next_ += grid_blocks();", "a cluster skips tiles"),
    Mutant(
        PRODUCER,
        "s_.lines - first_line < s_.raster_lines ? s_.lines - first_line : s_.raster_lines",
        "s_.raster_lines",
        "the last group of lines is taken as full",
    ),
    Mutant(PRODUCER, "s_.by_columns ? across : line", "line", "columns are walked as rows"),
    Mutant(
        KERNEL,
        "s.line_length = s.by_columns ? rows : columns;",
        "s.line_length = columns;",
        "a column is as long as a row",
    ),
    Mutant(
        KERNEL,
        "wait_for_previous_kernel();  // the",
        "// the",
        "memory is read while the kernel in front may still write it",
    ),
    Mutant(KERNEL, "if (thread_in_warpgroup() == 0) bulk_wait<0>();", "", "the block exits under a store"),
    Mutant(KERNEL, "work.m + group * Tile::kConsumerRows", "work.m", "both consumers store to the same rows"),
]

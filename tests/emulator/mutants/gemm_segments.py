"""Bugs in a wgmma GEMM whose A is several matrices."""

from . import Mutant

TEST = "test_gemm_segments"
KERNEL = "gemm/sm90/gemm.cuh"
PRODUCER = "gemm/sm90/producer.cuh"
TILE = "gemm/sm90/tile.cuh"
HOST = "gemm/sm90/gemm.h"

MUTANTS = [
    Mutant(PRODUCER, "if (x >= args.more_a[0]) map", "if (x > args.more_a[0]) map", "the first box of the second matrix is read from the first"),
    Mutant(PRODUCER, "if (x >= args.more_a[1]) map", "if (x > args.more_a[1]) map", "the first box of the third matrix is read from the second"),
    Mutant(PRODUCER, "x -= begin;", "", "a box is counted from the beginning of the first matrix"),
    Mutant(PRODUCER, "map = maps.third, begin = args.more_a[1];", "map = maps.third;", "a box of the third matrix is counted from that of the second"),
    Mutant(PRODUCER, "map = maps.third, begin", "map = maps.second, begin", "the third matrix is the second"),
    Mutant(PRODUCER, "const TensorMap* map = map_of(k);", "int begin = 0; const TensorMap* map = map_of(begin);", "along k every box is one of the first matrix"),
    Mutant(PRODUCER, "int x = first + i * kWidth; const TensorMap* map = map_of(x);", "int x = first; const TensorMap* map = map_of(x); x += i * kWidth;",
           "all boxes of a tile come from the matrix of its first rows"),
    Mutant(KERNEL, "{&map_a, &map_z, &map_aux}, &map_b", "{&map_a, &map_aux, &map_z}, &map_b", "second and third matrix are exchanged"),
    Mutant(KERNEL, "length = (last ? length : next->begin) - part.begin;", "length = last ? length : next->begin;", "a map ends where A's part would, counted from A's beginning"),
    Mutant(KERNEL, "part.data, alone.m, part.ld,", "part.data, alone.m, q.ld_a,", "all matrices have the rows' distance of the first"),
    Mutant(KERNEL, "part = *next++;", "part = *next;", "the second matrix twice"),
    Mutant(TILE, "args.more_a[i] = q.more_a[i].begin;", "args.more_a[i] = q.more_a[0].begin;", "the third matrix begins with the second"),
    Mutant(HOST, "if (q.batch != 1 || !gemm_sm90_in_registers(q)) return false;", "if (!gemm_sm90_in_registers(q)) return false;", "a batch of matrices"),
    Mutant(HOST, "if (q.batch != 1 || !gemm_sm90_in_registers(q)) return false;", "if (q.batch != 1) return false;", "an epilogue whose maps are taken"),
    Mutant(HOST, "s.begin <= previous ||", "", "two matrices at one place"),
    Mutant(HOST, "s.begin >= (q.m_major_a ? q.m : q.k)", "s.begin >= q.k", "the rows of A are counted as terms"),
    Mutant(HOST, "|| s.begin % 64 != 0", "", "a box that lies in two matrices"),
    Mutant(HOST, "if (!gemm_sm90_reads(s.data, s.ld, 0)) return false;", "", "a matrix that TMA cannot read"),
    Mutant(HOST, "(config.swapped && is_segmented(problem))", "false", "B is several matrices, and the kernel reads the first"),
]  # fmt: skip

"""Limits of each CUDA kernel on a multiprocessor, and required machine code.

A row holds for every instance of the kernel on every architecture; ``kernel<Class>`` for the instances with that class,
``kernel<Class, true>`` for those that besides have this value of their one bool. A kernel without a row fails the test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Budget:
    registers: int  # a thread, at most
    shared: int  # static bytes a block, at most, without the 1,024 that the system takes on sm_90 and later; ptxas may round
    # them up to 1,024 where another kernel of the file has dynamic ones, which begin at such a multiple
    # By architecture: a part of the symbols of the instances that may spill, and bytes, at most.
    spilled: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    threads: int = 256  # a block
    blocks: int = 0  # that share a multiprocessor, or as many as it holds, where bandwidth counts on it
    wide_loads: int = 0  # 16-byte loads from global memory, at least, in all instances
    # Bytes on their way to a multiprocessor, FLOOR at least: to its threads, each of which has in_flight when it waits; or to the rings
    # in shared memory of its blocks, which tests/ptx/executed_grids.py counts; or else the reason why the kernel needs fewer.
    in_flight: int = 0
    ring: bool = False
    bound: str = ""
    whole_sectors: bool = False  # no store writes half a sector and another one the rest
    ways: int = 1  # in so many places of the code, at least: the loop of each dtype, of each way to keep a weight
    # The least number of each from sm_80 on, by the beginning of their names.
    opcodes: Mapping[str, int] = field(default_factory=dict)
    why: str = ""


FLOOR = 18 * 1024  # an H200's SM moves 31 bytes a nanosecond, which come 600 ns after they were asked for

# Teams of row_ring.cuh: the columns of a thread, and the cp.async of 16 bytes that bring them in fp32.
TEAM_COLUMNS = 8 + 16 + 24 + 32 + 16 + 24 + 32 + 16  # the last has 32 in some kernels
RING_COPIES = TEAM_COLUMNS // 4

ELEMENTWISE = "; a thread has one vector in flight, and many threads share an SM"

# A round of loads has one wide load more for each dtype, except on sm_120.
BUDGETS = {
    "check_and_norm_kernel": Budget(registers=80, shared=128, blocks=3, wide_loads=4 * (8 + 7), in_flight=112, ways=4,
        why="4 dtypes, each with rounds of 8 loads, of which the last loads what is left; three blocks of 256 threads "
            "share an SM"),
    "per_tensor_norm_kernel": Budget(registers=80, shared=128, blocks=3, wide_loads=4 * (8 + 7), in_flight=112, ways=4,
        why="the walk of check_and_norm_kernel"),
    "per_tensor_finish_kernel": Budget(registers=64, shared=0, bound="one warp a tensor"),
    "cross_entropy_rows_kernel": Budget(registers=64, shared=0, whole_sectors=True, ring=True,
        spilled={"sm_75": ("ELb1E", 12)},
        opcodes={"LDGSTS.E.BYPASS.128": 6 * 6, "STG.E.128": 3 * 6, "MUFU.EX2": 3 * (58 + 40)},
        why="3 sizes of blocks, each for all types and for what fp32 logits have more, 1,024 threads an SM; the bytes in "
            "flight are in shared memory: words of the logits and of "
            "probabilities, before the loop and in both walks; for each dtype words of gradients, and of what rows "
            "without a loss have; two walks of one exponential a logit, eight at a time"),
    "cross_entropy_rows_ring_kernel": Budget(registers=168, shared=0, whole_sectors=True, ring=True,
        opcodes={"LDGSTS": 2 * 2 * RING_COPIES, "MUFU.EX2": TEAM_COLUMNS},
        why="up to 32 columns of the row, of the coefficients and of the weights; the rows' bytes are in flight to "
            "shared memory; one exponential a logit"),
    "exponent_histogram_kernel": Budget(registers=48, shared=1280, blocks=5, wide_loads=4 * (4 + 3), in_flight=48,
        ways=4, opcodes={"ATOMS.POPC.INC": 1},
        why="4 dtypes, each with rounds of 4 loads, and 280 counters; increments of a warp that meet are added up "
            "first"),
    "unscale_kernel": Budget(registers=48, shared=0, blocks=5, wide_loads=4 * (4 + 3), in_flight=64, ways=4,
        why="4 dtypes, each with rounds of 4 loads; 48 registers let 5 blocks of 256 share an SM"),
    "cast_kernel": Budget(registers=64, shared=0, blocks=4, wide_loads=2 * 2 * 3 * 4, in_flight=64, ways=9,
        spilled={"sm_100": ("Lb1E", 56), "sm_120": ("Lb1E", 24)}, whole_sectors=True,
        why="with and without stochastic rounding, 9 pairs of dtypes, each with a loop and an end of 64 bytes of "
            "loads, 16 at a time of fp32, 8 of 16-bit elements; 64 registers let 4 blocks of 256 share an SM, "
            "at the price of 14 words in local memory in the stochastic loops of sm_100, 6 of sm_120"),
    "embedding_pieces_kernel": Budget(registers=96, shared=0, threads=128, blocks=5, in_flight=56,
        why="four rows of 8 columns on their way to a thread; 640 threads share an SM"),
    "embedding_joints_kernel": Budget(registers=96, shared=0, threads=128, blocks=5, in_flight=128,
        why="four partial sums of 8 columns on their way to a thread; 640 threads share an SM"),
    "embedding_in_order_kernel": Budget(registers=96, shared=0, threads=128, blocks=5, in_flight=96,
        why="eight rows of 8 columns on their way to a thread; 640 threads share an SM"),
    "unit_sums_kernel": Budget(registers=80, shared=0, blocks=3, in_flight=32,
        why="16 rows of a thread's column in flight, in 4 blocks of 256, or 8 of gradient and input, in 3"),
    "unit_chain_kernel": Budget(registers=64, shared=0, threads=32, blocks=16, in_flight=64,
        why="16 units of a thread's column in flight"),
    "spread_rows_kernel": Budget(registers=64, shared=0, blocks=4, in_flight=32,
        why="two pieces of 8 columns of x, and of y, in flight; 4 blocks of 256 share an SM"),
    "combine_rows_kernel": Budget(registers=64, shared=0, blocks=4, in_flight=64,
        why="8 columns of four rows in flight; 4 blocks of 256 share an SM"),
    "judge_units_kernel": Budget(registers=80, shared=0, bound="one warp a unit"),
    "update_scale_kernel": Budget(registers=64, shared=0, bound="one warp"),
    "update_kernel<AdamW, false>": Budget(registers=128, shared=0, whole_sectors=True, blocks=2, wide_loads=7 * 7, in_flight=112, ways=7,
        why="7 ways to keep a weight, each loading two words of the gradient and of each moment and one or two of the "
            "weight; 128 registers let 2 blocks of 256 share an SM"),
    "update_kernel<AdamW, true>": Budget(registers=128, shared=0, whole_sectors=True, blocks=2, wide_loads=9 * (9 + 11), in_flight=176,
        ways=9, spilled={"sm_120": ("Lb1E", 8)},
        why="with extras: 9 ways to keep a weight, each with and without a third moment, and two words of the average"),
    "update_kernel<Sgd, false>": Budget(registers=80, shared=0, whole_sectors=True, blocks=3, wide_loads=7 * (5 + 3), in_flight=80, ways=7,
        why="7 ways to keep a weight, each with and without momentum; 80 registers let 3 blocks of 256 share an SM"),
    "update_kernel<Sgd, true>": Budget(registers=128, shared=0, blocks=2, wide_loads=9 * (7 + 5) - 2, in_flight=96, ways=9,
        whole_sectors=True,
        why="with extras: 9 ways to keep a weight, each with and without momentum, and two words of the average; two loads "
            "serve two ways"),
    "update_kernel<Muon, false>": Budget(registers=64, shared=0, blocks=4, wide_loads=7 * (4 + 3), in_flight=64, ways=12,
        whole_sectors=True,
        why="7 ways to keep a weight, each with and without momentum (two of the latter have 48 bytes to read); 64 registers "
            "let 4 blocks of 256 share an SM"),
    "update_kernel<Muon, true>": Budget(registers=80, shared=0, blocks=3, wide_loads=9 * (7 + 5) - 2, in_flight=96, ways=9,
        whole_sectors=True,
        why="with extras: 9 ways to keep a weight, each with and without momentum, and two words of the average; two loads "
            "serve two ways; 80 registers hold no addresses, which come from the arguments for each vector"),
    "update_kernel<Lion, false>": Budget(registers=80, shared=0, whole_sectors=True, blocks=3, wide_loads=7 * 5, in_flight=80, ways=7,
        why="7 ways to keep a weight, each loading two words of the gradient and of the moment and one or two of the "
            "weight; 80 registers let 3 blocks of 256 share an SM"),
    "update_kernel<Lion, true>": Budget(registers=128, shared=0, whole_sectors=True, blocks=2, wide_loads=9 * 7, in_flight=112, ways=9,
        why="with extras: 9 ways to keep a weight, and two words of the average"),
    "update8_kernel<AdamW>": Budget(registers=128, shared=0, blocks=2, in_flight=80,
        opcodes={"FFMA.RZ": 5 * 8, "SHFL.BFLY": 5 * 2},
        why="moments in 8 bits: eight elements of a thread, with and without a third moment, and in a plain form; two blocks of "
            "256 share an SM"),
    "update8_kernel<Sgd>": Budget(registers=128, shared=0, blocks=2, in_flight=100,
        opcodes={"FFMA.RZ": 8, "SHFL.BFLY": 2}, why="as AdamW's"),
    "update8_kernel<Muon>": Budget(registers=128, shared=0, blocks=2, in_flight=100,
        opcodes={"FFMA.RZ": 8, "SHFL.BFLY": 2}, why="as AdamW's"),
    "update8_kernel<Lion>": Budget(registers=128, shared=0, blocks=2, in_flight=100,
        opcodes={"FFMA.RZ": 8, "SHFL.BFLY": 2}, why="as AdamW's"),
    "update8_kernel<Lamb>": Budget(registers=80, shared=0, blocks=3, in_flight=80, why="the moments are only read"),
    "lamb_moments_kernel<UpdateArgs8>": Budget(registers=128, shared=64, blocks=2, in_flight=100,
        opcodes={"FFMA.RZ": 2 * 8, "SHFL.BFLY": 2 * 2}, why="moments in 8 bits, as AdamW's"),
    "lamb_moments_kernel": Budget(registers=120, shared=64, whole_sectors=True, blocks=2, wide_loads=5 * 7, in_flight=112, ways=5,
        why="5 ways to read a weight, each loading two words of the gradient and of each moment and one or two of the "
            "weight; 128 registers is the limit for the 2 blocks of 256 an SM runs"),
    "lamb_rates_kernel": Budget(registers=64, shared=64, bound="one block a tensor"),
    "update_kernel<Lamb, false>": Budget(registers=80, shared=0, whole_sectors=True, blocks=3, wide_loads=7 * 5, in_flight=80, ways=7,
        why="7 ways to keep a weight, each loading two words of each moment and one or two of the weight; 80 "
            "registers let 3 blocks of 256 share an SM"),
    "update_kernel<Lamb, true>": Budget(registers=128, shared=0, whole_sectors=True, blocks=2, wide_loads=9 * 7, in_flight=112, ways=9,
        why="with extras: 9 ways to keep a weight, and two words of the average"),
    "update_prepare_kernel": Budget(registers=64, shared=0, bound="one thread a parameter"),
    "gemm_sm90_kernel": Budget(registers=255, shared=0, bound="Tensor Cores",
        why="2 warpgroups of 255, 3 of 168 or 4 of 128, where setmaxnreg starts, fill the file"),
    "gemm_repack_kernel": Budget(registers=32, shared=0, blocks=8, in_flight=16,
        why="five loads of a thread in flight: 8 blocks of 256 share an SM"),
    "gemm_add_phases_kernel": Budget(registers=64, shared=0, blocks=4, in_flight=32,
        opcodes={"LDG.E.EF": 2 * 4 * (2 + 4 + 8), "SHFL.IDX": 6 * 32},
        why="4 rows of up to 8 phases, 128 bytes of a thread in flight; 4 blocks of 256 share an SM"),
    "gemm_sm80_kernel": Budget(registers=255, shared=0, bound="Tensor Cores",
        spilled={"sm_80": ("ChainedTile", 24), "sm_120": ("TileILi64ELi64E", 16)},
        opcodes={"HMMA.16816.F32": 2 * (64 + 2 * (64 + 16)), "LDSM.16": 2 * 2 * (21 + 2 * (21 + 11)),
                 "LDGSTS.E.BYPASS.128": 10 * 12},
        why="14 instances, 4 for symmetric results and 4 whose sums start from C: 128 sums and two sets of fragments. A step of "
            "32 k is 64 mma a warp, "
            "16 in the small tile, which on sm_120 keeps four words in memory; the 128 x 128 tile from C keeps six on sm_80"),
    "gemm_sm80_grouped_kernel": Budget(registers=255, shared=0, bound="Tensor Cores", spilled={"sm_120": ("TileILi128ELi128E", 16)},
        opcodes={"HMMA.16816.F32": 2 * 64, "LDSM.16": 2 * 2 * 21, "LDGSTS.E.BYPASS.128": 2 * 12},
        why="2 instances: the loop of gemm_sm80_kernel; on sm_120 four words wait in memory"),
    "row_squares_kernel": Budget(registers=64, shared=0, blocks=4, in_flight=32, ways=3,
        why="3 dtypes; 4 blocks of 256 share an SM"),
    "scale_rows_kernel": Budget(registers=64, shared=64, blocks=4, in_flight=32, ways=3,
        why="3 dtypes; 4 blocks of 256 share an SM"),
    "gemm_column_sums_kernel": Budget(registers=64, shared=1024, blocks=4, in_flight=32,
        why="16 rows of a thread's column, eight at a time in flight; 4 blocks of 256 share an SM"),
    "column_sums_kernel": Budget(registers=64, shared=8192, blocks=4, wide_loads=6 + 6 + 3 * 2, in_flight=96,
        why="6 rows of 16 bits, or 3 of fp32 in two words, on their way to a thread; 4 blocks of 256 share an SM"),
    "activation_forward_kernel": Budget(registers=64, shared=0, blocks=8, wide_loads=3, in_flight=16,
        whole_sectors=True, why="3 types" + ELEMENTWISE),
    "swiglu_forward_kernel": Budget(registers=64, shared=0, blocks=4, wide_loads=3 * 2, in_flight=32,
        whole_sectors=True, why="3 types" + ELEMENTWISE),
    "activation_backward_kernel": Budget(registers=64, shared=0, blocks=8, wide_loads=3 * 2 + 2, in_flight=24,
        whole_sectors=True, why="3 types, two also with gradients in fp32" + ELEMENTWISE),
    "activation_backward_sums_kernel": Budget(registers=64, shared=8192, blocks=4, wide_loads=2 * 2 * 2, in_flight=64,
        whole_sectors=True,
        why="2 types; two rows of two operands on their way to a thread; 4 blocks of 256 share an SM"),
    "swiglu_backward_kernel": Budget(registers=64, shared=0, blocks=4, wide_loads=3 * 3 + 2, in_flight=32,
        whole_sectors=True, why="3 types, two also with gradients in fp32" + ELEMENTWISE),
    "rotary_turn_kernel": Budget(registers=128, shared=0, blocks=2, wide_loads=2 * (4 + 4), in_flight=64,
        whole_sectors=True,
        why="two vectors of two heads of 16 bits or of fp32, beside the cosines, sines and weights of 16 columns"),
    "rotary_gradient_kernel": Budget(registers=168, shared=8192, threads=128, blocks=3, wide_loads=4 + 4, in_flight=48,
        whole_sectors=True, spilled={"sm_100": ("kernelILi1E", 192), "sm_120": ("kernelILi1E", 192)},
        why="two vectors each of a head and of its gradient, beside cosines, sines, weights and the sums over heads, 16 "
            "columns each; what is unaligned may spill"),
    "norm_forward_ring_kernel": Budget(registers=168, shared=0, whole_sectors=True, ring=True,
        opcodes={"LDGSTS": 2 * 2 * (RING_COPIES + 8)},
        why="up to 32 columns of the row, of the weight and of the bias, or 64 of the row; the rows' bytes are in "
            "flight to shared memory: copies of two matrices, before and in the loop"),
    "norm_forward_resident_kernel": Budget(registers=64, shared=0, whole_sectors=True, ring=True,
        opcodes={"LDGSTS": 2 * 2 + 2 + 27, "LDG.E.64": 2 * 18 * 2 * 4},
        why="two rows of 512 threads share an SM, with 16 columns of 16-bit weights and biases on their way to a "
            "thread, which three types of rows and three of results read; with and without a residual, copies of two "
            "matrices in front of the loop, in the loop of both, and after each of 27 last passes without"),
    "norm_forward_kernel": Budget(registers=128, shared=1024, whole_sectors=True, bound="the barriers between its three passes",
        why="16 columns of the row, of the weight and of the bias; 512 threads share an SM"),
    "norm_backward_ring_kernel": Budget(registers=255, shared=0, whole_sectors=True, ring=True,
        opcodes={"LDGSTS": 2 * 3 * (RING_COPIES + 4)},
        why="up to 32 columns each of n and g, of the weight and of the two sums over rows; 8 warps an SM are enough "
            "where the bytes in flight are in shared memory"),
    "norm_backward_sums_kernel": Budget(registers=80, shared=0, blocks=3, wide_loads=2 * 3 * 4, in_flight=64, ways=9,
        why="x and the gradient of 3 types each, four rows of both on their way to a thread; 80 registers let 3 "
            "blocks of 256 share an SM"),
    "norm_backward_kernel": Budget(registers=128, shared=1024, whole_sectors=True, threads=512, blocks=1, in_flight=64,
        why="16 columns each of n and g and of the two sums over rows; 512 threads share an SM"),
}  # fmt: skip


def table() -> str:
    """The table of docs/ptx.md: kernels whose speed is memory's."""
    head = "| kernel | registers per thread | threads per SM | bytes in flight per thread | KB in flight per SM |\n|---|---|---|---|---|\n"
    rows = (
        f"| `{kernel}` | {min(b.registers, 65_536 // threads)} | {b.blocks} x {b.threads} | {b.in_flight} "
        f"| {b.in_flight * threads / 1024:.0f} |\n"
        for kernel, b in BUDGETS.items()
        if (threads := b.threads * b.blocks)
    )
    return head + "".join(rows)

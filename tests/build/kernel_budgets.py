"""What each CUDA kernel may take of a multiprocessor, and what its machine code must contain.

A row holds for every instance of the kernel on every architecture; ``kernel<Class>`` for the instances with that class,
``kernel<Class, true>`` for those that besides have this value of their one bool. A kernel without a row fails the test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Budget:
    registers: int  # a thread, at most
    shared: int  # static bytes a block, at most, without the 1,024 that the system takes on sm_90 and later
    wide_loads: int = 0  # 16-byte loads from global memory, at least
    in_flight: int = 0  # longest run of them without any other instruction, at least: they all wait for memory together
    opcodes: Mapping[str, int] = field(default_factory=dict)  # how often at least, by the beginning of their names
    why: str = ""


BUDGETS = {
    "check_and_norm_kernel": Budget(
        registers=64,
        shared=128,
        wide_loads=4 * (4 + 1),
        in_flight=4,
        why="4 dtypes, each with an unrolled loop of 4 loads and a loop for the rest; 64 registers let 4 blocks of 256 "
        "share an SM",
    ),
    "per_tensor_norm_kernel": Budget(
        registers=64,
        shared=128,
        wide_loads=4 * (4 + 1),
        in_flight=4,
        why="the walk of check_and_norm_kernel",
    ),
    "per_tensor_finish_kernel": Budget(registers=64, shared=0, why="one warp a tensor, nothing to gain"),
    "cross_entropy_rows_kernel": Budget(
        registers=64,
        shared=128,
        wide_loads=2 * (4 + 1),
        in_flight=4,
        opcodes={"MUFU.EX2": 2 * 5 * 4},
        why="two walks over a row of the kind of check_and_norm_kernel's; 64 registers let 1,024 threads share an SM; the "
        "exponentials of four or eight logits a load are the special function unit's",
    ),
    "exponent_histogram_kernel": Budget(
        registers=64,
        shared=1280,
        wide_loads=4 * (4 + 1),
        in_flight=4,
        opcodes={"ATOMS.POPC.INC": 1},
        why="the walk of check_and_norm_kernel, and 280 counters; increments of a warp that meet are added up first",
    ),
    "unscale_kernel": Budget(
        registers=64,
        shared=0,
        wide_loads=4 * (4 + 1),
        in_flight=4,
        why="the walk of check_and_norm_kernel",
    ),
    "cast_kernel": Budget(
        registers=64,
        shared=0,
        wide_loads=2 * 3 * (1 + 1 + 2) * (4 + 1),
        in_flight=4,
        why="with and without stochastic rounding, 9 pairs of dtypes, each with an unrolled loop of 4 loads of eight "
        "elements and a loop for the rest; 64 registers let 4 blocks of 256 share an SM",
    ),
    "embedding_pieces_kernel": Budget(
        registers=80, shared=0, why="four rows of 8 columns on their way to a thread; 768 threads share an SM"
    ),
    "embedding_joints_kernel": Budget(
        registers=80, shared=0, why="four partial sums of 8 columns on their way to a thread; 768 threads share an SM"
    ),
    "softmax_rows_kernel": Budget(registers=128, shared=128, why="16 columns of the row; 512 threads share an SM"),
    "softmax_rows_backward_kernel": Budget(
        registers=128, shared=64, why="16 columns of two rows; 512 threads share an SM"
    ),
    "update_scale_kernel": Budget(registers=64, shared=0, why="one warp, nothing to gain"),
    "update_kernel<AdamW, false>": Budget(
        registers=112,
        shared=0,
        wide_loads=7 * 7,
        in_flight=6,
        why="7 ways to keep a weight, each loading two words of the gradient and of each moment and one or two of the "
        "weight; 128 registers is the limit for the 2 blocks of 256 an SM runs, and near it ptxas starts to spill",
    ),
    "update_kernel<AdamW, true>": Budget(
        registers=128,
        shared=0,
        wide_loads=9 * (9 + 11),
        in_flight=8,
        why="with extras: 9 ways to keep a weight, each with and without a third moment, and two words of the average",
    ),
    "update_kernel<Sgd, false>": Budget(
        registers=80,
        shared=0,
        wide_loads=7 * (5 + 3),
        in_flight=5,
        why="7 ways to keep a weight, each with and without momentum; 80 registers let 3 blocks of 256 share an SM",
    ),
    "update_kernel<Sgd, true>": Budget(
        registers=80,
        shared=0,
        wide_loads=9 * (7 + 5),
        in_flight=4,
        why="with extras: 9 ways to keep a weight, each with and without momentum, and two words of the average",
    ),
    "update_kernel<Lion, false>": Budget(
        registers=80,
        shared=0,
        wide_loads=7 * 5,
        in_flight=5,
        why="7 ways to keep a weight, each loading two words of the gradient and of the moment and one or two of the "
        "weight; 80 registers let 3 blocks of 256 share an SM",
    ),
    "update_kernel<Lion, true>": Budget(
        registers=80,
        shared=0,
        wide_loads=9 * 7,
        in_flight=4,
        why="with extras: 9 ways to keep a weight, and two words of the average",
    ),
    "lamb_moments_kernel": Budget(
        registers=120,
        shared=64,
        wide_loads=5 * 7,
        in_flight=6,
        why="5 ways to read a weight, each loading two words of the gradient and of each moment and one or two of the "
        "weight; 128 registers is the limit for the 2 blocks of 256 an SM runs",
    ),
    "lamb_rates_kernel": Budget(registers=64, shared=64, why="one block a tensor, nothing to gain"),
    "update_kernel<Lamb, false>": Budget(
        registers=80,
        shared=0,
        wide_loads=7 * 5,
        in_flight=5,
        why="7 ways to keep a weight, each loading two words of each moment and one or two of the weight; 80 registers "
        "let 3 blocks of 256 share an SM",
    ),
    "update_kernel<Lamb, true>": Budget(
        registers=80,
        shared=0,
        wide_loads=9 * 7,
        in_flight=4,
        why="with extras: 9 ways to keep a weight, and two words of the average",
    ),
    "update_prepare_kernel": Budget(registers=64, shared=0, why="one thread a parameter, nothing to gain"),
    "gemm_sm90_kernel": Budget(
        registers=255,
        shared=0,
        why="2 warpgroups of 255, 3 of 168 or 4 of 128, where setmaxnreg starts, fill the file",
    ),
    "gemm_sm80_kernel": Budget(
        registers=255,
        shared=0,
        opcodes={
            "HMMA.16816.F32": 2 * (64 + 64 + 16),
            "LDSM.16": 2 * 2 * (21 + 21 + 11),
            "LDGSTS.E.BYPASS.128": 6 * 12,
        },
        why="6 instances: 128 sums and two sets of fragments; nothing may be spilled in the main loop. A step of 32 k is "
        "64 mma a warp, 16 in the small tile",
    ),
    "gemm_column_sums_kernel": Budget(registers=64, shared=1024, why="bandwidth: 4 blocks of 256 share an SM"),
    "activation_backward_kernel": Budget(registers=64, shared=0, why="bandwidth: 4 blocks of 256 share an SM"),
    "swiglu_backward_kernel": Budget(registers=64, shared=0, why="bandwidth: 4 blocks of 256 share an SM"),
    "norm_forward_kernel": Budget(
        registers=128, shared=64, why="16 columns of the row, of the weight and of the bias; 512 threads share an SM"
    ),
    "norm_backward_kernel": Budget(
        registers=128,
        shared=64,
        why="16 columns each of n and g and of the two sums over rows; 512 threads share an SM",
    ),
}

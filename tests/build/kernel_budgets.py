"""What each CUDA kernel may take of a multiprocessor, and what its machine code must contain.

A row holds for every instance of the kernel on every architecture; ``kernel<Class>`` for the instances with that class. A
kernel without a row fails the test.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    registers: int  # a thread, at most
    shared: int  # static bytes a block, at most, without the 1,024 that the system takes on sm_90 and later
    wide_loads: int = 0  # 16-byte loads from global memory, at least
    in_flight: int = 0  # longest run of them without any other instruction, at least: they all wait for memory together
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
    "unscale_kernel": Budget(
        registers=64,
        shared=0,
        wide_loads=4 * (4 + 1),
        in_flight=4,
        why="the walk of check_and_norm_kernel",
    ),
    "update_scale_kernel": Budget(registers=64, shared=0, why="one warp, nothing to gain"),
    "update_kernel<AdamWRule>": Budget(
        registers=112,
        shared=0,
        wide_loads=7 * 7,
        in_flight=6,
        why="7 ways to keep a weight, each loading two words of the gradient and of each moment and one or two of the "
        "weight; 128 registers is the limit for the 2 blocks of 256 an SM runs, and near it ptxas starts to spill",
    ),
    "update_prepare_kernel<AdamWRule>": Budget(registers=64, shared=0, why="one thread a parameter, nothing to gain"),
    "update_kernel<SgdRule>": Budget(
        registers=80,
        shared=0,
        wide_loads=7 * (5 + 3),
        in_flight=5,
        why="7 ways to keep a weight, each with and without momentum; 80 registers let 3 blocks of 256 share an SM",
    ),
    "update_prepare_kernel<SgdRule>": Budget(registers=64, shared=0, why="one thread a parameter, nothing to gain"),
    "update_kernel<LionRule>": Budget(
        registers=80,
        shared=0,
        wide_loads=7 * 5,
        in_flight=5,
        why="7 ways to keep a weight, each loading two words of the gradient and of the moment and one or two of the "
        "weight; 80 registers let 3 blocks of 256 share an SM",
    ),
    "update_prepare_kernel<LionRule>": Budget(registers=64, shared=0, why="one thread a parameter, nothing to gain"),
    "gemm_sm90_kernel": Budget(
        registers=168, shared=0, why="3 warpgroups of 168, where setmaxnreg starts, fill the file"
    ),
    "gemm_reduce_kernel": Budget(registers=64, shared=0, why="bandwidth: 4 blocks of 256 share an SM"),
}

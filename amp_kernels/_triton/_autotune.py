"""Launch configurations of the Triton kernels: pure functions of shape, dtype and GPU, so that they are tested without one.

Nothing is timed at run time: results would depend on noise, and the first call of each shape would take minutes of trials. Instead
each architecture has a table of candidates, ranked by a model that counts the cycles of a tile on one multiprocessor from the rates of
the data sheet. No figure in the model is a fit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class GemmConfig:
    """Tile, warps and pipeline depth of ``_triton/_gemm_kernel.py``, and into how many parts K is split."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # rows of tiles that are computed together, so that they find b in L2
    tma: bool = False  # whether to load through TMA descriptors where the operands allow it
    splits: int = 1  # programs that share a tile; the host may find that fewer have work
    b_tiles: int = 1  # tiles of b that a is multiplied with: 2 where the activation takes two values

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the pipeline's stages, for 16-bit operands; barriers come on top."""
        return self.num_stages * (self.block_m + self.b_tiles * self.block_n) * self.block_k * 2

    @property
    def accumulators(self) -> int:
        """Accumulator registers of a thread."""
        return self.b_tiles * self.block_m * self.block_n // (32 * self.num_warps)


@dataclass(frozen=True)
class Chip:
    """The properties of a GPU that the model uses."""

    multiprocessors: int
    shared_limit: int  # bytes a block may use
    macs: int  # dense 16-bit multiply-adds a clock and multiprocessor
    candidates: tuple[GemmConfig, ...]
    full_epilogue: int  # accumulators a thread that leave the epilogue room for a second value of each


# (block_m, block_n, block_k, warps, stages), the preferred one first among equals. A tile of 128 x 256 has 128 accumulators a thread:
# that is as many as fit together with a plain epilogue. On Hopper a 128-wide tile has 8 warps: with 4, Triton has been seen to miscompile.
_HOPPER = (
    (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (64, 128, 64, 8, 4),
    (128, 64, 64, 8, 4),
    (64, 64, 64, 4, 5),
    (64, 32, 64, 4, 6),
    (64, 16, 128, 4, 4),
)
# On Blackwell a tile of 256 rows spills as soon as there is a bias.
_BLACKWELL = tuple(row for row in _HOPPER if row[0] < 256)
# mma.sync keeps operand fragments in registers next to the accumulators: BLOCK_K 32, and 8 warps from 64 x 128 on.
_AMPERE = (
    (128, 256, 32, 8, 3),
    (128, 128, 32, 8, 4),
    (64, 128, 32, 8, 4),
    (128, 64, 32, 8, 4),
    (64, 64, 64, 4, 4),
    (32, 64, 64, 4, 4),
    (64, 32, 64, 4, 4),
    (16, 64, 64, 4, 4),
    (64, 16, 64, 4, 4),
)
# Copies of 4 or 8 bytes take two to four times the addresses.
_NARROW = (
    (128, 128, 32, 8, 4),
    (64, 64, 32, 8, 4),
    (64, 32, 32, 4, 4),
    (64, 16, 32, 4, 4),
)
# Loads of 2 bytes cannot be asynchronous: they pass through registers, so the tiles are small, and nothing is pipelined.
_UNALIGNED = (
    (128, 128, 32, 8, 2),
    (64, 64, 32, 8, 2),
    (64, 32, 32, 4, 2),
    (64, 16, 32, 4, 2),
)


def _rows(table: tuple[tuple[int, ...], ...], tma: bool = False) -> tuple[GemmConfig, ...]:
    return tuple(GemmConfig(*row, tma=tma) for row in table)


_A100 = Chip(108, 166_912, 1024, _rows(_AMPERE), 32)
_SMALL = Chip(84, 101_376, 512, _rows(_AMPERE), 32)  # GeForce and workstation chips: 99 KiB of shared memory
_H100 = Chip(132, 232_448, 2048, _rows(_HOPPER, tma=True), 64)
_B200 = Chip(148, 232_448, 4096, _rows(_BLACKWELL, tma=True), 64)


def chip(capability: tuple[int, int]) -> Chip:
    """The chip of a compute capability; unknown ones are taken for the nearest older one."""
    major, minor = capability
    if major in (10, 11):
        return _B200
    if major == 9:
        return _H100
    return _A100 if (major, minor) == (8, 0) else _SMALL


def loads_by_tma(capability: tuple[int, int]) -> bool:
    """True if the GPU's configurations for aligned operands load through TMA descriptors."""
    return chip(capability).candidates[0].tma


_BY_ACCESS = {1: _rows(_UNALIGNED), 2: _rows(_NARROW), 4: _rows(_NARROW)}
_INVARIANT_ROWS = 4096
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MOST_PARTIALS = 2**27  # bytes of partial sums: memory that a call takes besides its result
_LEAST_STEPS = 4  # of the pipeline in a split: with fewer it would be filled and emptied only
_FILL_CYCLES = 2000  # of a block before its first product and after its last one: latency that nothing hides
_LAUNCH_CYCLES = 4000  # of a second kernel, about two microseconds
_L2_BYTES = 32  # a clock and multiprocessor: half of what its port takes, since all of them read at a time
_MEMORY_BYTES = 16  # the same of the GPU's memory, where partial sums may have gone


def candidates(
    capability: tuple[int, int],
    vec: int = 8,
    *,
    full_epilogue: bool = False,
    gated: bool = False,
    backward: bool = False,
) -> tuple[GemmConfig, ...]:
    """The configurations without a split from which :func:`gemm_config` chooses, by arguments of the same names."""
    target = chip(capability)
    rows = _BY_ACCESS.get(vec, target.candidates)
    if gated and not backward:
        rows = tuple(replace(c, b_tiles=2) for c in rows)
    if full_epilogue or gated:
        # Narrow copies and the four values of a gated derivative take registers of their own; two sums become one result.
        limit = 32 if vec < 8 or (gated and backward) else 64 if gated else target.full_epilogue
        rows = tuple(c for c in rows if c.accumulators <= limit)
    return rows


@functools.lru_cache(maxsize=4096)
def gemm_config(
    m: int,
    n: int,
    k: int,
    *,
    batch: int = 1,
    out_bytes: int = 2,
    capability: tuple[int, int] = (8, 0),
    vec: int = 8,
    full_epilogue: bool = False,
    gated: bool = False,
    backward: bool = False,
    batch_invariant: bool = False,
    whole: bool = False,
) -> GemmConfig:
    """The configuration for a GEMM of 16-bit operands; each size at least 1, except k.

    Args:
        m, n, k: rows and columns of the result, and terms of each sum.
        batch: number of such products.
        out_bytes: bytes that the epilogue reads and writes per result.
        capability: compute capability of the GPU.
        vec: elements that one access to the operands may take: 1, 2, 4 or 8. With TMA always 8: others are copied first.
        full_epilogue: the epilogue does more than add a bias: an activation other than relu, a pre-activation, or a residual.
        gated: the activation takes two values, each a column of a @ b (then n counts half of its columns) or, with ``backward``,
            of the pre-activation.
        backward: the epilogue is the derivative of the activation.
        batch_invariant: choose by n alone, as for one fp32 matrix of a fixed number of rows and terms, and do not split K. A step
            divides 64 terms, so that a sum that starts from C continues as if it had never stopped.
        whole: do not split K.
    """
    if batch_invariant:
        m, k, batch, out_bytes = _INVARIANT_ROWS, _INVARIANT_ROWS, 1, 4
    target = chip(capability)

    def cycles(config: GemmConfig) -> float:
        splits = config.splits
        columns = n * (2 if gated and not backward and splits > 1 else 1)  # a split leaves the two values apart
        tiles = batch * -(-m // config.block_m) * -(-columns // config.block_n)
        resident = max(1, min(target.shared_limit // (config.shared_bytes + 1024), 4, 512 // (32 * config.num_warps)))
        if splits > 1 and tiles >= target.multiprocessors * resident:
            return math.inf  # whole tiles fill the chip
        if splits > 1 and 4 * splits * batch * m * columns > _MOST_PARTIALS:
            return math.inf
        waves = -(-tiles * splits // (target.multiprocessors * resident))
        per_wave = min(resident, -(-tiles * splits // target.multiprocessors))  # blocks that share a multiprocessor
        steps = -(-k // (config.block_k * splits)) * config.block_k
        products = config.b_tiles * config.block_m * config.block_n / target.macs
        loads = (config.block_m + config.b_tiles * config.block_n) * 2 / _L2_BYTES
        stores = config.block_m * config.block_n * (4 if splits > 1 else out_bytes) / _L2_BYTES
        total = waves * (_FILL_CYCLES + per_wave * (steps * max(products, loads) + stores))
        if splits > 1:
            moved = batch * m * (4 * splits * columns + n * out_bytes)
            total += _LAUNCH_CYCLES + moved / (target.multiprocessors * _MEMORY_BYTES)
        return total

    rows = candidates(capability, vec, full_epilogue=full_epilogue, gated=gated, backward=backward)
    if batch_invariant:
        rows = tuple(c for c in rows if c.block_k <= 64)
    parts = () if batch_invariant or whole else candidates(capability, vec)
    split = (
        replace(c, splits=splits) for c in parts for splits in _SPLITS[1:] if k >= splits * _LEAST_STEPS * c.block_k
    )
    return min((*rows, *split), key=cycles)

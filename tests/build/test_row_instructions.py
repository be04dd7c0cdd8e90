"""Instructions of row kernels for an element: a thread is followed through the machine code (sm_90a) of a row that it finds
in the middle of its work, as the next one is on its way. At a copy's rate an SM of the H200 issues some 25 instructions for an element
of 16 bits, of which 4 bytes move. So the share of a copy's rate that instructions leave is predicted as 25 / 4 times the bytes that an
element moves, over its instructions, and at most 1; that share takes bytes on their way, too. Needs nvcc, no GPU."""

from __future__ import annotations

import functools
import re
import struct
from pathlib import Path
from typing import NamedTuple

import pytest

from amp_kernels._checks.activations import ACTIVATIONS
from tools.ptx.cuobjdump import cuobjdump
from tools.sass.listing import branch_tables, parse
from tools.sass.thread import Thread

from .machine_code import cubin_of

pytestmark = pytest.mark.nvcc
FP16, BF16, FP32 = range(3)
PARAMETERS = 0x210  # where they begin in the first constant bank
COLUMNS = 32_768
THREADS = 512  # that share a row
CLASSES = 50_257  # GPT-2's
LOSS_THREADS = 512  # that share a row of so many
WIDTH = 768  # GPT-2's: a warp has a row, a lane 24 columns of it
ISSUED = 25 / 4  # instructions of an SM of the H200 for a byte that moves at a copy's rate
AT_ONCE = 26_000  # bytes of an SM on their way at that rate: 4.25 TB/s for 800 ns, shared by 132 SMs
MEAN, BIAS, RESIDUAL = 1, 2, 4

# type of all tensors, what the call has, instructions an element
NORMS = [
    (FP16, MEAN | BIAS, 20.5),
    (BF16, MEAN | BIAS, 21),
    (FP32, MEAN | BIAS, 19.5),
    (BF16, 0, 17.5),
    (BF16, MEAN | BIAS | RESIDUAL, 31.5),
]


WIDE = 24.5  # instructions an element of such a row in the registers of 16 warps

# type of the logits, whether there is a gradient, the label smoothing, instructions an element
LOSSES = [(FP16, True, 0.0, 23.5), (BF16, True, 0.0, 24), (BF16, False, 0.0, 15.5), (BF16, True, 0.1, 31)]


# activation, instructions an element of its gradient with sums of columns
GRADIENTS = [("relu", 13), ("gelu", 32.5), ("gelu_tanh", 35.5), ("silu", 35)]

CLUSTER, TEAM = 8, 256  # blocks that share a row of COLUMNS in norm_backward, and threads of each
CLUSTERS = [(BF16, 35), (FP16, 33), (FP32, 30)]  # type of all tensors, instructions an element


class Ring(NamedTuple):
    """A kernel that has rows of WIDTH columns in registers, and the next ones on their way into a ring."""

    source: str
    kernel: str
    warps: int  # of an SM
    stages: int  # rows of a warp in shared memory, the one in work among them
    arguments: tuple
    read: int  # bytes an element
    moved: int  # with those written
    most: float  # instructions an element
    share: float  # of a copy's rate, predicted, at least


RINGS = {
    "norm_forward, 16 bits": Ring("norm/forward", "norm_forward_ring", 16, 3, (BF16, BF16, False), 2, 4, 19, 0.9),
    "norm_forward, added to a stream of fp32": Ring("norm/forward", "norm_forward_ring", 16, 3, (BF16, BF16, True), 6, 12, 24, 0.9),
    "norm_backward, 16 bits": Ring("norm/backward", "norm_backward_ring", 8, 3, (BF16, BF16, False), 4, 6, 27, 0.8),
    "norm_backward, of a stream of fp32": Ring("norm/backward", "norm_backward_ring", 8, 3, (BF16, FP32, True), 10, 16, 28, 0.8),
}  # fmt: skip


class Code(NamedTuple):
    """The parts of a kernel that Thread follows."""

    instructions: dict
    table: list[int]


def kernels_of(source: str, folder: Path) -> dict[str, Code]:
    cubin = cubin_of(source, folder)
    tables = branch_tables(cuobjdump("-elf", cubin))
    return {name: Code(code, tables.get(name, [])) for name, code in parse(cuobjdump("-sass", cubin)).items()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels of a source, by name."""
    return functools.cache(lambda source: kernels_of(source, tmp_path_factory.mktemp("rows")))


@pytest.fixture(scope="module")
def norms(compiled) -> dict[str, Code]:
    """The kernels whose rows stay in shared memory, by whether they add a residual."""
    found = compiled("norm/forward.cu")
    return {re.search(r"Lb([01])E", n)[1]: c for n, c in found.items() if "norm_forward_resident_kernel" in n}


@pytest.fixture(scope="module")
def loss(compiled) -> Code:
    """The kernel of the longest rows."""
    found = compiled("loss/cross_entropy.cu")
    (name,) = (name for name in found if f"cross_entropy_rows_kernelILi{LOSS_THREADS}ELb0E" in name)
    return found[name]


def bank(threads: int, arguments: bytes, blocks: int = 1) -> bytes:
    """The first constant bank: a block of so many threads, a grid of blocks, and the kernel's arguments."""
    result = bytearray(0x400)
    struct.pack_into("<I", result, 0x0, threads)
    struct.pack_into("<I", result, 0xC, blocks)
    result[PARAMETERS : PARAMETERS + len(arguments)] = arguments
    return bytes(result)


def pointers(*given: object) -> list[int]:
    return [(0x7E00 + i << 32) if there else 0 for i, there in enumerate(given)]


def norm(dtype: int, has: int, rows: int) -> bytes:
    """NormForward and the number of teams."""
    bias, residual = has & BIAS, has & RESIDUAL
    # x, residual, weight, bias, sum, y, mean, rstd
    tensors = pointers(1, residual, 1, bias, residual, 1, has & MEAN, 1)
    return bank(THREADS, struct.pack("<8Q5B3xqifi", *tensors, *[dtype] * 5, rows, COLUMNS, 1e-5, 1))


def cross_entropy(dtype: int, gradient: bool, smoothing: float, rows: int) -> bytes:
    """CrossEntropyRows of classes, and the PieceShape of rows of 16 bits: whole ones in two slots."""
    tensors = pointers(1, 1, 0, 1, 1, gradient)  # logits, target, weight, factor, loss, grad
    terms = 1 - smoothing, smoothing / CLASSES, 0.0
    strides = CLASSES, 1, 1, CLASSES
    problem = struct.pack("<6Qqi4x4qq3f4B72x", *tensors, rows, CLASSES, *strides, -100, *terms, dtype, 0, 0, dtype)
    slot, sums = (CLASSES * 2 + 30) & -16, 2 * (LOSS_THREADS // 32) * 4
    return bank(LOSS_THREADS, problem + struct.pack("<5i", CLASSES, 2, slot, sums + 2 * slot, 1))


def ring_of_norm_forward(x: int, y: int, adds: bool, rows: int) -> bytes:
    """NormForward with weight, bias and, of fp32, a residual; one team."""
    tensors = pointers(1, adds, 1, 1, adds, 1, 1, 1)
    types = x, FP32, FP32, FP32, y
    return bank(32, struct.pack("<8Q5B3xqifi", *tensors, *types, rows, WIDTH, 1e-5, 1))


def ring_of_norm_backward(
    grad: int, x: int, branches: bool, rows: int, columns: int = WIDTH, threads: int = 32, blocks: int = 1
) -> bytes:
    """NormBackward with both sums over rows and, if it branches, an fp32 gradient of the sum and a branch in the type of grad; one
    team."""
    # grad, x, weight, grad_sum, mean, rstd, out, branch, slots, sums
    tensors = pointers(1, 1, 1, branches, 1, 1, 1, branches, 1, 1)
    types = grad, x, FP32, FP32, grad
    problem = struct.pack("<10Q5B3xqiii", *tensors, *types, rows, columns, 2, 1)
    return bank(threads, problem, blocks)


def gradient_with_sums(dtype: int, activation: int, rows: int) -> bytes:
    """ActivationBackward, and the ColumnStrips of a block alone: a strip of 32 threads, and so many rows for each of 8 teams."""
    lanes, teams = 32, 8
    problem = struct.pack("<3Q2B6x2qi4x", *pointers(1, 1, 1), dtype, dtype, teams * rows, 8 * lanes, activation)
    return bank(lanes * teams, problem + struct.pack("<2Q3i4xq", *pointers(1, 1), 1, lanes, teams, 1))


ARGUMENTS = {"norm_forward_ring": ring_of_norm_forward, "norm_backward_ring": ring_of_norm_backward}


class Copying(Thread):
    """Counts the copies of 16 bytes that it has started before it waits for the first."""

    started = 0
    before_waiting = None

    def execute(self, x, at):
        self.started += x.name == "LDGSTS" and "128" in x.modifiers
        if x.name == "DEPBAR" and self.before_waiting is None:
            self.before_waiting = self.started
        return super().execute(x, at)


def of_a_row(code: Code, constants, thread: int) -> int:
    """Instructions of a row that is neither the first nor the last; constants: for a number of rows."""
    two, three = (len(Thread(*code, constants(rows), thread).run()) for rows in (2, 3))
    return three - two


@pytest.mark.parametrize(("dtype", "has", "most"), NORMS)
def test_norms_of_long_rows(dtype, has, most, norms):
    code = norms["1" if has & RESIDUAL else "0"]
    assert of_a_row(code, lambda rows: norm(dtype, has, rows), 37) / (COLUMNS / THREADS) <= most


def test_norms_of_rows_in_all_registers(compiled):
    """fp32 rows: the copies of the next row are on their way through all passes over a row."""
    (code,) = (
        c
        for name, c in compiled("norm/forward.cu").items()
        if "norm_forward_ring_kernelINS_7RowTeamILi16ELi64E" in name
    )
    threads = [Copying(*code, norm(FP32, MEAN | BIAS, rows), 37) for rows in (2, 3)]
    two, three = (len(thread.run()) for thread in threads)
    assert (three - two) / (COLUMNS / THREADS) <= WIDE
    assert 16 * THREADS * threads[0].before_waiting == 4 * COLUMNS


@pytest.mark.parametrize(("dtype", "most"), CLUSTERS)
def test_norms_of_rows_that_a_cluster_shares(dtype, most, compiled):
    """A block's slice of COLUMNS, which one of its two teams has: while rows of both are in work, the next ones are on their way."""
    (code,) = (
        c
        for name, c in compiled("norm/backward.cu").items()
        if f"norm_backward_ring_kernelINS_7RowTeamILi8ELi16ELi{CLUSTER}E" in name
    )
    size, columns = 4 if dtype == FP32 else 2, COLUMNS // CLUSTER

    def follow(rows):
        problem = ring_of_norm_backward(dtype, dtype, False, rows, COLUMNS, TEAM, CLUSTER)
        thread = Copying(*code, problem, 37)
        return len(thread.run()), thread

    (six, thread), (seven, last) = follow(6), follow(7)
    instructions = (seven - six) / (columns / TEAM)
    assert 0.9 * most < instructions <= most
    assert instructions <= ISSUED * 3 * size
    copied = 16 * TEAM * (last.started - thread.started)
    assert copied == 2 * size * columns
    assert 16 * TEAM * thread.before_waiting == 3 * copied
    assert 2 * 2 * copied >= AT_ONCE * 2 / 3


@pytest.mark.parametrize(("dtype", "gradient", "smoothing", "most"), LOSSES)
def test_losses_of_long_rows(dtype, gradient, smoothing, most, loss):
    """A row whose target is none of the thread's columns."""
    executed = of_a_row(loss, lambda rows: cross_entropy(dtype, gradient, smoothing, rows), 70)
    assert 0.9 * most < executed / (CLASSES / LOSS_THREADS) <= most


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(("activation", "most"), GRADIENTS)
def test_gradients_of_activations_with_sums_of_columns(activation, most, dtype, compiled):
    """A thread has 8 columns and two rows at a time, of which 6 bytes an element move."""
    (code,) = (
        c
        for name, c in compiled("activation/backward.cu").items()
        if f"activation_backward_sums_kernelINS_4{('fp16', 'bf16')[dtype]}E" in name
    )

    def follow(rounds):
        problem = gradient_with_sums(dtype, list(ACTIVATIONS).index(activation), 2 * rounds)
        return len(Thread(*code, problem, 37).run())

    instructions = (follow(5) - follow(4)) / (2 * 8)
    assert 0.9 * most < instructions <= most
    assert instructions <= ISSUED * 3 * 2


@pytest.mark.parametrize("ring", RINGS.values(), ids=RINGS)
def test_rings_of_rows(ring, compiled):
    """Rows of GPT-2's width, whose first ones are on their way before the loop: the seventh adds a row's work and copies."""
    (code,) = (
        c for name, c in compiled(f"{ring.source}.cu").items() if f"{ring.kernel}_kernelINS_7RowTeamILi1ELi24E" in name
    )
    arguments = ARGUMENTS[ring.kernel]
    six, seven = (Copying(*code, arguments(*ring.arguments, rows), 5) for rows in (6, 7))
    instructions = (len(seven.run()) - len(six.run())) / (WIDTH / 32)
    assert 0.9 * ring.most < instructions <= ring.most
    assert min(1, ISSUED * ring.moved / instructions) >= ring.share
    # 32 lanes of each warp; while a row is in work, the others are on their way, and writes take their part of the rate.
    copied = 16 * 32 * (seven.started - six.started)
    assert copied == WIDTH * ring.read
    assert 16 * 32 * six.before_waiting == ring.stages * copied
    assert (ring.stages - 1) * copied * ring.warps >= AT_ONCE * ring.read / ring.moved

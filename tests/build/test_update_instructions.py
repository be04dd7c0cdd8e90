"""Instructions for an element of AdamW with moments in 8 bits: a thread is followed through the machine code (sm_90a) of a tensor in whole
tiles, whose values are normal ones. Needs nvcc, no GPU."""

from __future__ import annotations

import struct

import pytest

from tools.sass.thread import Thread

from .test_row_instructions import BF16, FP32, bank, kernels_of, pointers

pytestmark = pytest.mark.nvcc
TENSORS, THREADS, UNIT = 312, 256, 1024  # Tuned<AdamW>::kTensors8; elements of a unit of the list
TILE = 8 * THREADS
FLOAT, SPLIT, SPLIT24 = 0, 6, 8  # WeightKind

# Weight, type of the gradient, moments, average, instructions an element.
CASES = {
    "split24": (SPLIT24, BF16, 2, False, 80),
    "split": (SPLIT, BF16, 2, False, 92),
    "fp32": (FLOAT, FP32, 2, False, 70),
    "amsgrad": (SPLIT24, BF16, 3, False, 122),
    "average": (SPLIT24, BF16, 2, True, 98),
}


def column(kind: str, value: int) -> bytes:
    """An array of UpdateArgs8, whose first tensor has this value."""
    return struct.pack(f"<{TENSORS}{kind}", value, *[0] * (TENSORS - 1))


# Words of each operand: gradient, weight, remainder or copy, moments, average, exponents.
WORDS = [0x3A803A80, 0x3C803C80, 0x01010101, 0x70707070, 0xE0E0E0E0, 0xE0E0E0E0, 0x3C800000, *[0x71717171] * 3]
# UpdateRow<AdamW>: its scalars, inverse of the scale, clip factor, and what the average takes.
ROW = struct.unpack("<24I", struct.pack("<9f4x3f44x", 0.999, 0, 0.1, 0.99, 0.01, 1e-8, 0.9, 1 / 0.9, 1e-3, 1, 0.5, 0.1))


def memory(address: int) -> int:
    operand, byte = (address >> 32) - 0x7E00, address & 0xFFFFFFFF
    return WORDS[operand] if operand < len(WORDS) else ROW[byte // 4]


def arguments(weight: int, grad: int, moments: int, average: bool, tiles: int) -> bytes:
    """UpdateArgs8 of one tensor, which one block walks over, StepDecisions, the rows, and the keys."""
    there = [m < moments for m in range(3)]
    units = tiles * TILE // UNIT
    data = struct.pack("<2i4I", 1, UNIT, units, 1, units, 0) + column("I", units) + column("q", tiles * TILE)
    addresses = pointers(1, 1, 1, *there, average, *there, 1)  # grad, main, second, moments, ema, exponents, row
    for address in addresses[:7]:
        data += column("Q", address)
    data += column("I", 0)
    for byte in (weight, grad, FP32, FP32, FP32, 1):  # kind, dtypes of gradient and moments, aligned
        data += column("B", byte)
    for address in addresses[7:10]:
        data += column("Q", address)
    return bank(THREADS, data + struct.pack("<4Qf4xQ20I", 0, 0, 0, 0, 0.0, addresses[10], *[0] * 20))


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    found = kernels_of("update/rules/adamw.cu", tmp_path_factory.mktemp("update"))
    return next(code for name, code in found.items() if "update8_kernel" in name)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_of_a_tile(case, code):
    *what, most = case
    two, three = (Thread(*code, arguments(*what, tiles), 37, memory=memory).run() for tiles in (2, 3))
    assert not [x for x in three if x.name in ("STL", "LDL")], "registers are spilled"
    assert 0.9 * most < (len(three) - len(two)) / 8 <= most

"""Instructions of the Hopper GEMM's epilogue for an element of C: a thread of a consumer is followed through the machine code of a few
instances, from the last product of its tile to the end, and the budgets of instructions and of cycles hold for all that it does there.
Needs nvcc, no GPU."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from tools.ptx.cuobjdump import cuobjdump
from tools.sass.listing import Instruction, branch_tables, parse
from tools.sass.thread import Thread

from ..helpers.patience import PATIENCE

_host = pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
THREAD = 128 + 5  # of the first consumer

# The tile and whether its output is fp32: two consumers, pingpong, narrow boxes.
TILES = [("128x256", False), ("128x128 pingpong", False), ("128x144", False)]
EXHAUSTIVE = [
    *(
        (tile, False)
        for tile in ("192x192", "192x128", "128x176", "128x64", "128x64 pingpong", "64x128", "64x64", "64x32", "64x16")
    ),
    *(
        (tile, True)
        for tile in (
            "128x256",
            "192x192",
            "192x128",
            "128x128 pingpong",
            "128x64",
            "128x64 pingpong",
            "64x128",
            "64x64",
        )
    ),
]

# A sum that leaves as it is takes 0.63: a rounding for two, an stmatrix for eight. The rest of a tile keeps a thread with 128 sums
# at 1.5: to free the last stage and hand the tensor cores over (13), to learn what the tile's epilogue and the next tile are (19 and 26),
# addresses (15), for each 64 rows of 128 columns a fence and two barriers (14), and the block's end, once (17).

# More of a sum where a tile's width does not divide into boxes, and the threads store its rounded rows themselves; in its narrow boxes;
# where a consumer has two slices of 64 rows, for each of which the boxes take the bias and their place anew; and of a derivative, whose
# operand is widened.
ROWS, NARROW, SLICES, DERIVATIVE = 2.8, 0.9, 1, 0.9
ODD_ROWS = {16: 43, 32: 23, 64: 14.7}  # by the columns staged at a time; of more 11
IN_REGISTERS = ("plain", "alpha", "bias", "float_bias", "odd_rows")
ARITHMETIC = {"relu": 2, "gelu": 20.5, "gelu_tanh": 23.2, "silu": 22}  # with the product, backward


def budget(epilogue: str, shape: dict, as_float: bool, sums: int) -> dict[str, float]:
    """Instructions and cycles of a lone warp at most."""
    of_tile, of_sum = instructions(epilogue, shape, as_float)
    idle_of_tile, idle_of_sum = idle_cycles(epilogue, shape, as_float)
    issued = of_tile + of_sum * sums
    return {"instructions": issued, "cycles": issued + idle_of_tile + idle_of_sum * sums}


def instructions(epilogue: str, shape: dict, as_float: bool) -> tuple[float, float]:
    """Instructions at most: of a tile, to be told the next one included, and of each of its sums."""
    n, rows = shape["n"], ROWS if shape["n"] % 64 else 0
    if epilogue in ("plain", "alpha"):
        return 97, 0.9 + (epilogue == "alpha") + rows
    if epilogue in ("bias", "float_bias"):  # loaded once for all slices
        return 108, 2.9 + rows
    if epilogue == "odd_rows":  # by the threads, word by word
        staged = n if n % 64 else 64 if n % 128 else 128
        return 125, 11.7 if as_float else ODD_ROWS.get(staged, 11)
    if in_elements(epilogue, as_float):  # 64 columns at a time, the last of which may lie beside the tile
        staged = min(n, 64)
        return 200, of_elements(epilogue, as_float) * -(-n // staged) * staged / n
    tile, element = tma_epilogue(epilogue)
    chunks = -(-n // 32) * 32 / n  # 32 at a time, likewise
    element += NARROW * (n % 64 > 0) + SLICES * (rows_of_a_consumer(shape) == 128)
    return tile, element * chunks + rows * epilogue.endswith("_z")


def idle_cycles(epilogue: str, shape: dict, as_float: bool) -> tuple[float, float]:
    """Cycles at most in which a lone warp issues nothing, since results of the instructions before are not there yet: of a tile and of
    each of its sums. A derivative that computes one value at a time takes 50 of a sum."""
    if epilogue in ("plain", "alpha"):
        return 300, 1.4
    if epilogue in ("bias", "float_bias"):
        return 350, 2.2
    if epilogue == "odd_rows":
        return 350, 12
    if in_elements(epilogue, as_float):
        return 400, 3.6 * instructions(epilogue, shape, as_float)[1]
    chunks = -(-shape["n"] // 32) * 32 / shape["n"]
    element = 17 + 6 * (shape["consumers"] == 3)  # which have two thirds of the registers
    return 500, chunks * (
        30 if epilogue == "dswiglu" else element + 6 * epilogue.endswith("_sums")
    ) + 3 * epilogue.endswith("_z")


def in_elements(epilogue: str, as_float: bool) -> bool:
    """True if what is read or written cannot be moved by TMA: a derivative beside a C in fp32."""
    return epilogue == "elements" or (as_float and epilogue.startswith("d"))


def of_elements(epilogue: str, as_float: bool) -> float:
    """Into every other place: in fp32 they lie so far apart that a lane takes its elements along a row, each with addresses of its own.
    A derivative also reads its pre-activation; swiglu's reads two, and has two results."""
    if epilogue in ("elements", "dswiglu"):
        return {"elements": 112 if as_float else 75, "dswiglu": 168}[epilogue]
    return 107 + ARITHMETIC[epilogue.removeprefix("d").removesuffix("_sums")] + 8 * epilogue.endswith("_sums")


def tma_epilogue(epilogue: str) -> tuple[float, float]:
    tile, element = 160, 6.7 + DERIVATIVE * epilogue.startswith("d")
    if epilogue == "swiglu":  # two sums make an element
        return tile, (element + 24) / 2
    if epilogue == "dswiglu":  # two elements
        return tile, element + 30
    name = epilogue.removeprefix("bias_").removesuffix("_sums").removesuffix("_z").removeprefix("d")
    element += ARITHMETIC.get(name, 2)  # of the residual: widened, and added
    return tile + 25 * epilogue.endswith("_z"), element + 3.4 * epilogue.endswith("_z") + 4 * epilogue.endswith("_sums")


def number(tile: str) -> int:
    """The first tile with this name, which does without a cluster what the others do in one."""
    candidates = enumerate(_host.gemm_candidates()["sm90"])
    return next(i for i, t in candidates if f"{t['m']}x{t['n']}" + " pingpong" * t["pingpong"] == tile)


def rows_of_a_consumer(tile: dict) -> int:
    return tile["m"] // (1 if tile["pingpong"] else tile["consumers"])


def sums_of_a_thread(tile: dict) -> int:
    return rows_of_a_consumer(tile) * tile["n"] // 128


def request(epilogue: str, as_float: bool) -> dict:
    """Arguments of plan_gemm for an epilogue. Alpha alone is to it a bias, which costs more."""
    asked = {"out_bytes": 4 if as_float else 2, "plain": epilogue == "plain", "tma_output": epilogue != "odd_rows"}
    if epilogue == "elements":
        return asked | {"row_output": False}  # which leads the model there, too
    name = epilogue.removeprefix("bias_")
    if name == "residual":
        return asked | {"side_bytes": asked["out_bytes"]}
    backward = name.startswith("d")
    activation = name.removeprefix("d").removesuffix("_sums").removesuffix("_z")
    if activation not in (*ARITHMETIC, "swiglu"):
        return asked
    side = 2 if backward else asked["out_bytes"] * name.endswith("_z")
    return asked | {
        "tma_epilogue": not in_elements(epilogue, as_float),
        "activation": activation,
        "backward": backward,
        "side_bytes": side,
        "keeps_z": name.endswith("_z"),
        "column_sums": name.endswith("_sums"),
    }


CXX = ["c++", "-std=c++20", "-O0", "-w", "-DAK_EMULATE", "-I", ROOT / "csrc", "-I", ROOT / "tools"]


@functools.cache
def emulator(folder: Path) -> list[Path]:
    """Objects of the emulator, which are the same for all tiles."""
    sources = sorted((ROOT / "tools" / "emulator").glob("*.cpp"))
    subprocess.run([*CXX, "-c", *sources], check=True, timeout=PATIENCE, cwd=folder)
    return [folder / f"{source.stem}.o" for source in sources]


def arguments(folder: Path, tile: int, as_float: bool) -> tuple[int, dict[str, bytes]]:
    """Offset of the consumer's mailbox, and the kernel's last argument by epilogue."""
    program = folder / "arguments"
    defines = [f"-DTILE={tile}", f"-DFLOAT={str(as_float).lower()}"]
    command = [*CXX, *defines, HERE / "epilogue_arguments.cpp", *emulator(folder.parent), "-o", program, "-pthread"]
    subprocess.run(command, check=True, timeout=PATIENCE)
    mailbox, *lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return int(mailbox), {name: bytes.fromhex(data) for name, data in (line.split() for line in lines)}


def constants(data: bytes) -> bytes:
    """The first constant bank: blocks and threads of the launch, then, after five tensor maps, the arguments."""
    bank = bytearray(0x500)
    bank[0x0:0x4] = (384).to_bytes(4, "little")
    bank[0xC:0x10] = (2).to_bytes(4, "little")
    return bytes(bank) + data


def mailbox_words(offset: int) -> dict[int, list[int]]:
    """The words that the scheduler warp posts: a first tile of one k step, then the end of the tiles."""
    first = 0x400 + offset + 64  # where dynamic shared memory begins, a multiple of 1,024
    tile = {"m": 0, "n": 0, "batch": 0, "steps": 1, "split": 0, "number": 0, "place in the ring": 0, "other": 0}
    return {first + 4 * i: [word, 0] for i, word in enumerate(tile.values())}


def after_the_products(path: list[Instruction]) -> list[Instruction]:
    last = max(i for i, x in enumerate(path) if x.name == "HGMMA")
    return path[last + 1 :]


def faults(tile: int, as_float: bool, cubin: Path, folder: Path) -> tuple[dict, dict]:
    """Numbers over their budget or unlike the model, by epilogue: found and allowed, or modelled."""
    shape = _host.gemm_candidates()["sm90"][tile]
    sums = sums_of_a_thread(shape)
    ((kernel, code),) = parse(cuobjdump("-sass", cubin)).items()
    table = branch_tables(cuobjdump("-elf", cubin)).get(kernel, [])
    over, unlike_the_model = {}, {}
    mailbox, of_epilogues = arguments(folder, tile, as_float)
    for epilogue, data in of_epilogues.items():
        path = after_the_products(Thread(code, table, constants(data), THREAD, mailbox_words(mailbox)).run())
        assert not [x for x in path if x.name in ("STL", "LDL")], f"{epilogue}: registers are spilled"
        if epilogue not in IN_REGISTERS and not shape["takes_epilogue"]:
            continue
        found = {"instructions": len(path), "cycles": sum(x.stall for x in path)}
        allowed = budget(epilogue, shape, as_float, sums)
        modelled = _host.gemm_epilogue(shape, shape["m"], shape["n"], 64, **request(epilogue, as_float))
        # As far as the model tells them apart.
        priced = epilogue != "alpha" and not (epilogue == "elements" and as_float)
        for what, count in found.items():
            if count > allowed[what]:
                over[epilogue, what] = (count, allowed[what])
            if priced and not modelled[what] / 1.3 <= count <= modelled[what] * 1.3:
                unlike_the_model[epilogue, what] = (count, modelled[what])
    return over, unlike_the_model


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("name", "as_float"), [*TILES, *(pytest.param(*tile, marks=pytest.mark.exhaustive) for tile in EXHAUSTIVE)]
)
def test_instructions_and_cycles_of_an_epilogue(name, as_float, gemm_instance, tmp_path):
    tile = number(name)
    over, unlike_the_model = faults(tile, as_float, gemm_instance(tile, as_float), tmp_path)
    assert not over
    assert not unlike_the_model

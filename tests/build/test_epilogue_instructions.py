"""What the epilogue of the Hopper GEMM executes for an element of C: a thread of a consumer is followed through the machine code of a few
instances, from the last product of its tile to the end, and the budgets hold for all that it does there. Needs nvcc, no GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ..cuobjdump import cuobjdump
from .listing import Instruction, branch_tables, parse
from .sass import Thread

_host = pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
THREAD = 128 + 5  # of the first consumer

# The tile and whether its output is fp32: two consumers, pingpong, rows instead of boxes.
TILES = [("128x256", False), ("128x128 pingpong", False), ("128x144", False)]
EXHAUSTIVE = [("192x128", False), ("128x128", False), ("64x128", False)]

# More of a sum where a tile's width does not divide into boxes, and the threads store its rounded rows themselves; and where a consumer
# has two slices of 64 rows, for each of which it loads the bias and adds up the columns.
ROWS, SLICES = 5, 1.5
IN_REGISTERS = ("plain", "alpha", "bias", "float_bias", "odd_rows")
ARITHMETIC = {"relu": 2, "gelu": 20.5, "gelu_tanh": 23, "silu": 22}  # with the product, backward


def budget(epilogue: str) -> tuple[float, float]:
    """Instructions at most: of a tile, to be told the next one included, and of each of its sums."""
    if epilogue in ("plain", "alpha"):
        return 110, 0.9 + (epilogue == "alpha")
    if epilogue in ("bias", "float_bias"):
        return 115, 4.1
    if epilogue == "odd_rows":  # by the threads, word by word
        return 120, 11
    if epilogue == "elements":
        return 125, 74
    tile, element = 165, 7.5
    if epilogue == "swiglu":  # two sums make an element
        return tile, (element + 24) / 2
    if epilogue == "dswiglu":  # two elements
        return tile, element + 30
    name = epilogue.removeprefix("bias_").removesuffix("_sums").removesuffix("_z").removeprefix("d")
    element += ARITHMETIC.get(name, 2)  # of the residual: widened, and added
    return tile + 30 * epilogue.endswith("_z"), element + 4.1 * epilogue.endswith("_z") + 4 * epilogue.endswith("_sums")


def number(tile: str) -> int:
    """Of the first with this name, which does without a cluster what the others do in one."""
    candidates = enumerate(_host.gemm_candidates()["sm90"])
    return next(i for i, t in candidates if f"{t['m']}x{t['n']}" + " pingpong" * t["pingpong"] == tile)


def rows_of_a_consumer(tile: dict) -> int:
    return tile["m"] // (1 if tile["pingpong"] else tile["consumers"])


def sums_of_a_thread(tile: dict) -> int:
    return rows_of_a_consumer(tile) * tile["n"] // 128


def request(epilogue: str, as_float: bool) -> dict:
    """What plan_gemm is told of an epilogue. Alpha alone is to it a bias, which costs more."""
    asked = {"out_bytes": 4 if as_float else 2, "plain": epilogue == "plain", "tma_output": epilogue != "odd_rows"}
    if epilogue == "elements":
        return asked | {"row_output": False}
    name = epilogue.removeprefix("bias_")
    if name == "residual":
        return asked | {"side_bytes": asked["out_bytes"]}
    backward = name.startswith("d")
    activation = name.removeprefix("d").removesuffix("_sums").removesuffix("_z")
    if activation not in (*ARITHMETIC, "swiglu"):
        return asked
    side = 2 if backward else asked["out_bytes"] * name.endswith("_z")
    return asked | {
        "activation": activation,
        "backward": backward,
        "side_bytes": side,
        "keeps_z": name.endswith("_z"),
        "column_sums": name.endswith("_sums"),
    }


def arguments(folder: Path, tile: int, as_float: bool) -> tuple[int, dict[str, bytes]]:
    """Where the consumer's desk is, and what the launcher passes, by epilogue."""
    program = folder / "arguments"
    emulator = sorted((ROOT / "csrc" / "emulator").glob("*.cpp"))
    defines = ["-DAK_EMULATE", f"-DTILE={tile}", f"-DFLOAT={str(as_float).lower()}"]
    command = ["c++", "-std=c++20", "-O0", "-w", *defines, "-I", ROOT / "csrc", HERE / "epilogue_arguments.cpp"]
    subprocess.run([*command, *emulator, "-o", program, "-pthread"], check=True, timeout=600)
    desk, *lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return int(desk), {name: bytes.fromhex(data) for name, data in (line.split() for line in lines)}


def constants(data: bytes) -> bytes:
    """The first constant bank: blocks and threads of the launch, then, behind five tensor maps, the arguments."""
    bank = bytearray(0x500)
    bank[0x0:0x4] = (384).to_bytes(4, "little")
    bank[0xC:0x10] = (2).to_bytes(4, "little")
    return bytes(bank) + data


def at_the_desk(offset: int) -> dict[int, list[int]]:
    """The words that the assistant writes for the consumer: the first tile, of one step, and then that there is none."""
    first = 0x400 + offset + 64  # where dynamic shared memory begins, a multiple of 1,024
    tile = {"m": 0, "n": 0, "batch": 0, "steps": 1, "split": 0, "number": 0, "place in the ring": 0, "other": 0}
    return {first + 4 * i: [word, 0] for i, word in enumerate(tile.values())}


def after_the_products(path: list[Instruction]) -> list[Instruction]:
    last = max(i for i, x in enumerate(path) if x.name == "HGMMA")
    return path[last + 1 :]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH: there is no machine code to follow")
@pytest.mark.parametrize(
    ("name", "as_float"), [*TILES, *(pytest.param(*tile, marks=pytest.mark.exhaustive) for tile in EXHAUSTIVE)]
)
def test_instructions_per_element(name, as_float, gemm_instance, tmp_path):
    tile = number(name)
    shape = _host.gemm_candidates()["sm90"][tile]
    m, n = shape["m"], shape["n"]
    sums = sums_of_a_thread(shape)
    cubin = gemm_instance(tile, as_float)
    ((kernel, code),) = parse(cuobjdump("-sass", cubin)).items()
    table = branch_tables(cuobjdump("-elf", cubin)).get(kernel, [])
    over, unlike_the_model = {}, {}
    desk, of_epilogues = arguments(tmp_path, tile, as_float)
    for epilogue, data in of_epilogues.items():
        path = after_the_products(Thread(code, table, constants(data), THREAD, at_the_desk(desk)).run())
        assert not [x for x in path if x.name in ("STL", "LDL")], f"{epilogue}: registers are spilled"
        if n % 64 and epilogue not in IN_REGISTERS:
            continue  # element by element
        of_tile, of_sum = budget(epilogue)
        of_sum += (
            ROWS if n % 64 else SLICES if rows_of_a_consumer(shape) == 128 and epilogue not in ("plain", "alpha") else 0
        )
        allowed = of_tile + of_sum * sums
        if len(path) > allowed:
            over[epilogue] = (len(path), allowed)
        modelled = _host.gemm_epilogue_instructions(shape, m, n, 64, **request(epilogue, as_float))
        if not modelled / 1.3 <= len(path) <= modelled * 1.3 and epilogue != "alpha":
            unlike_the_model[epilogue] = (len(path), modelled)
    assert not over
    assert not unlike_the_model

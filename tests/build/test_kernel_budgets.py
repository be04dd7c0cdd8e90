"""Registers, spills, shared memory and wide loads of every CUDA kernel, read from the machine code the build made.

Needs nvcc, no GPU. The library that was built is read if it has the architectures that this run needs; otherwise the kernels are
compiled here.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.ptx.cuobjdump import cuobjdump
from tools.sass import listing
from tools.sass.bytes_in_flight import halves, rounds

from ..draw import drawn
from ..helpers.patience import PATIENCE
from .kernel_budgets import BUDGETS, FLOOR, Budget, table

pytestmark = pytest.mark.nvcc
ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "amp_kernels" / "libamp_kernels_cuda.so"
THREADS = {"sm_75": 1024, "sm_80": 2048, "sm_90a": 2048, "sm_100": 2048, "sm_120": 1536}  # that a multiprocessor holds
# Bytes a thread that any kernel may spill: sm_100's code takes a few more registers in six kernels whose launch bounds suit sm_90a.
SPILLED_ON = {"sm_100": 16}
RESERVED_SHARED = 1024  # by the system, sm_90 and later; older chips report what the kernel asked for
WIDE_KERNELS = [name for name, budget in BUDGETS.items() if budget.wide_loads]
WIDE_LOAD = re.compile(r"LDG\.[\w.]*128")
SAMPLED_ARCHS = ("9.0a", "8.0")  # every run needs these and lists the code of one; --exhaustive needs and lists all
SASS_KERNELS = [name for name, b in BUDGETS.items() if b.wide_loads or b.in_flight or b.opcodes or b.whole_sectors]


@dataclass(frozen=True)
class Function:
    kernel: str | None  # key of BUDGETS
    symbol: str
    arch: str  # such as sm_90a
    registers: int
    stack: int
    shared: int


def numbers(archs: list[str]) -> list[str]:
    """8.0+PTX is 80."""
    return [arch.removesuffix("+PTX").replace(".", "") for arch in archs]


@pytest.fixture(scope="module")
def archs(request) -> list[str]:
    """Numbers of the architectures that this run needs."""
    default = re.search(r'AMP_KERNELS_CUDA_ARCHS "(.+?)"', (ROOT / "CMakeLists.txt").read_text())[1].split(";")
    return numbers(default if request.config.getoption("--exhaustive") else SAMPLED_ARCHS)


@pytest.fixture(scope="module")
def binaries(archs, tmp_path_factory) -> list[Path]:
    """Files with the code of all kernels for these architectures, and for others that were built."""
    info = ROOT / "amp_kernels" / "_build_info.json"
    if LIBRARY.exists() and set(archs) <= set(numbers(json.loads(info.read_text())["cuda_archs"])):
        return [LIBRARY]
    folder = tmp_path_factory.mktemp("kernels")
    objects = []
    for source in sorted((ROOT / "csrc").rglob("*.cu")):
        only = re.match(r"sm(\d+)$", source.parent.name)
        compiled = archs
        if only and only[1] == "80":  # and everything newer with mma.sync alone
            compiled = [number for number in archs if int(number.removesuffix("a")) >= 80 and number != "100"]
        elif only:
            compiled = [only[1] + "a"]
        codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in compiled]
        objects.append(folder / f"{len(objects)}.o")
        command = ["nvcc", "-std=c++20", "--fmad=false", "--expt-relaxed-constexpr", *codes, "-I", ROOT / "csrc"]
        subprocess.run([*command, "-c", source, "-o", objects[-1]], check=True, timeout=PATIENCE)
    return objects


def kernel_of(symbol: str) -> str | None:
    """The kernel's key in BUDGETS, by the names in its mangled one, where the length stands in front of each."""
    mangled = {"false": "Lb0E", "true": "Lb1E"}
    names = [
        key
        for key in BUDGETS
        if all(mangled.get(name, f"{len(name)}{name}") in symbol for name in re.findall(r"\w+", key))
    ]
    return names[0] if names else None


@pytest.fixture(scope="module")
def functions(binaries) -> list[Function]:
    found, arch, symbol = [], "", ""
    for line in "\n".join(cuobjdump("-res-usage", str(path)) for path in binaries).splitlines():
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.search(r"Function (\S+):", line):
            symbol = match[1]
        elif "REG:" in line:
            usage = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
            shared = usage["SHARED"]
            if int(re.search(r"\d+", arch)[0]) >= 90:
                shared = max(0, shared - RESERVED_SHARED)
            found.append(
                Function(kernel_of(symbol), symbol, arch, usage["REG"], usage["STACK"] + usage["LOCAL"], shared)
            )
    assert found, "cuobjdump listed no function"
    return found


def disassembled(binaries: list[Path], functions: list[Function]) -> Iterator[tuple[str, str, list[re.Match]]]:
    """(symbol, architecture, instructions) of these functions. The cubins that hold one are listed whole: for a list of functions
    cuobjdump begins anew with each."""
    symbols = {f.symbol for f in functions}
    archs = {f.arch.rstrip("a"): f.arch for f in functions}  # by what a cubin is named after
    for binary in binaries:
        with tempfile.TemporaryDirectory() as folder:
            cuobjdump("-xelf", "all", binary.resolve(), cwd=folder)
            for cubin in sorted(Path(folder).iterdir()):
                content = cubin.read_bytes()
                arch = archs.get(re.search(r"sm_\d+", cubin.name)[0])
                if arch is None or not any(symbol.encode() in content for symbol in symbols):
                    continue
                for symbol, _, code in listing.listed(cuobjdump("-sass", cubin)):
                    if symbol in symbols:
                        yield symbol, arch, code


@dataclass(frozen=True)
class Code:
    kernel: str
    arch: str
    instructions: list[re.Match]

    @property
    def opcodes(self) -> list[str]:
        return [x["opcode"] for x in self.instructions]


@pytest.fixture(scope="module")
def sass(archs, binaries, functions, request) -> list[Code]:
    """The code of the kernels with rules about it."""
    read = archs if request.config.getoption("--exhaustive") else drawn(archs, 1)
    wanted = [f for f in functions if f.kernel in SASS_KERNELS and f.arch.removeprefix("sm_") in read]
    return [Code(kernel_of(symbol), arch, code) for symbol, arch, code in disassembled(binaries, wanted)]


def held(threads: int, registers: int, arch: str = "sm_90a") -> int:
    """Blocks for which a multiprocessor has registers and threads; it hands out registers by eight a thread."""
    return min(65_536 // (-(-registers // 8) * 8 * threads), THREADS[arch] // threads)


def crowded(budget: Budget, registers: int, arch: str = "sm_90a") -> bool:
    """True if the blocks that should share a multiprocessor need more registers than it has."""
    return held(budget.threads, registers, arch) < min(budget.blocks, THREADS[arch] // budget.threads)


def too_little_in_flight(budget: Budget, code: list[re.Match]) -> str:
    found = sorted(rounds(map(listing.instruction, code)), reverse=True)[: budget.ways]
    enough = len(found) == budget.ways and found[-1] >= budget.in_flight
    return "" if enough else f"{found} bytes in flight, {budget.in_flight} are needed {budget.ways} times"


def test_every_kernel_has_a_budget(functions):
    assert not [f.symbol for f in functions if f.kernel is None], "add a row to kernel_budgets.py"
    assert {f.kernel for f in functions} == set(BUDGETS), "a row of kernel_budgets.py has no kernel"


def test_every_architecture_was_compiled(archs, functions):
    assert {f"sm_{arch}" for arch in archs} <= {f.arch for f in functions if f.kernel == "check_and_norm_kernel"}


def test_no_register_is_spilled(functions):
    """But for the few bytes that a row allows."""

    def allowed(f):
        part, most = BUDGETS[f.kernel].spilled.get(f.arch, (None, 0))
        return most if part and part in f.symbol else SPILLED_ON.get(f.arch, 0)

    assert not [f"{f.symbol} on {f.arch}: {f.stack} bytes" for f in functions if f.stack > allowed(f)]


def test_registers_and_shared_memory(functions):
    over = [
        f"{f.symbol} on {f.arch}: {f.registers} registers, {f.shared} bytes; allowed: {BUDGETS[f.kernel]}"
        for f in functions
        if f.kernel and (f.registers > BUDGETS[f.kernel].registers or f.shared > BUDGETS[f.kernel].shared)
    ]
    assert not over


def test_the_blocks_of_a_multiprocessor_find_room(functions):
    assert not [
        f"{f.symbol} on {f.arch}: {f.registers}" for f in functions if crowded(BUDGETS[f.kernel], f.registers, f.arch)
    ]


@pytest.mark.parametrize("kernel", WIDE_KERNELS)
def test_global_memory_is_read_16_bytes_at_a_time(sass, kernel):
    budget = BUDGETS[kernel]
    codes = [code for code in sass if code.kernel == kernel]
    assert {code.arch for code in codes} == {code.arch for code in sass if code.kernel == "check_and_norm_kernel"}
    wide = Counter(code.arch for code in codes for opcode in code.opcodes if WIDE_LOAD.match(opcode))
    assert min(wide.values()) >= budget.wide_loads, wide


@pytest.mark.parametrize("kernel", [name for name, budget in BUDGETS.items() if budget.in_flight])
def test_bytes_in_flight(sass, kernel):
    """Instances with wide loads count, where there are any: the others serve what is not aligned."""
    codes = [code for code in sass if code.kernel == kernel]
    wide = [code for code in codes if any(map(WIDE_LOAD.match, code.opcodes))]
    for code in wide or codes:
        assert not too_little_in_flight(BUDGETS[kernel], code.instructions), code.arch


def test_bandwidth_has_bytes_in_flight(functions):
    """On an SM of an H200."""
    assert not [name for name, b in BUDGETS.items() if bool(b.in_flight) + b.ring + bool(b.bound) != 1]
    too_few = {}
    for f in functions:
        budget = BUDGETS[f.kernel]
        on_its_way = budget.in_flight * budget.threads * held(budget.threads, f.registers)
        if f.arch == "sm_90a" and budget.in_flight and on_its_way < FLOOR:
            too_few[f.symbol] = on_its_way
    assert not too_few


@pytest.mark.parametrize("kernel", [name for name, budget in BUDGETS.items() if budget.whole_sectors])
def test_stores_fill_sectors(sass, kernel):
    codes = [code for code in sass if code.kernel == kernel]
    stored = Counter(code.arch for code in codes for opcode in code.opcodes if re.match(r"STG\.[\w.]*128", opcode))
    assert stored.keys() == {code.arch for code in codes}
    for code in codes:
        assert not halves(map(listing.instruction, code.instructions)), code.arch


@pytest.mark.parametrize("kernel", [name for name, budget in BUDGETS.items() if budget.opcodes])
def test_instructions(sass, kernel):
    archs = {code.arch for code in sass if code.kernel == kernel} - {"sm_75"}  # where increments are additions
    assert archs
    for arch in archs:
        opcodes = [opcode for code in sass if (code.kernel, code.arch) == (kernel, arch) for opcode in code.opcodes]
        for prefix, least in BUDGETS[kernel].opcodes.items():
            found = sum(opcode.startswith(prefix) for opcode in opcodes)
            assert found >= least, f"{found} times {prefix} on {arch}"


def test_the_table_in_the_docs():
    assert table() in (ROOT / "docs" / "ptx.md").read_text(), "docs/ptx.md has other budgets"


@pytest.mark.exhaustive
def test_wgmma_is_never_serialised(binaries, functions):
    """In every instance of the Hopper GEMM: the products of a k step start together. If ptxas sees a hazard it starts and
    awaits each by itself. And no memory barrier stands among them."""
    instances = [f for f in functions if f.kernel == "gemm_sm90_kernel"]
    seen = 0
    for symbol, _, code in disassembled(binaries, instances):
        seen += 1
        opcodes = [x["opcode"] for x in code]
        products = [i for i, opcode in enumerate(opcodes) if opcode.startswith("HGMMA.")]
        starts = sum(opcode.startswith("WARPGROUP.ARRIVE") for opcode in opcodes)
        assert len(products) >= 8, symbol
        assert 4 * starts <= len(products), symbol
        assert not [opcode for opcode in opcodes[products[0] : products[-1]] if opcode.startswith("MEMBAR")], symbol
    assert seen == len(instances) > 0

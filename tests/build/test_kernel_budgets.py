"""Registers, spills, shared memory and wide loads of every CUDA kernel, read from the machine code the build made.

Needs nvcc, no GPU. The library that was built is read if it has the default architectures; otherwise the kernels are
compiled here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..cuobjdump import cuobjdump
from .kernel_budgets import BUDGETS

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "amp_kernels" / "libamp_kernels_cuda.so"
RESERVED_SHARED = 1024  # by the system, sm_90 and later; older chips report what the kernel asked for
WIDE_KERNELS = [name for name, budget in BUDGETS.items() if budget.wide_loads]
SASS_KERNELS = [name for name, budget in BUDGETS.items() if budget.wide_loads or budget.opcodes]


@dataclass(frozen=True)
class Function:
    kernel: str | None  # key of BUDGETS
    symbol: str
    arch: str  # such as sm_90a
    registers: int
    stack: int
    shared: int


def default_archs() -> list[str]:
    return re.search(r'AMP_KERNELS_CUDA_ARCHS "(.+?)"', (ROOT / "CMakeLists.txt").read_text())[1].split(";")


@pytest.fixture(scope="module")
def binaries(tmp_path_factory) -> list[Path]:
    """Files with the code of all kernels for the default architectures."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH: there are no CUDA kernels to check")
    info = ROOT / "amp_kernels" / "_build_info.json"
    if LIBRARY.exists() and set(default_archs()) <= set(json.loads(info.read_text())["cuda_archs"]):
        return [LIBRARY]
    folder = tmp_path_factory.mktemp("kernels")
    objects = []
    for source in sorted((ROOT / "csrc" / "kernels").glob("*.cu")):
        only = re.search(r"_sm(\d+)\.cu$", source.name)
        numbers = [arch.removesuffix("+PTX").replace(".", "") for arch in default_archs()]
        if only and only[1] == "80":  # and everything newer
            numbers = [number for number in numbers if int(number.removesuffix("a")) >= 80]
        elif only:
            numbers = [only[1] + "a"]
        codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
        objects.append(folder / f"{source.stem}.o")
        command = ["nvcc", "-std=c++20", "--fmad=false", "--expt-relaxed-constexpr", *codes, "-I", ROOT / "csrc"]
        subprocess.run([*command, "-c", source, "-o", objects[-1]], check=True, timeout=1200)
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


def disassembled(binaries: list[Path], symbols: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """(symbol, arch, opcodes) of the functions of these names."""
    function: tuple[str, str, list[str]] | None = None
    arch = ""
    for line in "\n".join(cuobjdump("-sass", "-fun", ",".join(symbols), str(path)) for path in binaries).splitlines():
        if match := re.match(r"\s*arch = (\w+)", line):
            arch = match[1]
        elif match := re.search(r"Function : (\S+)", line):
            if function:
                yield function
            function = match[1], arch, []
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", line):
            function[2].append(match[1])
    if function:
        yield function


@pytest.fixture(scope="module")
def sass(binaries, functions) -> dict[tuple[str, str], list[str]]:
    """(kernel, arch) -> opcodes, of the kernels with rules about them."""
    code: dict[tuple[str, str], list[str]] = {}
    symbols = sorted({f.symbol for f in functions if f.kernel in SASS_KERNELS})
    for symbol, arch, opcodes in disassembled(binaries, symbols):
        code.setdefault((kernel_of(symbol), arch), []).extend(opcodes)
    return code


def test_every_kernel_has_a_budget(functions):
    assert not [f.symbol for f in functions if f.kernel is None], "add a row to kernel_budgets.py"
    assert {f.kernel for f in functions} == set(BUDGETS), "a row of kernel_budgets.py has no kernel"


def test_every_architecture_was_compiled(functions):
    expected = {"sm_" + arch.removesuffix("+PTX").replace(".", "") for arch in default_archs()}
    assert expected <= {f.arch for f in functions if f.kernel == "check_and_norm_kernel"}


def test_no_register_is_spilled(functions):
    assert not [f"{f.symbol} on {f.arch}: {f.stack} bytes" for f in functions if f.stack]


def test_registers_and_shared_memory(functions):
    over = [
        f"{f.symbol} on {f.arch}: {f.registers} registers, {f.shared} bytes; allowed: {BUDGETS[f.kernel]}"
        for f in functions
        if f.kernel and (f.registers > BUDGETS[f.kernel].registers or f.shared > BUDGETS[f.kernel].shared)
    ]
    assert not over


@pytest.mark.parametrize("kernel", WIDE_KERNELS)
def test_global_memory_is_read_16_bytes_at_a_time(sass, kernel):
    budget = BUDGETS[kernel]
    archs = [arch for name, arch in sass if name == kernel]
    assert len(archs) == len(default_archs())
    for arch in archs:
        wide = [bool(re.match(r"LDG\.[\w.]*128", opcode)) for opcode in sass[kernel, arch]]
        assert sum(wide) >= budget.wide_loads, arch
        runs = "".join("L" if load else " " for load in wide).split()
        assert max(map(len, runs), default=0) >= budget.in_flight, arch


@pytest.mark.parametrize("kernel", [name for name, budget in BUDGETS.items() if budget.opcodes])
def test_instructions(sass, kernel):
    archs = [arch for name, arch in sass if name == kernel]
    assert archs
    for arch in archs:
        for prefix, least in BUDGETS[kernel].opcodes.items():
            found = sum(opcode.startswith(prefix) for opcode in sass[kernel, arch])
            assert found >= least, f"{found} times {prefix} on {arch}"


@pytest.mark.slow
def test_wgmma_is_never_serialised(binaries, functions):
    """In every instance of the Hopper GEMM: the products of a k step start together. Where ptxas sees a hazard it starts and
    awaits each by itself. And no memory barrier stands among them."""
    symbols = sorted({f.symbol for f in functions if f.kernel == "gemm_sm90_kernel"})
    seen = 0
    for symbol, _, opcodes in disassembled(binaries, symbols):
        seen += 1
        products = [i for i, opcode in enumerate(opcodes) if opcode.startswith("HGMMA.")]
        starts = sum(opcode.startswith("WARPGROUP.ARRIVE") for opcode in opcodes)
        assert len(products) >= 8, symbol
        assert 4 * starts <= len(products), symbol
        assert not [opcode for opcode in opcodes[products[0] : products[-1]] if opcode.startswith("MEMBAR")], symbol
    assert seen == len(symbols) > 0


def test_the_number_of_gemm_instances(functions):
    """What nvcc compiles, in minutes: epilogue and activation are run-time switches."""
    assert len({f.symbol for f in functions if f.kernel in ("gemm_sm90_kernel", "gemm_sm80_kernel")}) <= 300

"""The PTX side of csrc/device: ptxas accepts every entry, and the GEMM's machine code is what its main loop needs. Needs nvcc, no GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from amp_kernels.testing.patience import PATIENCE

from ..cuobjdump import cuobjdump

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH: there is no PTX to check"),
    pytest.mark.slow,
]


def nvcc(source: Path, arch: str, output: Path) -> str:
    """The compiler's output."""
    gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [
        "nvcc",
        "-std=c++20",
        "--fmad=false",
        "--expt-relaxed-constexpr",
        gencode,
        "-I",
        ROOT / "csrc",
        "-cubin",
        "--resource-usage",
        source,
        "-o",
        output,
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stderr + run.stdout


def sass(cubin: Path) -> list[str]:
    """The opcodes of a cubin, in order."""
    return re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", cuobjdump("-sass", cubin), flags=re.MULTILINE
    )


@pytest.mark.parametrize("arch", ["75", "80", "90a", "120"])
def test_ptxas_accepts_every_entry(arch, tmp_path):
    nvcc(Path(__file__).parent / "vocabulary.cu", arch, tmp_path / "vocabulary.cubin")


@pytest.mark.parametrize(
    ("major_a", "major_b", "as_float", "tile"),
    [
        ("kK", "kK", "false", "128, 256, 4, 2, 2"),
        ("kMN", "kMN", "true", "256, 128, 3, 2, 2, false, true"),
        ("kMN", "kK", "false", "128, 144, 5, 1, 2"),
        ("kK", "kMN", "false", "192, 192, 3, 1, 3"),
        ("kMN", "kMN", "true", "128, 192, 4, 1, 2, true"),
        ("kK", "kK", "false", "64, 16, 16, 1, 1"),
    ],
)
def test_gemm_main_loop(major_a, major_b, as_float, tile, tmp_path):
    """wgmma is there, and nothing stands between two of them that would drain the tensor cores: no memory barrier (what
    mbarrier.arrive.release.cluster compiles to), no spill, and no wait after each instruction (ptxas serialising them,
    of which it tells)."""
    source = tmp_path / "gemm.cu"
    source.write_text(
        '#include "gemm/sm90/gemm.cuh"\n'
        f"template ak::Status ak::gemm::launch_gemm<ak::bf16, ak::Major::{major_a}, ak::Major::{major_b}, {as_float}, "
        f"ak::gemm::Tile<{tile}>>(const ak::GemmProblem&, int, const ak::GemmScratch&, ak::Stream);\n"
    )
    remarks = nvcc(source, "90a", tmp_path / "gemm.cubin")
    assert "Potential Performance Loss" not in remarks
    opcodes = sass(tmp_path / "gemm.cubin")
    multiplications = [i for i, opcode in enumerate(opcodes) if opcode.startswith("HGMMA")]
    assert len(multiplications) >= 4
    main_loop = opcodes[multiplications[0] : multiplications[-1] + 1]
    assert not [opcode for opcode in main_loop if opcode.startswith(("MEMBAR", "ERRBAR", "STL", "LDL"))]
    waits = sum(opcode.startswith("WARPGROUP.DEPBAR") for opcode in main_loop)
    assert waits <= len(multiplications) / 4, "a wait per k step, not per wgmma"
    consumers = int(tile.split(", ")[4])
    assert any(opcode.startswith("USETMAXREG") for opcode in opcodes) == (consumers > 1)

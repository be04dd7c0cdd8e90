"""The machine code of a CUDA source for sm_90a."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from tools.ptx.cuobjdump import cuobjdump

from ..helpers.patience import PATIENCE
from ..ptx.build import package_objects

CSRC = Path(__file__).parents[2] / "csrc"
FLAGS = ["-std=c++20", "--fmad=false", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]
package_objects = functools.cache(package_objects)


def compile_cubin(source: Path, cubin: Path, *options: str, csrc: Path = CSRC) -> str:
    """Compile, and return the compiler's messages."""
    command = ["nvcc", *FLAGS, *options, "-I", csrc, "-cubin", "-o", cubin, source]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    return run.stdout + run.stderr


def cubin_of(source: str, folder: Path) -> Path:
    """The machine code of a file under csrc: from the object of the package's own build, if that is up to date."""
    built = package_objects().get(CSRC / source)
    if built is None:
        compile_cubin(CSRC / source, folder / "sm_90.cubin")
    else:
        cuobjdump("-xelf", "sm_90.", built, cwd=folder)
    (cubin,) = folder.glob("*sm_90.cubin")
    return cubin

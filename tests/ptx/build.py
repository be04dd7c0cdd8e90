"""Builds what the tests run: the fake CUDA runtime, and libamp_kernels_cuda on it, whose PTX the interpreter executes.

The library is linked from the objects of the package's own build, as far as they are up to date. Sources that have changed since, or
whose includes have, are compiled to PTX alone, a few times faster. Results lie in build/ptx under a name that says what it was made
of, so that only what changed is made again. By hand:
    python -m tests.ptx.build
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "ptx"
CSRC, TOOLS = ROOT / "csrc", ROOT / "tools" / "ptx"
FAKE, STATIC = TOOLS / "fake_cuda", TOOLS / "static_cudart.cpp"
CXX = os.environ.get("CXX", "c++")
COMMON = ["-std=c++20", f"-I{CSRC}"]
# --fmad=false and contraction off as in CMakeLists.txt
NVCC = ["-O3", "--fmad=false", "--expt-relaxed-constexpr", "-DNDEBUG", "-cudart=none", "-no-compress"]
NVCC += ["-Xcompiler=-fPIC,-ffp-contract=off,-fvisibility=hidden"]
ARCHS = {"sm80": ["80", "120"], "sm90": ["90a"]}  # by the file's folder
EVERY_ARCH = ["80", "90a", "120"]


def cuda_include() -> str:
    """The headers of the toolkit that nvcc belongs to."""
    run = subprocess.run(["nvcc", "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
    return re.search(r"TOP=(.*)\n", run.stderr)[1] + "/include"


def depends(source: Path, seen: dict[Path, bytes] | None = None) -> dict[Path, bytes]:
    """The file and what it includes from this repository, with contents."""
    seen = {} if seen is None else seen
    if source in seen:
        return seen
    seen[source] = source.read_bytes()
    for name in re.findall(rb'^\s*#include "([^"]+)"', seen[source], re.MULTILINE):
        for folder in (CSRC, source.parent):
            path = (folder / name.decode()).resolve()
            if path.exists():
                depends(path, seen)
                break
    return seen


def made_of(source: Path, command: list[str]) -> str:
    """A name for what the command makes of the source."""
    digest = hashlib.sha256(" ".join(map(str, command)).replace(str(ROOT), "").encode())
    for path, content in sorted(depends(source).items()):
        code = re.sub(rb"(?m)^\s*//.*\n", b"", content)  # a comment changes nothing
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + code)
    return f"{source.stem}-{digest.hexdigest()[:16]}.o"


def run(command: list) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[-4000:]}")


def compile_one(source: Path, flags: list[str], compiler: list[str]) -> Path:
    command = [*compiler, *COMMON, *flags, "-c", source]
    output = BUILD / made_of(source, command)
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        part = output.with_suffix(f".{os.getpid()}.part.o")
        run([*command, "-o", part])
        part.rename(output)
    return output


def kernel_flags(source: Path, archs: list[str] | None = None) -> list[str]:
    return [
        *NVCC,
        *(f"-gencode=arch=compute_{a},code=compute_{a}" for a in archs or ARCHS.get(source.parent.name, EVERY_ARCH)),
    ]


def compile_kernel(source: Path, archs: list[str] | None = None) -> Path:
    return compile_one(source, kernel_flags(source, archs), ["nvcc"])


def glue_flags(cuda: str) -> list[str]:
    import torch

    flags = [
        "-O1",
        "-fPIC",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        f"-isystem{Path(torch.__file__).parent}/include",
    ]
    flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY", "-DUSE_CUDA", "-DAK_HAS_SM90a"]
    return [*flags, "-DAK_HAS_GEMM_SM80", f"-isystem{cuda}"]


def package_objects() -> dict[Path, Path]:
    """The objects of the package's CUDA library, by source, if it has PTX for sm_80 and sm_90a: the objects that are newer
    than their source and all that it includes."""
    libraries = ROOT.glob("build/cmake-*/libamp_kernels_cuda.so")
    library = max(libraries, key=lambda path: path.stat().st_mtime, default=None)
    if library is None:
        return {}
    commands = ROOT / "CMakeLists.txt"
    cache = (library.parent / "CMakeCache.txt").read_text()
    built = re.search(r"^AMP_KERNELS_CUDA_ARCHS:.*?=(.*)$", cache, re.MULTILINE)[1].split(";")
    if not {"8.0+PTX", "9.0a"} <= set(built):
        return {}
    folder = library.parent / "CMakeFiles/amp_kernels_cuda.dir"
    objects = {ROOT / path.relative_to(folder).with_suffix(""): path for path in folder.rglob("*.o")}
    return {
        source: path
        for source, path in objects.items()
        if source.exists() and is_newer(path, [commands, *depends(source)]) and is_newer(library, [path])
    }


def is_newer(made: Path, sources: Iterable[Path]) -> bool:
    return made.stat().st_mtime > max(path.stat().st_mtime for path in sources)


def library_objects(cuda: str, pool: Executor) -> list[Path]:
    """The package's, and of sources that have changed since, objects compiled here."""
    jobs = [(source, kernel_flags(source), ["nvcc"]) for source in CSRC.rglob("*.cu")]
    jobs.sort(key=lambda job: job[0].parent.name != "sm90")  # the longest first
    jobs += [(source, glue_flags(cuda), [CXX]) for source in CSRC.rglob("glue*.cpp")]
    there = package_objects()
    return list(pool.map(lambda job: there.get(job[0]) or compile_one(*job), jobs))


def link(output: str, objects: list[Path], flags: list[str]) -> Path:
    content = [hashlib.sha256(o.read_bytes()).hexdigest() for o in sorted(objects)]
    name = hashlib.sha256("".join([*content, *flags]).encode()).hexdigest()[:16]
    path = BUILD / name / output
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        run([CXX, "-shared", *objects, *flags, "-o", part])
        part.rename(path)
    return path


def build() -> tuple[Path, Path]:
    """Paths of the runtime, to be preloaded, and of the library of ops. The runtime's folder also holds it as libcuda.so.1."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process finds what the first has made
        return _build()


def _build() -> tuple[Path, Path]:
    import torch

    cuda = cuda_include()
    flags = ["-O1", "-fPIC", "-fvisibility=hidden", f"-isystem{cuda}"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        fake = list(pool.map(lambda source: compile_one(source, flags, [CXX]), FAKE.glob("*.cpp")))
        objects = [*library_objects(cuda, pool), compile_one(STATIC, flags, [CXX])]
    runtime = link("libcudart.so", fake, [])
    driver = runtime.with_name("libcuda.so.1")
    if not driver.exists():
        shutil.copy(runtime, driver)
    lib = Path(torch.__file__).parent / "lib"
    return runtime, link("libamp_kernels_cuda.so", objects, [f"-L{lib}", "-ltorch_cpu", "-ltorch_cuda"])


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in build())

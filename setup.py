"""Build entry: CMake + Ninja build the compiled parts, each of which may be missing with a recorded reason.

The op libraries use the LibTorch stable ABI and need only torch's headers and libraries, so the build asks the environment's own
torch where they are, in a subprocess: an isolated build has no torch of its own and needs none.

Environment variables, meaning what they mean elsewhere: ``TORCH_CUDA_ARCH_LIST``, ``MAX_JOBS``, ``NVCC_THREADS``, ``CUDA_HOME``,
``DEBUG``. ``AMP_KERNELS_FORCE_CUDA=1`` turns an absent CUDA library into a build failure, as an absent CPU library is
unless ``AMP_KERNELS_SKIP_KERNELS=1``. ``AMP_KERNELS_PARTS`` names the parts
to build, such as ``cpu,host,nodes``; by default every part but the emulator, which working copies build too. In a working copy the
other parts stay as they are, and those older than their sources are deleted.
``AMP_KERNELS_REPOSITORY`` is the address of the repository, for the links of the package's page on an index; the site reads it, too.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

if int(setuptools.__version__.split(".")[0]) < 77:  # it would print pages about the licence field of pyproject.toml
    sys.exit(
        f"amp_kernels: setuptools {setuptools.__version__} is too old for --no-build-isolation; "
        'needed: setuptools >= 77 (pip install -U "setuptools>=77"), or leave the option out'
    )

ROOT = Path(__file__).parent.resolve()
DEFAULT_ARCHS = re.search(r'AMP_KERNELS_CUDA_ARCHS "(.+?)"', (ROOT / "CMakeLists.txt").read_text())[1]
# part -> its CMake target, the file that the target makes
TARGETS = {
    "cpu": ("amp_kernels_cpu", "libamp_kernels_cpu.so"),
    "cuda": ("amp_kernels_cuda", "libamp_kernels_cuda.so"),
    "host": ("_host", "_host.*.so"),
    "nodes": ("_nodes", "_nodes.*.so"),
    "emulated": ("amp_kernels_emulated", "libamp_kernels_emulated.so"),
}
# Sources that some parts alone read, by a pattern of their path; all parts read the others.
READERS = {
    r"/autograd/": ("nodes",),
    r"/host/": ("host",),
    r"/cpu.*\.cpp$": ("cpu",),
    r"/emulator/": ("emulated",),
    r"\.cu$": ("cuda", "emulated"),
    r"\.cuh$": ("cuda", "emulated", "host"),
}
CORE_SECONDS = {"cpu": 50, "cuda": 850, "host": 10, "nodes": 15, "emulated": 125}  # measured on an AMD EPYC
REPORT_EVERY = 10  # seconds between two lines of progress
# torch's names of architectures; those of two words come first
NAMED_ARCHS = {
    "Ampere+Tegra": "8.7",
    "Blackwell+Tegra": "11.0",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
PROBE = (
    "import json, os, torch; print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda, "
    "'root': os.path.dirname(torch.__file__)}))"
)


class Missing(Exception):
    """A part cannot be built here; the message is the reason that users get to read."""


def find_torch() -> dict:
    """Version, CUDA version and folder of the torch that will run the package."""
    error = ""
    for command, variables in interpreters():
        probe = subprocess.run([*command, "-c", PROBE], capture_output=True, text=True, env=variables)
        if probe.returncode == 0:
            return json.loads(probe.stdout.splitlines()[-1])
        error = (probe.stderr.strip().splitlines() or [error])[-1]
    raise Missing(
        f"torch cannot be imported in this environment ({error}); install torch first, then amp_kernels. "
        "If torch is there, the isolated build does not see it: add --no-build-isolation (docs/install.md)"
    )


def interpreters() -> list[tuple[list[str], dict[str, str]]]:
    """Commands of the interpreters that may see the torch of the environment that is installed into, and their variables.

    An isolated build hides that environment: pip by variables, ``build`` and uv by a virtual environment of the build. The process that
    started the build has the user's own variables. It is the interpreter itself, or uv, which chooses one as below.
    """
    found = [([sys.executable], {**os.environ}), ([sys.executable, "-I"], {**os.environ})]
    starter = Path("/proc", str(os.getppid()))
    try:
        pairs = (starter / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
        program = (starter / "cmdline").read_text().partition("\0")[0]
        folder = (starter / "cwd").resolve(strict=True)
    except OSError:  # no /proc, or another user's process
        return found
    variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if "python" in Path(program).name:
        python = shutil.which(folder / program if "/" in program else program, path=variables.get("PATH"))
    elif Path(program).name == "uv":
        named = variables.get("VIRTUAL_ENV") or variables.get("CONDA_PREFIX")
        environments = [Path(named)] if named else [at / ".venv" for at in (folder, *folder.parents)]
        pythons = [environment / "bin" / "python" for environment in environments]
        python = next((python for python in pythons if python.exists()), sys._base_executable)
    else:
        return found
    return [*found, *([([str(python)], variables)] if python else [])]


def find_nvcc() -> str:
    """The real nvcc: the one on PATH may be a wrapper script, and CMake needs the toolkit around the compiler."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc")
    if nvcc is None or not Path(nvcc).exists():
        raise Missing(f"nvcc was not found ({'CUDA_HOME=' + home if home else 'not on PATH and CUDA_HOME is not set'})")
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True)
    here = re.search(r"_HERE_=(.+)", dry.stderr)
    return str(Path(here.group(1).strip()) / "nvcc") if here else nvcc


def nvcc_version(nvcc: str) -> str:
    out = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    return re.search(r"release ([0-9.]+)", out).group(1)


def default_archs(nvcc: str) -> list[str]:
    """The default list without what this nvcc does not know: 12.0 came with CUDA 12.8."""
    archs = DEFAULT_ARCHS.split(";")
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
    return [arch for arch in archs if f"compute_{re.sub('[^0-9]', '', arch)}" in known] or archs


def asked_archs(nvcc: str) -> list[str]:
    """The entries of TORCH_CUDA_ARCH_LIST as CMakeLists.txt takes them. The kernels for Hopper need 9.0a, so that 9.0 means it."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    expanded = ";".join(gpus_here()) if asked == "native" else asked
    for name, archs in NAMED_ARCHS.items():
        expanded = expanded.replace(name, archs)
    entries = [arch for arch in re.split(r"[;,\s]+", expanded) if arch]
    if unknown := [arch for arch in entries if not re.fullmatch(r"\d{1,2}\.\da?(\+PTX)?", arch)]:
        sys.exit(
            f"amp_kernels: TORCH_CUDA_ARCH_LIST={asked} names {', '.join(unknown)}; accepted: numbers such as 9.0 or 8.0+PTX, "
            f"{', '.join(NAMED_ARCHS)}, or native alone"
        )
    hopper = {"9.0": ["9.0a"], "9.0+PTX": ["9.0a", "9.0+PTX"]}  # PTX of 9.0a runs on no later chip
    return [*dict.fromkeys(arch for entry in entries for arch in hopper.get(entry, [entry]))] or default_archs(nvcc)


def gpus_here() -> list[str]:
    """The compute capabilities of the GPUs of this machine."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True).stdout.split()
    except OSError:
        found = []
    return sorted({*found}, key=float) or sys.exit(
        "amp_kernels: TORCH_CUDA_ARCH_LIST=native, but nvidia-smi shows no GPU"
    )


def number_of(variable: str, default: int) -> int:
    """A number of parallel compilations."""
    text = os.environ.get(variable) or str(default)
    if not text.strip().isdecimal() or int(text) < 1:
        sys.exit(f"amp_kernels: {variable}={text}; accepted: a whole number from 1 on")
    return int(text)


def pybind11_include() -> str:
    try:
        import pybind11
    except ImportError as error:
        raise Missing("pybind11 is not installed in the build environment") from error
    return pybind11.get_include()


class FreshBuild(build_py):
    def run(self):
        """Without the modules of an earlier build, which may be gone by now."""
        shutil.rmtree(Path(self.build_lib, "amp_kernels"), ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Builds each target of CMakeLists.txt by itself and writes ``_build_info.json`` beside the package."""

    def run(self):
        self.jobs, self.nvcc_threads = number_of("MAX_JOBS", os.cpu_count()), number_of("NVCC_THREADS", 2)
        self.info = {"libraries": {}, "cuda_archs": []}
        try:
            self.configure()
        except Missing as error:
            for library in TARGETS:
                self.note(library, str(error))
        else:
            self.leave_out()
            self.require_kernels()  # before minutes are spent on the rest
            self.require_cuda()
            wanted = [library for library in TARGETS if library not in self.info["libraries"]]
            self.build_together(wanted)
            for library in wanted:
                self.build_target(library)
        self.require_kernels()
        self.require_cuda()
        self.package_dir().mkdir(parents=True, exist_ok=True)
        (self.package_dir() / "_build_info.json").write_text(json.dumps(self.info, indent=2) + "\n")
        for library, entry in self.info["libraries"].items():
            print(f"amp_kernels: {library}: {'built' if entry['built'] else 'NOT built: ' + entry['reason']}")

    def leave_out(self) -> None:
        """Note the parts that nobody asked for. The emulator takes longer than all CPU kernels: only a working copy has it unasked."""
        named = os.environ.get("AMP_KERNELS_PARTS", "")
        parts = [part for part in re.split(r"[,\s]+", named) if part]
        parts += ["emulated"] if parts and os.environ.get("AMP_KERNELS_EMULATOR") == "1" else []
        unknown = sorted({*parts} - {*TARGETS})
        if unknown:
            sys.exit(f"amp_kernels: AMP_KERNELS_PARTS names {', '.join(unknown)}; accepted: {', '.join(TARGETS)}")
        for part in TARGETS if parts else ():
            if part not in parts and part not in self.info["libraries"] and not self.keeps(part):
                self.note(part, f"left out by AMP_KERNELS_PARTS={named}")
                if part == "cuda":
                    self.info["cuda_archs"] = []
        asked = os.environ.get("AMP_KERNELS_EMULATOR") or ("1" if self.inplace or self.editable_mode else "0")
        if asked == "0" and "emulated" not in parts:
            self.note("emulated", "a tool for tests, left out of an install; AMP_KERNELS_EMULATOR=1 builds it")

    def keeps(self, part: str) -> bool:
        """Keep the library that an earlier build in place made, and its record. False if it does not fit the sources or torch."""
        record, files = self.package_dir() / "_build_info.json", [*self.package_dir().glob(TARGETS[part][1])]
        before = json.loads(record.read_text()) if self.inplace and record.exists() else {"libraries": {}}
        built = before["libraries"].get(part, {}).get("built") and before.get("torch") == self.info.get("torch")
        if not built or not files or changed_at(part) > min(file.stat().st_mtime for file in files):
            return False
        self.info["libraries"][part] = before["libraries"][part]
        if part == "cuda":
            self.info |= {key: before[key] for key in ("cuda_archs", "nvcc")}
        return True

    def configure(self) -> None:
        # The environment's own tools first: pip does not put the folder of the interpreter on PATH.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        cmake = self.cmake = shutil.which("cmake", path=path)
        ninja = shutil.which("ninja", path=path)
        if cmake is None or ninja is None:
            raise Missing(f"{'cmake' if cmake is None else 'ninja'} was not found (pip install cmake ninja)")
        arguments = [
            f"-DCMAKE_BUILD_TYPE={'Debug' if os.environ.get('DEBUG', '0') not in ('', '0') else 'Release'}",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython3_EXECUTABLE={sys.executable}",
        ]
        tag = (
            sys.implementation.cache_tag
        )  # one build folder per kind of build, so that switching back and forth stays cheap
        try:
            torch = find_torch()
            self.info["torch"] = torch["version"]
            tag += f"-torch{torch['version']}"
            arguments.append(f"-DTORCH_ROOT={torch['root']}")
            arguments += self.cuda_arguments(torch)
        except Missing as error:
            for library in ("cpu", "cuda", "nodes", "emulated"):
                self.note(library, str(error))
        try:
            arguments.append(f"-DPYBIND11_INCLUDE={pybind11_include()}")
        except Missing as error:
            self.note("host", str(error))
        tag += f"-nvcc{self.info['nvcc']}" if self.info["cuda_archs"] else ""
        self.folder = ROOT / "build" / f"cmake-{tag}{'-debug' if 'Debug' in arguments[0] else ''}"
        step = subprocess.run(
            [cmake, "-S", ROOT, "-B", self.folder, "-G", "Ninja", *arguments], capture_output=True, text=True
        )
        if step.returncode:
            print(step.stdout, step.stderr, file=sys.stderr)
        if step.returncode and self.info["cuda_archs"]:  # a broken CUDA toolkit must not take the CPU kernels with it
            self.note("cuda", last_error(step.stdout + step.stderr))
            self.info["cuda_archs"] = []
            shutil.rmtree(self.folder)
            arguments = [argument for argument in arguments if "CUDA" not in argument]
            step = subprocess.run(
                [cmake, "-S", ROOT, "-B", self.folder, "-G", "Ninja", *arguments], capture_output=True, text=True
            )
        if step.returncode:
            raise Missing(last_error(step.stdout + step.stderr))

    def cuda_arguments(self, torch: dict) -> list[str]:
        try:
            if torch["cuda"] is None:
                raise Missing("the installed torch is a CPU build")
            nvcc = find_nvcc()
            version = nvcc_version(nvcc)
            if version.split(".")[0] != torch["cuda"].split(".")[0]:
                raise Missing(
                    f"nvcc is version {version}, torch was built with CUDA {torch['cuda']}: the major versions must agree"
                )
        except Missing as error:
            self.note("cuda", str(error))
            return ["-DAMP_KERNELS_CUDA=OFF"]
        archs = asked_archs(nvcc)
        self.info["cuda_archs"] = archs
        self.info["nvcc"] = version
        return [
            "-DAMP_KERNELS_CUDA=ON",
            f"-DCMAKE_CUDA_COMPILER={nvcc}",
            f"-DCUDAToolkit_ROOT={Path(nvcc).parent.parent}",
            f"-DAMP_KERNELS_CUDA_ARCHS={';'.join(archs)}",
            f"-DAMP_KERNELS_NVCC_THREADS={self.nvcc_threads}",
        ]

    def build_command(self, *parts: str) -> list:
        targets = (TARGETS[part][0] for part in parts)
        return [self.cmake, "--build", self.folder, "-j", str(self.jobs), "--target", *targets]

    def build_together(self, parts: list[str]) -> None:
        """Compile the files of all parts side by side and report progress. Errors are left to :meth:`build_target`."""
        begin = reported = time.monotonic()
        with subprocess.Popen(
            [*self.build_command(*parts), "--", "-k", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
        ) as build:
            for line in build.stdout:
                status = re.match(r"\[(\d+)/(\d+)\]", line)
                if not status:
                    continue
                done, total = map(int, status.groups())
                if done == 1 and total > len(parts):
                    about = f"({total} steps, {estimate(parts, self.jobs)})"
                    print(f"amp_kernels: building {', '.join(parts)} {about}", flush=True)
                elif (now := time.monotonic()) - reported >= REPORT_EVERY:
                    reported = now
                    print(f"amp_kernels: {done} of {total} steps after {now - begin:.0f} s", flush=True)

    def build_target(self, library: str) -> None:
        pattern = TARGETS[library][1]
        command = self.build_command(library)
        step = subprocess.run(command, capture_output=True, text=True)
        files = list(self.folder.glob(pattern))
        if step.returncode or not files:
            print(step.stdout, step.stderr, file=sys.stderr)
            self.note(library, last_error(step.stdout + step.stderr))
            if library == "cuda":
                self.info["cuda_archs"] = []
            return
        self.package_dir().mkdir(parents=True, exist_ok=True)
        for file in files:
            # Replaced, not overwritten: a running process may have the old library mapped.
            temporary = self.package_dir() / f".{file.name}"
            shutil.copy2(file, temporary)
            temporary.replace(self.package_dir() / file.name)
        self.note(library, None)

    def require_kernels(self) -> None:
        """Raise if the CPU library is known to be missing, although nobody left it out."""
        entry = self.info["libraries"].get("cpu", {"built": True})
        accepted = os.environ.get("AMP_KERNELS_SKIP_KERNELS") == "1" or "AMP_KERNELS_PARTS" in str(entry.get("reason"))
        if not (entry["built"] or accepted):
            sys.exit(
                f"amp_kernels: no kernels can be built: {entry['reason']}\n"
                "AMP_KERNELS_SKIP_KERNELS=1 installs the package without them: every op then runs as plain torch operations"
            )

    def require_cuda(self) -> None:
        """Raise if the CUDA library was demanded and is known to be missing."""
        entry = self.info["libraries"].get("cuda", {"built": True})
        if os.environ.get("AMP_KERNELS_FORCE_CUDA") == "1" and not entry["built"]:
            raise RuntimeError(f"AMP_KERNELS_FORCE_CUDA=1, but the CUDA library was not built: {entry['reason']}")

    def note(self, library: str, reason: str | None) -> None:
        self.info["libraries"][library] = {"built": reason is None, "reason": reason}
        if reason is not None:  # never leave a stale binary beside a record that says there is none
            for stale in self.package_dir().glob(TARGETS[library][1]):
                stale.unlink()

    def package_dir(self) -> Path:
        return Path(self.get_ext_fullpath("amp_kernels._host")).parent

    def get_outputs(self):
        patterns = [pattern for _, pattern in TARGETS.values()] + ["_build_info.json"]
        return [str(file) for pattern in patterns for file in self.package_dir().glob(pattern)]


def changed_at(part: str) -> float:
    """The time of the last change to a source that the part reads."""
    times = [(ROOT / "CMakeLists.txt").stat().st_mtime]
    for source in [*(ROOT / "csrc").rglob("*.*"), *(ROOT / "tools" / "emulator").glob("*.*")]:
        if part in next((parts for path, parts in READERS.items() if re.search(path, str(source))), TARGETS):
            times.append(source.stat().st_mtime)
    return max(times)


def estimate(parts: list[str], jobs: int) -> str:
    """The time of a full build, to tell minutes from an hour."""
    minutes = sum(CORE_SECONDS[part] for part in parts) / jobs / 60
    return f"about {max(minutes, 0.5):.1f} minutes on {jobs} cores"


def last_error(output: str) -> str:
    """The line that names what went wrong: the first compiler or CMake error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if re.search(r"\b(fatal error|error)\b|CMake Error", line)]
    if not errors:
        return lines[-1] if lines else "the build printed nothing"
    return " ".join(lines[errors[0] : errors[0] + 2])[:400]


def index_page(text: str, repository: str) -> str:
    """The README as an index shows it: its links into the repository are absolute, or plain text if nobody says where that is."""

    def absolute(link: re.Match) -> str:
        picture, label, target = link.groups()
        if target.startswith(("https:", "#")):
            return link[0]
        if not repository:
            return "" if picture else label
        return f"{picture}[{label}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)", absolute, text)


def links(repository: str) -> dict[str, str]:
    """The links of the package's page on an index, for the address of the repository; none if nobody says it."""
    at = repository.rstrip("/")
    pages = {"Source": "", "Issues": "/issues", "Security": "/security", "Changelog": "/blob/main/CHANGELOG.md"}
    return {name: at + page for name, page in pages.items()} if at else {}


REPOSITORY = os.environ.get("AMP_KERNELS_REPOSITORY", "")

setup(
    long_description=index_page((ROOT / "README.md").read_text(), REPOSITORY),
    long_description_content_type="text/markdown",
    project_urls=links(REPOSITORY),
    ext_modules=[Extension("amp_kernels._host", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": FreshBuild},
    packages=[
        ".".join(path.relative_to(ROOT).parts)
        for path in [ROOT / "amp_kernels", *sorted((ROOT / "amp_kernels").rglob("*"))]
        if (path / "__init__.py").exists()
    ]
    + ["amp_kernels.bench", *(f"amp_kernels.bench.{room}" for room in ("harness", "ops", "prediction", "training"))],
    package_dir={"amp_kernels.bench": "bench"},
    package_data={"amp_kernels": ["py.typed", "*.pyi"]},
)

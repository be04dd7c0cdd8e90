"""Installs of every kind, each into a clean virtual environment: what is built is used, what is not is explained.

The environments see this one's torch through a path file, so that nothing is downloaded but the build requirements of the one
isolated build. They do not see this one's amp_kernels: editable installs work by hooks that a path file does not run.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[2]
EMULATOR = "amp_kernels/libamp_kernels_emulated.so"
CLEAN = {
    "PYTHONPATH": "",
    "AMP_KERNELS_BACKEND": "",
    "AMP_KERNELS_EMULATOR": "",
    "AMP_KERNELS_PARTS": "cpu host nodes",  # minutes less where there is nvcc
}


def run(*command, cwd=ROOT, check=True, **environment):
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **CLEAN, **environment},
    )
    if check:
        assert result.returncode == 0, result.stdout + result.stderr
    return result


def build_wheel(folder: Path, *options, check=True, **environment):
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-v", "-w", folder, *options]
    result = run(*command, check=check, **environment)
    return next(folder.glob("*.whl"), None), result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"), "--no-build-isolation")[0]


class Environment:
    """A clean virtual environment."""

    def __init__(self, folder: Path, torch: bool = True):
        run(sys.executable, "-m", "venv", folder)
        self.python = folder / "bin" / "python"
        self.folder = folder
        if torch:
            site = next((folder / "lib").glob("python*/site-packages"))
            (site / "torch_of_the_tests.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def install(self, wheel: Path) -> None:
        run(self.python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)

    def __call__(self, *arguments, **options):
        return run(self.python, *arguments, cwd=self.folder, **options)


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment")


def info_of(wheel: Path) -> dict:
    return json.loads(zipfile.ZipFile(wheel).read("amp_kernels/_build_info.json"))


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"amp_kernels"}
    for needed in ("amp_kernels/libamp_kernels_cpu.so", "amp_kernels/bench/run.py", "amp_kernels/py.typed"):
        assert needed in names
    assert EMULATOR not in names
    assert "AMP_KERNELS_EMULATOR=1 builds it" in info_of(wheel)["libraries"]["emulated"]["reason"]
    assert any(name.startswith("amp_kernels/_host.") and name.endswith(".so") for name in names)


@pytest.mark.exhaustive  # compiles it once more
def test_the_emulator_is_in_the_wheel_if_it_is_asked_for(tmp_path):
    wheel, _ = build_wheel(tmp_path, "--no-build-isolation", AMP_KERNELS_EMULATOR="1")
    assert EMULATOR in zipfile.ZipFile(wheel).namelist()


def test_only_the_named_parts_are_built(tmp_path, wheel):
    """And only the modules that are there: those of a build before, such as the fixture's, are not copied."""
    folders = [folder for folder in ROOT.glob("build/lib*/amp_kernels") if (folder / "__init__.py").exists()]
    for folder in folders:
        (folder / "gone.py").touch()
    wheel, _ = build_wheel(tmp_path, "--no-build-isolation", AMP_KERNELS_PARTS="host, cpu")
    assert folders
    assert "amp_kernels/gone.py" not in zipfile.ZipFile(wheel).namelist()
    libraries = info_of(wheel)["libraries"]
    assert {part for part, entry in libraries.items() if entry["built"]} == {"cpu", "host"}
    assert libraries["nodes"]["reason"] == "left out by AMP_KERNELS_PARTS=host, cpu"
    assert info_of(wheel)["cuda_archs"] == []
    wheel, refused = build_wheel(
        tmp_path / "unknown", "--no-build-isolation", check=False, AMP_KERNELS_PARTS="cpu,kernels"
    )
    assert wheel is None
    assert (
        "AMP_KERNELS_PARTS names kernels; accepted: cpu, cuda, host, nodes, emulated" in refused.stdout + refused.stderr
    )


def test_a_part_built_in_place_leaves_the_others(tmp_path):
    """Those older than a source of theirs go. The first line, before anything is compiled, names the parts and estimates the time."""
    compiler = tmp_path / "c++"  # makes nothing of host.cpp, at once
    compiler.write_text('#!/bin/sh\ncase "$*" in *host.cpp*) exit 1;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    copy = tmp_path / "source"
    run("git", "clone", "--quiet", ROOT, copy)
    (copy / "setup.py").write_bytes((ROOT / "setup.py").read_bytes())
    package = copy / "amp_kernels"
    options = {"AMP_KERNELS_PARTS": "host", "CXX": str(compiler), "CUDA_HOME": "/nonexistent"}

    def build_host() -> tuple[str, dict]:
        told = run(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", cwd=copy, **options).stdout
        return told, json.loads((package / "_build_info.json").read_text())

    told, record = build_host()
    first, *_ = told.splitlines()
    assert re.fullmatch(r"amp_kernels: building host \(\d+ steps, about [\d.]+ minutes on \d+ cores\)", first)
    for part in ("cpu", "nodes"):
        record["libraries"][part] = {"built": True, "reason": None}
    (package / "_build_info.json").write_text(json.dumps(record))
    for library in ("libamp_kernels_cpu.so", "_nodes.x.so", "libamp_kernels_emulated.so"):
        (package / library).touch()
    os.utime(copy / "csrc" / "loss" / "cpu.cpp", (2e9, 2e9))  # newer than the library of CPU kernels
    libraries = build_host()[1]["libraries"]
    assert {part for part, entry in libraries.items() if entry["built"]} == {"nodes"}
    assert libraries["cpu"]["reason"] == "left out by AMP_KERNELS_PARTS=host"
    assert [path.name for path in package.glob("*.so")] == ["_nodes.x.so"]


def test_wheel_works_in_a_clean_environment(wheel, environment):
    environment.install(wheel)
    report = environment("-m", "amp_kernels", "info", "--check").stdout
    assert "all backends agree with the reference" in report
    assert "cpu: cpu" in report
    where = environment("-c", "import amp_kernels; print(amp_kernels.__file__)").stdout
    assert str(environment.folder) in where
    assert "--op" in environment("-m", "amp_kernels", "bench", "--help").stdout
    assert "dtype" in environment("-m", "amp_kernels", "doctor").stdout


@pytest.mark.exhaustive  # a build, and pip's of its environment
def test_isolated_build_uses_the_torch_of_the_environment(tmp_path):
    """pip's build environment holds no torch; the one that pip runs in does."""
    wheel, _ = build_wheel(tmp_path, AMP_KERNELS_PARTS="cpu host")
    libraries = info_of(wheel)["libraries"]
    assert libraries["cpu"]["built"]
    assert libraries["host"]["built"]


# setup.py's find_torch alone, whose answer is the version
FIND = "import runpy, setuptools; setuptools.setup = lambda **_: None; print(runpy.run_path('setup.py')['find_torch']()['version'])"


@pytest.mark.parametrize(
    ("starter", "place"),
    [
        (starter, place)
        for starter in ("pip", "build", "uv")
        for place in ("environment", "PYTHONPATH", "user", ".venv")
        if (starter == "uv") >= (place == ".venv")
    ],
)
def test_an_isolated_build_finds_torch_where_the_process_that_started_it_does(tmp_path, starter, place):
    """pip hides the environment by variables; `build` and uv start the Python of an environment of the build alone."""
    environment, build = tmp_path / ".venv", tmp_path / "build"
    for folder in (environment, build):
        run(sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", folder)
    needed = tmp_path / "needed"
    needed.mkdir()
    for folder in Path(setuptools.__file__).parents[1].glob("setuptools*"):  # and its metadata
        (needed / folder.name).symlink_to(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = Path("lib", version, "site-packages")
    at = {"PYTHONPATH": tmp_path / "path", "user": tmp_path / "user" / site}.get(place, environment / site)
    (at / "torch").mkdir(parents=True)
    (at / "torch" / "__init__.py").write_text("__version__ = '2.99.0'\nclass version: cuda = None\n")
    variables = {"PYTHONUSERBASE": str(tmp_path / "user"), "PYTHONPATH": str(tmp_path / "path")}
    if place != ".venv":
        variables["VIRTUAL_ENV"] = str(environment)
    python = environment / "bin" / "python"
    told = [python if starter == "pip" else build / "bin" / "python", "-c", FIND]
    isolated = [
        "env",
        "-C",
        ROOT,
        f"PYTHONPATH={needed}",
        "PYTHONNOUSERSITE=1",
        "PYTHONUSERBASE=",
        f"VIRTUAL_ENV={build}",
    ]
    if starter == "uv":
        shutil.copy("/bin/sh", tmp_path / "uv")
        command = (tmp_path / "uv", "-c", '"$@"; exit $?', "sh")
    else:
        command = (python, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))")
    found = run(*command, *isolated, *told, cwd=environment, **variables)
    assert found.stdout.split() == ["2.99.0"]


@pytest.mark.parametrize(
    ("asked", "built"),
    [
        ("9.0", "9.0a"),
        ("9.0a 8.0+PTX", "9.0a 8.0+PTX"),
        ("Hopper;7.5", "9.0a 9.0+PTX 7.5"),
        ("Ampere", "8.0 8.6+PTX"),
        ("Ampere+Tegra,Ada", "8.7 8.9+PTX"),
        ("native", "9.0a 12.0"),
        ("", "default"),
    ],
)
def test_the_list_of_architectures_means_what_torch_means(tmp_path, monkeypatch, asked, built):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '9.0\\n12.0\\n9.0\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    program = runpy.run_path(str(ROOT / "setup.py"))
    program["asked_archs"].__globals__["default_archs"] = lambda nvcc: ["default"]
    assert program["asked_archs"]("nvcc") == built.split()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MAX_JOBS", "abc", "MAX_JOBS=abc; accepted: a whole number from 1 on"),
        ("MAX_JOBS", "0", "MAX_JOBS=0; accepted: a whole number from 1 on"),
        ("NVCC_THREADS", "2.5", "NVCC_THREADS=2.5; accepted: a whole number from 1 on"),
        ("TORCH_CUDA_ARCH_LIST", "9.0;Hoper", "TORCH_CUDA_ARCH_LIST=9.0;Hoper names Hoper; accepted: numbers such as 9.0"),
        ("TORCH_CUDA_ARCH_LIST", "native", "TORCH_CUDA_ARCH_LIST=native, but nvidia-smi shows no GPU"),
    ],
)  # fmt: skip
def test_a_wrong_variable_stops_the_build(monkeypatch, variable, value, said):
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    program = runpy.run_path(str(ROOT / "setup.py"))
    with pytest.raises(SystemExit, match=re.escape(f"amp_kernels: {said}")):
        program["asked_archs"]("nvcc") if "ARCH" in variable else program["CMakeBuild"](setuptools.Distribution()).run()


@pytest.mark.exhaustive  # two environments without torch
def test_without_torch_the_install_fails_unless_it_may_go_without_kernels(tmp_path):
    """Also the editable install: the source folder is a copy, so that this environment's build stays as it is."""
    bare = Environment(tmp_path / "environment", torch=False)
    copy = tmp_path / "source"
    run("git", "clone", "--quiet", ROOT, copy)
    install = (bare.python, "-m", "pip", "install", "--no-deps", "-e", copy)
    refused = run(*install, check=False)
    assert refused.returncode != 0
    assert "no kernels can be built: torch cannot be imported" in refused.stdout + refused.stderr
    assert "AMP_KERNELS_SKIP_KERNELS=1 installs the package without them" in refused.stdout + refused.stderr
    run(*install, AMP_KERNELS_SKIP_KERNELS="1")
    libraries = json.loads((copy / "amp_kernels" / "_build_info.json").read_text())["libraries"]
    assert "torch cannot be imported" in libraries["cpu"]["reason"]
    assert "torch cannot be imported" in libraries["cuda"]["reason"]
    assert libraries["host"]["built"]


def test_failing_compiler_leaves_python_and_the_reference(tmp_path, environment):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'error: this compiler is broken' >&2\nexit 1\n")
    broken.chmod(0o755)
    copy = tmp_path / "source"  # its own build folder: a compiler is cached by CMake
    run("git", "clone", "--quiet", ROOT, copy)
    build = (sys.executable, "-m", "pip", "wheel", copy, "--no-deps", "--no-build-isolation", "-w", tmp_path)
    assert run(*build, check=False, CXX=str(broken)).returncode != 0
    run(*build, CXX=str(broken), AMP_KERNELS_SKIP_KERNELS="1")
    wheel = next(tmp_path.glob("*.whl"))
    assert not any(library["built"] for library in info_of(wheel)["libraries"].values())
    environment.install(wheel)
    report = environment("-m", "amp_kernels", "info", "--check").stdout
    assert "cpu: reference" in report
    warned = environment(
        "-c", "import amp_kernels as ak, torch; x = torch.ones(2, 2).half(); ak.matmul(x, x); ak.gelu(x)"
    ).stderr
    assert warned.count("every such op runs on the slow torch reference: no CPU kernel:") == 1
    assert "CMake Error" in report
    asked = environment(
        "-c", "import amp_kernels as ak, torch; ak.matmul(torch.ones(2, 2).half(), torch.ones(2, 2).half())",
        check=False, AMP_KERNELS_BACKEND="cpu",
    )  # fmt: skip
    assert "BackendUnavailable" in asked.stderr
    assert "CMake Error" in asked.stderr
    assert "pip install --no-build-isolation -v ." in asked.stderr


@pytest.mark.exhaustive  # two builds
def test_absent_nvcc_is_a_reason_and_a_failure_when_cuda_is_forced(tmp_path):
    parts = {"AMP_KERNELS_PARTS": "host cuda", "AMP_KERNELS_SKIP_KERNELS": "1"}
    wheel, _ = build_wheel(tmp_path, "--no-build-isolation", CUDA_HOME="/nonexistent", **parts)
    libraries = info_of(wheel)["libraries"]
    assert libraries["host"]["built"]
    expected = ["nvcc was not found (CUDA_HOME=/nonexistent)", "the installed torch is a CPU build"]
    assert libraries["cuda"]["reason"] in expected
    forced = build_wheel(
        tmp_path / "forced",
        "--no-build-isolation",
        check=False,
        CUDA_HOME="/nonexistent",
        AMP_KERNELS_FORCE_CUDA="1",
        AMP_KERNELS_PARTS="cuda",
    )
    assert forced[0] is None
    assert "AMP_KERNELS_FORCE_CUDA=1, but the CUDA library was not built" in forced[1].stdout + forced[1].stderr


def test_an_old_setuptools_is_named_in_one_line(tmp_path):
    (tmp_path / "setuptools" / "command").mkdir(parents=True)
    (tmp_path / "setuptools" / "__init__.py").write_text('__version__ = "65.5.0"\nExtension = setup = None\n')
    (tmp_path / "setuptools" / "command" / "__init__.py").touch()
    for command in ("build_ext", "build_py"):
        (tmp_path / "setuptools" / "command" / f"{command}.py").write_text(f"{command} = object\n")
    result = run(sys.executable, "setup.py", "egg_info", check=False, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.strip().count("\n") == 0
    assert "setuptools 65.5.0 is too old" in result.stderr
    assert "setuptools >= 77" in result.stderr

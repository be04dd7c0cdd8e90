"""The commands of the Makefile: which parts each builds and which cases it takes. Nothing is run but `make --dry-run`."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def commands(tmp_path):
    """(target, programs that are there) -> the commands of the target in a fresh clone."""

    def made(target: str, *programs: str) -> list[str]:
        tools = tmp_path / "-".join(["tools", *programs])
        tools.mkdir(exist_ok=True)
        for name in programs:
            (tools / name).write_text("#!/bin/sh\necho GPU 0\n")
            (tools / name).chmod(0o755)
        for name in ("make", "sh", "find", "head", "uname"):
            if not (tools / name).exists():
                (tools / name).symlink_to(
                    next(at for at in map(Path, ("/usr/bin", "/bin")) if (at / name).exists()) / name
                )
        at = {**os.environ, "PATH": str(tools)}
        command = ["make", "--dry-run", "--always-make", "--no-print-directory", "PYTHON=python3", target]
        told = subprocess.run(command, cwd=ROOT, env=at, capture_output=True, text=True, check=True)
        return told.stdout.splitlines()

    return made


def test_the_tests_are_the_same_with_and_without_nvcc(commands):
    """No CUDA kernels are compiled where no GPU runs them."""
    assert commands("test", "nvcc") == commands("test")
    assert 'AMP_KERNELS_PARTS="cpu host nodes emulated"' in commands("test", "nvcc")[0]
    assert commands("test", "nvidia-smi", "nvcc")[0].startswith(
        'TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-native}" AMP_KERNELS_PARTS="cpu host nodes cuda emulated"'
    )


@pytest.mark.parametrize(
    ("target", "part", "share"),
    [
        ("test", "PARTS", "--one-in"),
        ("test-all", "PARTS", "--exhaustive"),
        ("sass", "FORCE_CUDA=1", "--exhaustive"),
        ("ptx", "FORCE_CUDA=1", "--exhaustive"),
        ("demo", 'PARTS="cpu host nodes"', ""),
    ],
)
def test_what_a_command_builds_and_runs(commands, target, part, share):
    build, *rest = commands(target, "nvcc")
    assert f"AMP_KERNELS_{part}" in build
    assert any((share in line and "pytest" in line) or "tests.ptx.run" in line for line in rest) or not share
    assert all("--progress-every" in line for line in rest if " -m pytest" in line)

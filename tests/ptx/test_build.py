"""The objects that build.py takes from the package's own build."""

import os
import subprocess

import pytest

from . import build

SOURCES = sorted([*build.CSRC.rglob("*.cu"), *build.CSRC.rglob("glue*.cpp")])


@pytest.mark.parametrize("source", SOURCES[::4], ids=lambda source: source.stem)
def test_depends_finds_what_a_compiler_reads(source):
    command = [build.CXX, "-std=c++20", "-MM", "-MG", "-DAK_EMULATE", f"-I{build.CSRC}", "-x", "c++", source]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    read = {build.ROOT / path for path in said.partition(":")[2].replace("\\\n", " ").split()}
    assert {path for path in read if path.is_relative_to(build.CSRC)} <= set(build.depends(source))


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A repository of two kernels and a header that one of them includes through another, built in this order."""
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
    made = tmp_path / "build" / "cmake-1"
    files = {
        "CMakeLists.txt": 'set(AMP_KERNELS_CUDA_ARCHS "8.0+PTX;9.0a" CACHE STRING "")',
        "csrc/device/warp.h": "",
        "csrc/base/row.h": '#include "device/warp.h"',
        "csrc/norm/norm.cu": '#include "base/row.h"',
        "csrc/cast/cast.cu": "",
        "build/cmake-1/CMakeCache.txt": "AMP_KERNELS_CUDA_ARCHS:STRING=8.0+PTX;9.0a",
        "build/cmake-1/CMakeFiles/amp_kernels_cuda.dir/csrc/norm/norm.cu.o": "",
        "build/cmake-1/CMakeFiles/amp_kernels_cuda.dir/csrc/cast/cast.cu.o": "",
        "build/cmake-1/libamp_kernels_cuda.so": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (100 + 100 * (made in (tmp_path / name).parents),) * 2)
    os.utime(made / "libamp_kernels_cuda.so", (210, 210))
    return tmp_path


def taken() -> set[str]:
    return {source.stem for source in build.package_objects()}


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ("csrc/device/warp.h", {"cast"}),
        ("csrc/norm/norm.cu", {"cast"}),
        ("csrc/cast/cast.cu", {"norm"}),
        ("CMakeLists.txt", set()),
    ],
)
def test_only_what_a_change_reaches_is_compiled_again(built, changed, left):
    assert taken() == {"norm", "cast"}
    os.utime(built / changed, (300, 300))
    assert taken() == left


def test_an_object_that_no_library_was_linked_from_may_be_half_written(built):
    os.utime(next(built.rglob("norm.cu.o")), (300, 300))
    assert taken() == {"cast"}


def test_a_build_for_fewer_chips_is_of_no_use(built):
    (built / "build/cmake-1/CMakeCache.txt").write_text("AMP_KERNELS_CUDA_ARCHS:STRING=9.0a")
    assert taken() == set()

"""The wheels' checks find what would be wrong with one; the distributions hold what they should; the version stands in one place."""

import importlib.util
import json
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from amp_kernels._dispatch import load, nodes

from ..helpers.processes import ROOT, python, run


def program(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wheels = program("wheels")
FILES = ["libamp_kernels_cpu.so", "libamp_kernels_cuda.so", "bench/run.py", "py.typed"]
FILES += [
    f"{module}.cpython-{python}-x86_64-linux-gnu.so" for module in ("_host", "_nodes") for python in ("310", "314")
]
METADATA = """Metadata-Version: 2.4
Name: amp_kernels
Summary: kernels
Author: we
Keywords: cuda
License-Expression: Apache-2.0
Classifier: Typing :: Typed
Requires-Python: >=3.10
Requires-Dist: torch>=2.10.0a0
Description-Content-Type: text/markdown
"""


def made(
    folder: Path,
    tag="py3-none-manylinux_2_28_x86_64",
    release=None,
    files=(),
    without=(),
    archs=wheels.ARCHS,
    metadata=METADATA,
):
    path = folder / f"amp_kernels-{release or wheels.version()}-{tag}.whl"
    built = {name: {"built": name != "emulated"} for name in ("cpu", "cuda", "host", "nodes", "emulated")}
    with zipfile.ZipFile(path, "w") as archive:
        for name in [*FILES, *files]:
            if name not in without:
                archive.writestr(f"amp_kernels/{name}", "")
        archive.writestr("amp_kernels/_build_info.json", json.dumps({"libraries": built, "cuda_archs": sorted(archs)}))
        archive.writestr("amp_kernels-1.dist-info/METADATA", metadata)
    return path


def test_a_right_wheel_has_no_faults(tmp_path):
    assert wheels.faults(made(tmp_path)) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tag": "cp311-cp311-manylinux_2_28_x86_64"}, "the tag is cp311-cp311"),
        ({"tag": "py3-none-linux_x86_64"}, "needed: manylinux"),
        ({"release": "9.9.9"}, "the version is 9.9.9"),
        ({"without": ["libamp_kernels_cuda.so"]}, "without libamp_kernels_cuda.so"),
        ({"without": ["_nodes.cpython-314-x86_64-linux-gnu.so"]}, "modules for different interpreters"),
        ({"files": ["libamp_kernels_emulated.so"]}, "with the emulator"),
        ({"archs": {"9.0a"}}, "code for 9.0a"),
        ({"metadata": METADATA.replace("License-Expression: Apache-2.0\n", "")}, "no licence"),
        ({"metadata": METADATA.replace("Keywords: cuda\n", "")}, "no Keywords"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_fault_is_named(tmp_path, wrong, said):
    found = wheels.faults(made(tmp_path, **wrong))
    assert len(found) == 1
    assert said in found[0]


def test_a_wheel_that_is_too_large_or_installs_something_else_is_refused(tmp_path, monkeypatch):
    path = made(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("tests/test_x.py", "")
    monkeypatch.setattr(wheels, "LARGEST", 10)
    size, tops = wheels.faults(path)
    assert size.endswith("MB; at most 0")
    assert tops == "it installs amp_kernels, tests"


def test_every_tag_of_the_wheel_becomes_one_for_any_python(tmp_path):
    wheel = tmp_path / "WHEEL"
    wheel.write_text("Root-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n")
    wheels.declare_any_python(wheel)
    assert wheel.read_text() == "Root-Is-Purelib: false\nTag: py3-none-linux_x86_64\n"


def test_the_default_architectures_are_those_of_the_wheel():
    assert (
        set(re.search(r'AMP_KERNELS_CUDA_ARCHS "(.+?)"', (ROOT / "CMakeLists.txt").read_text())[1].split(";"))
        == wheels.ARCHS
    )


def test_the_version_is_in_one_place_and_the_citation_and_the_changelog_follow():
    version = wheels.version()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert first == version
    assert 'attr = "amp_kernels._version.__version__"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(("tag", "status"), [("v{}", 0), ("{}", 1), ("v{}1", 1)])
def test_a_release_needs_the_tag_of_the_version(tag, status):
    python(".ci/wheels.py", "tag", tag.format(wheels.version()), status=status)


def test_the_source_distribution_holds_the_whole_repository(tmp_path):
    python("setup.py", "--quiet", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(run("git", "ls-files").stdout.split()) <= names
    assert not [name for name in names if name.endswith((".so", ".pyc", "_build_info.json"))]


def test_links_need_an_address(tmp_path):
    for address, expected in (("", False), ("https://example.org/owner/amp_kernels/", True)):
        python("setup.py", "--quiet", "egg_info", "--egg-base", tmp_path, AMP_KERNELS_REPOSITORY=address)
        info = (tmp_path / "amp_kernels.egg-info" / "PKG-INFO").read_text()
        for name, page in (("Source", ""), ("Issues", "/issues"), ("Security", "/security")):
            assert (f"Project-URL: {name}, https://example.org/owner/amp_kernels{page}\n" in info) == expected


def test_modules_of_a_torch_serve_its_other_builds_and_a_library_of_a_cuda_no_other_major(monkeypatch):
    monkeypatch.setattr(load, "absent", dict)
    info = {"libraries": {"nodes": {"built": True}}, "torch": "2.11.0+cpu"}
    assert nodes._why_not(info, "2.11.0+cu130") is None
    assert "it was built for torch 2.11.0+cpu, this is 2.11.1" in nodes._why_not(info, "2.11.1")
    info["libraries"]["nodes"] = {"built": False, "reason": "no compiler"}
    assert nodes._why_not(info, "2.11.0+cpu") == load.build_reason("nodes")
    assert load.other_cuda({"nvcc": "13.0"}, "13.1") is load.other_cuda({}, "12.6") is None
    assert "built with CUDA 13.0, torch with CUDA 12.6" in load.other_cuda({"nvcc": "13.0"}, "12.6")

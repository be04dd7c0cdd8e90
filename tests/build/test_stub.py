"""The stub of the compiled module says what is in it: names, arguments, defaults."""

import shutil

from ..helpers.processes import ROOT, python


def test_the_stub_is_that_of_the_module(tmp_path):
    """Both without the package, of which mypy would read all that it imports."""
    for file in (ROOT / "amp_kernels").glob("_host.*"):
        shutil.copy(file, tmp_path)
    options = "--mypy-config-file", ROOT / "pyproject.toml"
    python("-m", "mypy.stubtest", *options, "_host", cwd=tmp_path, MYPYPATH=str(tmp_path))

"""The sweep over gemm_sm90's tiles: the program on stand-ins for the CUDA runtime and the kernel, and the file that it fills."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bench import tiles
from bench.ops.gemm_shapes import Shape
from bench.prediction import measured, tile_times
from bench.prediction.tile_times import EPILOGUES, FILE, NEWER, Choice, Product

from ..helpers.patience import PATIENCE

_host = pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = {tile_times.tile_name(tile) for tile in _host.gemm_candidates()["sm90"]}


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler is needed"
    path = tmp_path_factory.mktemp("tiles") / "tiles"
    sources = [ROOT / "bench" / "tiles.cpp", HERE / "tiles" / "product.cpp"]
    options = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-I", HERE / "tiles", "-I", ROOT / "csrc"]
    subprocess.run([compiler, *options, "-o", path, *sources], check=True, timeout=PATIENCE)
    return path


def swept(program: Path, folder: Path, *products: Product) -> dict:
    rows = tiles.sweep(program, products, 1e9, 0.1)
    assert len(rows) == 2 * tile_times.write(folder / FILE, rows, "A test")  # there and back
    assert (folder / FILE).read_text().startswith("# A test: ")
    return tile_times.read(folder / FILE)


def test_a_sweep_takes_every_choice_that_the_file_has(program, tmp_path):
    small = Product(Shape(512, 512, 512, "NT"))
    found = swept(program, tmp_path, small)
    assert found.keys() == {small}
    taken = {choice for choice in found[small] if choice.tile not in NEWER}
    assert taken == {choice for choice in measured.tiles()[small] if choice.tile in NAMES}
    assert found[small] == {choice: choice.splits for choice in found[small]}  # the stand-in's microseconds


ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "swiglu": 5}


def test_epilogues_are_what_the_planner_is_told(program, tmp_path):
    """The stand-in's time counts a bit each for bias, residual, z, preact and sums, and the activation."""
    found = swept(program, tmp_path, *(Product(Shape(128, 256, 64, "NN"), name) for name in EPILOGUES))
    assert {product.epilogue for product in found} == set(EPILOGUES)
    for (_, name), times in found.items():
        (us,) = set(times.values())
        activation, parts = divmod(int(us) // 100, 100)
        bias, residual, z, preact, sums = (bool(parts & bit) for bit in (16, 8, 4, 2, 1))
        asked = EPILOGUES[name]
        assert activation == ACTIVATIONS[asked.get("activation", "none")], name
        assert (preact, sums) == (asked.get("backward", False), asked.get("column_sums", False)), name
        assert 2 * (residual + z + preact) == asked.get("side_bytes", 0), name
        assert (parts == 0) == (asked == {} or name == "relu_nb"), name
        assert bias == (name not in ("none", "res", "relu_nb", "dgelu", "dgelu_s", "dsilu")), name


def test_the_list_has_what_was_timed(capsys):
    assert tiles.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "8192 6144 4096 NT 16 none 1"
    assert set(measured.tiles()) <= set(tiles.products())


def test_the_least_time_of_a_choice_is_kept(tmp_path):
    rows = [f"64,64,64,NT,16,none,1,64x64 1x1,{splits},0,{us}" for splits, us in ((1, 3.5), (2, 4.0), (1, 3.25))]
    assert tile_times.write(tmp_path / FILE, rows, "A test") == 2
    (times,) = tile_times.read(tmp_path / FILE).values()
    assert times == {Choice("64x64 1x1", 1, False): 3.25, Choice("64x64 1x1", 2, False): 4.0}

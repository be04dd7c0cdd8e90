"""The steady state of the Hopper GEMM's main loop, as it is in the machine code. Needs nvcc, no GPU."""

from __future__ import annotations

import pytest

from tools.ptx.cuobjdump import cuobjdump
from tools.sass.listing import parse
from tools.sass.main_loop import faults

_host = pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")
TILES = _host.gemm_candidates()["sm90"]
SAMPLED = [(128, 256), (128, 144)]  # whose instances other tests compile as well


def slices(tile: dict) -> int:
    """The slices of 64 rows that a consumer has."""
    return tile["m"] // 64 // (1 if tile["pingpong"] else tile["consumers"])


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            i,
            marks=() if (tile["m"], tile["n"]) in SAMPLED else pytest.mark.exhaustive,
            id=f"{tile['m']}x{tile['n']}-{i}",
        )
        for i, tile in enumerate(TILES)
    ],
)
def test_steady_state(number, gemm_instance):
    ((_, code),) = parse(cuobjdump("-sass", gemm_instance(number))).items()
    tile, instructions = TILES[number], list(code.values())
    assert not faults(instructions, tile["n"], slices(tile))
    assert any(x.name == "USETMAXREG" for x in instructions) == (tile["consumers"] > 1)

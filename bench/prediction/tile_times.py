"""The file of times of every tile of gemm_sm90, `gemm_tiles.csv`, which `python -m bench.tiles` fills on a GPU."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..ops.gemm_shapes import Shape

FILE = "gemm_tiles.csv"
COLUMNS = ("m", "n", "k", "layout", "result", "epilogue", "batch", "tile", "splits", "swapped", "us")

# Epilogues, as GemmRequest has them (see Shape.request). "_z" stores the pre-activation, "_nb" has no bias,
# "d" is a backward with the pre-activation, "_s" with column sums; the bias is free where something else is done.
EPILOGUES: dict[str, dict[str, Any]] = {
    "none": {},
    "bias": {"plain": False},
    "res": {"side_bytes": 2},
    "biasres": {"side_bytes": 2},
    "relu": {"activation": "relu"},
    "relu_nb": {"activation": "relu"},
    "gelu": {"activation": "gelu"},
    "gelu_z": {"activation": "gelu", "keeps_z": True, "side_bytes": 2},
    "silu": {"activation": "silu"},
    "swiglu": {"activation": "swiglu"},
    "dgelu": {"activation": "gelu", "backward": True, "side_bytes": 2},
    "dgelu_s": {"activation": "gelu", "backward": True, "side_bytes": 2, "column_sums": True},
    "dsilu": {"activation": "silu", "backward": True, "side_bytes": 2},
}

# Epilogues whose code has not changed since they were timed (csrc/gemm/sm90/epilogue_tma.cuh), and tiles that are newer.
TIMED = ("none", "bias")
NEWER = {"192x128 1x2", "128x64 1x1 pingpong"}


class Product(NamedTuple):
    shape: Shape
    epilogue: str = "none"


class Choice(NamedTuple):
    """A choice of the planner: "128x128 1x2 pingpong" is a tile's rows and columns, then its cluster."""

    tile: str
    splits: int
    swapped: bool


def tile_name(tile: dict[str, Any]) -> str:
    """Name of a tile in `_host.gemm_candidates()["sm90"]`."""
    size = f"{tile['m']}x{tile['n']} {tile['cluster_m']}x{tile['cluster_n']}"
    return size + " pingpong" * tile["pingpong"]


def read(path: Path) -> dict[Product, dict[Choice, float]]:
    """Microseconds of each choice that was timed."""
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    times: dict[Product, dict[Choice, float]] = {}
    for row in rows:
        m, n, k, batch = (int(row[name]) for name in ("m", "n", "k", "batch"))
        product = Product(Shape(m, n, k, row["layout"], row["result"], batch), row["epilogue"])
        choice = Choice(row["tile"], int(row["splits"]), row["swapped"] == "1")
        times.setdefault(product, {})[choice] = float(row["us"])
    return times


def write(path: Path, lines: Iterable[str], told: str) -> int:
    """Keeps rows as `tiles.cpp` prints them, each choice once, with its least time, below what is told of the run."""
    least: dict[str, float] = {}
    for row in lines:
        choice, _, us = row.strip().rpartition(",")
        least[choice] = min(float(us), least.get(choice, float("inf")))
    head = f"# {told}: microseconds of a launch, bf16. bench/tiles.py says how, and what the epilogues are.\n"
    rows = "".join(f"{choice},{us:.2f}\n" for choice, us in least.items())
    path.write_text(head + ",".join(COLUMNS) + "\n" + rows)
    return len(least)

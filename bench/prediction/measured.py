"""Measurements on an NVIDIA H200 (132 SMs, 700 W), torch 2.11.0+cu130, random data, of 22 November 2026: the benchmark's rows and the
times of every tile of gemm_sm90, both from `results/nvidia-h200`."""

import functools
from pathlib import Path

from ..harness import rows
from ..ops.gemm_shapes import Shape
from . import tile_times

RUN = Path(__file__).parents[1] / "results" / "nvidia-h200"


@functools.cache
def run() -> dict[tuple[str, ...], dict]:
    """The rows of that run by op, shape, dtype and provider."""
    return {tuple(row[key] for key in rows.KEY): row for row in rows.load(RUN) if row["status"] == "ok"}


@functools.cache
def tiles() -> dict[tile_times.Product, dict[tile_times.Choice, float]]:
    """Microseconds of every tile that takes a product, in splits or not, for some 50 products in bf16: those whose epilogue is still what
    was timed."""
    timed = tile_times.read(RUN / tile_times.FILE)
    return {product: times for product, times in timed.items() if product.epilogue in tile_times.TIMED}


def product(shape: Shape, provider: str = rows.OURS) -> dict | None:
    """The row of one product in bf16."""
    for (op, name, dtype, who), row in run().items():
        if op.startswith("gemm") and (name, who) == (shape.name, provider) and dtype.startswith("bf16"):
            return row
    return None


def product_us(shape: Shape, provider: str = rows.OURS) -> float | None:
    row = product(shape, provider)
    return row and row["p50_us"]

"""Measurements on an NVIDIA H200 (132 SMs, 700 W), torch 2.11.0+cu130, random data.

`run` reads the benchmark's rows and `tiles` the times of every tile of gemm_sm90, both of 22 November 2026, from
`results/nvidia-h200`, or another run's after `use`. The constants below are of 20 November: copies, cuBLAS at its best, a
prototype of the optimizer step, and torch's training steps.
"""

import functools
from pathlib import Path

from ..harness import rows
from ..ops.gemm_shapes import Shape
from . import tile_times

H200 = Path(__file__).parents[1] / "results" / "nvidia-h200"
RUN = H200  # of this package's kernels

COPY_BYTES_PER_S = 4.25e12  # read and written
CUBLAS_FLOPS_PER_S = 815e12  # its best, cold: 8192 x 14336 x 4096; sustained some 680e12

# Rates of the passes of a prototype of the optimizer step over that of a copy, on Llama-1B's list.
STEP_SHARES = {"check": 0.98, "update": 0.92}
# Time of a launch by the bytes of its arguments.
LAUNCH_US = {64: 5.2, 32_000: 7.7}

# Training steps there, bf16 autocast, fused AdamW, clipping: (seconds, peak GiB).
STEPS = {
    ("gpt2-124m", "torch eager"): (94.1e-3, 30.9),
    ("gpt2-124m", "torch.compile"): (64.8e-3, 15.6),
    ("gpt2-1.5b", "torch eager"): (221.5e-3, 47.2),
}


def use(folder: Path) -> None:
    """Switches to the results of another run of `bench.run` and `bench.gpt2`, on any GPU."""
    global RUN
    RUN = folder
    for read in (run, tiles):
        read.cache_clear()


def gpu() -> str:
    """The GPU of the run, "NVIDIA H200"; empty if it timed nothing."""
    return next((row["device"] for row in run().values() if "device" in row), "NVIDIA H200" if RUN == H200 else "")


@functools.cache
def run() -> dict[tuple[str, ...], dict]:
    """The rows of that run by op, shape, dtype and provider; training steps by the name of the model."""
    timed = [row for row in rows.load(RUN) if row["status"] == "ok"]
    trained = [{**row, "shape": row["model"]} for row in rows.load_training(RUN)]
    return {tuple(row[key] for key in rows.KEY): row for row in [*timed, *trained]}


@functools.cache
def tiles() -> dict[tile_times.Product, dict[tile_times.Choice, float]]:
    """Microseconds of every tile that takes a product, in splits or not, for some 50 products in bf16: those whose epilogue is still what
    was timed."""
    file = RUN / tile_times.FILE
    timed = tile_times.read(file) if file.exists() else {}
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


def norm_shares() -> dict[str, float]:
    """Rates of GPT-2's layer norm under autocast over that of a copy; backward is both passes less forward."""
    passes = ("forward", "forward + backward")
    timed = [run().get(("layer_norm", f"32768x768 {way} under autocast", "fp32", rows.OURS)) for way in passes]
    if None in timed:
        return {}
    (forward, us), (both, both_us) = ((row["bytes"], row["p50_us"]) for row in timed)
    rates = {"ak::norm_forward": forward / us, "ak::norm_backward": (both - forward) / (both_us - us)}
    return {op: rate * 1e6 / (timed[0]["copy_gb_per_s"] * 1e9) for op, rate in rates.items()}


def step_us(name: str, layout: str) -> float | None:
    """Device time of one optimizer step over a list of tensors in a layout."""
    return run().get(("step", name, layout, rows.OURS), {}).get("device_us")

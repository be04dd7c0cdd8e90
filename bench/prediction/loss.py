"""``linear_cross_entropy`` compared with the three products that it cannot do without: predicted, from no run.

Its products are those of chunks of rows, of which the last adds to an fp32 gradient of the weight that each chunk reads and
writes. Between them the loss reads a chunk's logits and writes their gradient in their place. On top of it a chunk's gradient
of the input is copied into the whole one, and backward has a launch that finds that the loss's gradient is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from amp_kernels.ops.linear_cross_entropy import default_chunk

from ..ops.gemm_shapes import Shape
from ..ops.loss import LINEAR_CUDA
from ..training.gpt import CONTEXT, GPT2_MODELS, WORDS
from .chips import Chip, plan
from .price import LAUNCH_US, SHARES


@dataclass(frozen=True)
class Head:
    rows: int
    features: int
    classes: int

    @property
    def chunks(self) -> list[int]:
        """Rows of each."""
        size = default_chunk(self.rows, torch.bfloat16, "cuda")
        return [min(size, self.rows - begin) for begin in range(0, self.rows, size)]

    def products(self, rows: int, accumulated: bool) -> list[Shape]:
        """Logits, the gradient of the input, the gradient of the weight, of so many rows."""
        return [
            Shape(rows, self.classes, self.features, "NT"),
            Shape(rows, self.features, self.classes, "NN"),
            Shape(self.classes, self.features, rows, "TN", "fp32+" if accumulated else "fp32"),
        ]


def heads() -> list[Head]:
    gpt2 = GPT2_MODELS["gpt2-124m"]
    return [Head(gpt2.batch * CONTEXT, gpt2.width, WORDS), *(Head(*shape) for shape in LINEAR_CUDA)]


def products_us(shapes: list[Shape], chip: Chip) -> list[float]:
    return [plan(shape, chip)["microseconds"] for shape in shapes]


def passes_us(bytes_of_each: list[int], rate: float) -> float:
    return sum(max(LAUNCH_US, moved / rate * 1e6) for moved in bytes_of_each)


def table(chip: Chip) -> list[tuple[str, ...]]:
    head = (
        "rows x features - classes",
        "chunks",
        "three GEMMs us",
        "in chunks",
        "weight gradient in chunks",
        "loss us",
    )
    lines = [(*head, "other us", "total", "total with the loss at copy rate")]
    for layer in heads():
        whole = products_us(layer.products(layer.rows, False), chip)
        chunked = [products_us(layer.products(rows, i > 0), chip) for i, rows in enumerate(layer.chunks)]
        parts = [sum(each) for each in zip(*chunked, strict=True)]
        logits = [4 * rows * layer.classes for rows in layer.chunks]  # read and written in 16 bits
        inputs = [4 * rows * layer.features for rows in layer.chunks]
        rate = SHARES["ours"] * chip.copy
        loss, others = passes_us(logits, rate), passes_us(inputs, rate) + LAUNCH_US
        three = sum(whole)
        row = (
            f"{len(layer.chunks)}",
            f"{three:,.0f}",
            f"{sum(parts) / three:.2f} x",
            f"{parts[2] / whole[2]:.2f} x",
            f"{loss:,.0f}",
        )
        total, least = sum(parts) + loss + others, three + passes_us(logits, chip.copy)
        row += f"{others:,.0f}", f"{total / three:.2f} x", f"{least / three:.2f} x"
        lines.append((f"{layer.rows} x {layer.features} - {layer.classes}", *row))
    return lines

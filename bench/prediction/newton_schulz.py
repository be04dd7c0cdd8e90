"""Symmetric products and Newton-Schulz iterations, by the cost model of csrc/gemm/cost.h. None has been timed."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_kernels import _host
from amp_kernels.ops import newton_schulz

from ..harness.tables import Table
from ..ops.newton_schulz import CUDA
from ..ops.syrk import CUDA as PRODUCTS
from .chips import Chip

BASIS = "PREDICTION for {chip}, from the cost model of csrc/gemm/cost.h; the mirrored store has the cycles of an epilogue whose "
BASIS += "results are stored twice, and no symmetric product has been timed."
LONE = """A product that takes few rounds of 132 SMs gets the tile that fills them: 128 x 144 at 2,048 (128 tiles), 256 x 160 at 3,072
(130), 64 x 80 at 1,024 (115). Tiles of 128 x 128 would take two rounds of 136 tiles at 2,048 and three of 300 at 3,072: 1.15 and 1.57.
Work that divides evenly over all SMs would give 1.86 at 3,072. A lone 512 leaves SMs idle; the full product has smaller tiles.
Operands that lie by columns, of tall matrices, are loaded 64 columns at a time: they take tiles of 128 x 128 or 64 x 128 alone."""
#: Bytes an element of the pass before, which reads 16 bits twice and writes them once. Muon takes the results where they lie.
PASSES = 6


def product_us(chip: Chip, m: int, n: int, k: int, **request: object) -> float:
    return _host.plan_gemm(m, n, k, **request, **chip.request)["microseconds"]


def symmetric(chip: Chip) -> Table:
    table: Table = [("batch", "n x k", "full us", "symmetric us", "full / symmetric")]
    for batch, n, k in PRODUCTS:
        full, half = (product_us(chip, n, n, k, batch=batch, symmetric=one) for one in (False, True))
        table.append((str(batch), f"{n:,} x {k:,}", f"{full:,.1f}", f"{half:,.1f}", f"{full / half:.2f}"))
    return table


class _Priced(TorchDispatchMode):
    """Adds up the microseconds of the products that an iteration calls."""

    def __init__(self, chip: Chip):
        super().__init__()
        self.chip, self.microseconds, self.launches = chip, 0.0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().partition("::")[2]
        if name in ("syrk", "gemm"):
            a, b = args[:2]
            batch, m, k = a.shape
            request = {"batch": batch, "m_major_a": a.stride(-1) != 1, "symmetric": name == "syrk"}
            if name == "syrk":
                request |= {"n_major_b": request["m_major_a"], "side_bytes": 2 * (len(args) > 2)}
            else:
                request |= {"n_major_b": b.stride(-1) == 1}
            self.microseconds += product_us(self.chip, m, m if name == "syrk" else b.shape[-1], k, **request)
            self.launches += 1
        return function(*args, **(kwargs or {}))


def iterations(chip: Chip) -> Table:
    """Time of five steps on all matrices of a model, in the form that each shape takes."""
    table: Table = [
        ("model", "matrices", "products", "products ms", "passes ms", "plain form at the rate of cuBLAS ms")
    ]
    for model, shapes in CUDA.items():
        priced = _Priced(chip)
        elements = flops = 0
        for (rows, columns), count in shapes.items():
            steps = newton_schulz.gram_steps if newton_schulz.is_gram(rows, columns) else newton_schulz.symmetric_steps
            with FakeTensorMode(), priced:
                steps(torch.empty(count, rows, columns, dtype=torch.float16), [newton_schulz.KELLER_JORDAN] * 5)
            short, long = sorted((rows, columns))
            elements += count * rows * columns
            flops += count * 10 * short**2 * (2 * long + short)
        passes = elements * PASSES / chip.copy
        times = priced.microseconds / 1e3, passes * 1e3, flops / chip.flops * 1e3
        table.append((model, str(sum(shapes.values())), str(priced.launches), *(f"{time:.2f}" for time in times)))
    return table

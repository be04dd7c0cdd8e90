"""The cost of ``batch_invariant``: its plans compared with the free ones, by the planner's model."""

from __future__ import annotations

from ..harness.tables import Table
from .chips import Chip

BASIS = (
    "PREDICTION for {chip}, from the cost model of csrc/gemm/cost.h: the rate within `ak.batch_invariant()`, as a share of the "
    "free plan's. Columns are rows of the product, for the gradient of a weight tokens. Above 1, loads and stores of C are predicted "
    "to be faster than additions in L2."
)
ROWS = 16, 128, 512, 1024, 2048, 16384
LAYERS = (768, 768), (3072, 768), (768, 3072), (1024, 1024), (4096, 4096), (14336, 4096), (4096, 14336), (50304, 768)
WEIGHT = {"m_major_a": True, "n_major_b": True, "out_bytes": 8}


def share(m: int, n: int, k: int, chip: Chip, chained: bool) -> float:
    """The time of the free plan over that of the fixed order."""
    from amp_kernels import _host

    request = (WEIGHT if chained else {}) | chip.request
    free = _host.plan_gemm(m, n, k, **request)["microseconds"]
    return free / _host.plan_gemm(m, n, k, **request, batch_invariant=True, chained=chained)["microseconds"]


def table(chip: Chip) -> Table:
    rows = [("layer (out x in)", "product", *(f"{count:,}" for count in ROWS))]
    for out, features in LAYERS:
        name = f"{out} x {features}"
        forward = (share(count, out, features, chip, False) for count in ROWS)
        weight = (share(out, features, count, chip, True) for count in ROWS)
        rows.append((name, "forward", *(f"{each:.2f}" for each in forward)))
        rows.append((name, "weight", *(f"{each:.2f}" for each in weight)))
    return rows

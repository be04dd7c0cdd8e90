"""The rate of grouped products compared with that of one dense product of the same rows, by the planner's model."""

from __future__ import annotations

import torch

from ..harness.tables import Table
from ..ops.grouped_mm import ends
from .chips import Chip

BASIS = (
    "PREDICTION for {chip}, from the cost model of csrc/gemm/cost.h: the rate of `ak.grouped_mm` as a share of that of one dense product "
    "with as many flops, which takes its best tile. Groups take tiles of 128 x 128 with pingpong, each SM every 132nd; the one with the "
    "most work is the last. A group's last tile may be half a tile, of 64 rows, and its terms in the gradient of a weight fill whole steps "
    "of 64. Weights of all groups are read, and gradients written, once, on top of the other operands: with few rows each, memory is the "
    "limit. Columns are rows of an average group, whose size is a multiple of 128, or random: cuts at uniform places. "
    "Goals: 0.95 at multiples of 128, 0.80 at random sizes around 256."
)
MISSED = """At 256 rows the goals are missed. The dense product reads one matrix, where groups read one each: OLMoE's are 537 MB, which
take 126 us in addition to 201 us of tiles. No tile changes that. Of random sizes, whose last tiles hold 64 rows or 128, 0.87 to 0.89 of
the arithmetic is used. If all tiles held 128 it would be 0.76 to 0.80, at 0.65 to 0.73 of the dense rate. A tile of 64 rows still takes
0.77 of the time, since it loads three quarters of the bytes."""
TILE, STEP = 128, 64
GROUP_TILE = {"m": TILE, "n": TILE, "cluster_m": 1, "cluster_n": 1, "consumers": 2, "pingpong": True}
WEIGHT = {"m_major_a": True, "n_major_b": True}
LAYERS = {"Mixtral": (4096, 28672, 8), "OLMoE": (2048, 2048, 64), "Qwen3": (2048, 1536, 128)}  # in, out, experts
ROWS = (256, "equal"), (256, "random"), (1024, "equal"), (1024, "random"), (4096, "random")


def sizes(groups: int, mean: int, kind: str) -> list[int]:
    found = ends(groups * mean, groups, kind, torch.Generator().manual_seed(0), torch.device("cpu"))
    return found.diff(prepend=found.new_zeros(1)).tolist()


def units(counts: list[int], unit: int) -> int:
    return sum(-(-count // unit) for count in counts)


def rows_us(counts: list[int], n: int, k: int, chip: Chip) -> float:
    from amp_kernels import _host

    return _host.gemm_sm90_grouped_microseconds(counts, n, k, **chip.request)


def sums_us(counts: list[int], m: int, n: int, chip: Chip) -> float:
    """A batch of products of the mean number of steps: longer groups take longer, and tiles are shared out as they come."""
    from amp_kernels import _host

    terms = round(STEP * units(counts, STEP) / len(counts))
    request = {**WEIGHT, "batch": len(counts), **chip.request}
    return _host.gemm_sm90_microseconds(GROUP_TILE, 1, False, m, n, terms, **request)


def table(chip: Chip) -> Table:
    from amp_kernels import _host

    def dense(m: int, n: int, k: int, **lies: bool) -> float:
        return _host.plan_gemm(m, n, k, **lies, **chip.request)["microseconds"]

    head = (f"{mean:,}{'' if kind == 'equal' else ' random'}" for mean, kind in ROWS)
    rows: Table = [("layer (in x out, experts)", "product", *head)]
    for name, (features, out, groups) in LAYERS.items():
        of_layer = [(sizes(groups, mean, kind), groups * mean) for mean, kind in ROWS]
        shares = {
            "forward": [dense(t, out, features) / rows_us(c, out, features, chip) for c, t in of_layer],
            "input": [dense(t, features, out, n_major_b=True) / rows_us(c, features, out, chip) for c, t in of_layer],
            "weight": [dense(out, features, t, **WEIGHT) / sums_us(c, out, features, chip) for c, t in of_layer],
        }
        for product, found in shares.items():
            label = f"{name} ({features:,} x {out:,}, {groups})"
            rows.append((label, product, *(f"{share:.2f}" for share in found)))
    return rows

"""Problems that together take the GEMM through every tile that its planner chooses on an H200, with and without splits and swap, and
through every way out of a tile, or a part of one, that lies wholly beside the result.

tests/tuning holds the list against the planner. The inner sizes end within a step of 64 and the others within a tile.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GemmCase:
    """``kind``: what happens to the sums. ``m_major_a``: A lies column by column; ``n_major_b``: B lies row by row."""

    kind: str
    m: int
    n: int
    k: int
    m_major_a: bool = False
    n_major_b: bool = False

    def __str__(self):
        layout = ("m" if self.m_major_a else "k") + ("n" if self.n_major_b else "k")
        return f"{self.kind}-{self.m}x{self.n}x{self.k}-{layout}"

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.kind == "swiglu" else self.n

    @property
    def request(self) -> dict:
        """The arguments of ``_host.plan_gemm`` for bf16 operands."""
        sizes = {"m": self.m, "n": self.n, "k": self.k, "m_major_a": self.m_major_a, "n_major_b": self.n_major_b}
        element = 4 if self.kind in ("fp32", "accumulate") else 2
        # TMA's share: rows lie 8 elements further apart than they are long.
        lines = (self.m if self.m_major_a else self.k, self.n if self.n_major_b else self.k)
        tma = {name: line % 8 == 0 for name, line in zip(("tma_a", "tma_b"), lines, strict=True)}
        tma |= {"odd_operands": any(line % 2 for line in lines), "tma_output": self.columns * element % 16 == 0}
        tma |= {"ld_a": lines[0] + 8, "ld_b": lines[1] + 8}
        return sizes | tma | KINDS[self.kind]


#: What the planner is told of the epilogues, other than by default.
KINDS: dict[str, dict] = {
    "plain": {},
    "fp32": {"out_bytes": 4},
    "accumulate": {"out_bytes": 8},
    "gelu": {"activation": "gelu", "keeps_z": True, "side_bytes": 2},
    "swiglu": {"activation": "swiglu", "keeps_z": True, "side_bytes": 2},
    "dact": {"activation": "relu", "backward": True, "column_sums": True, "side_bytes": 2},
}


def edges_of_c(case: GemmCase, plan: dict, tile: dict) -> set[tuple]:
    """The ways in which the plan's last tiles are wholly out of bounds: all columns of a tile, or of a part that is staged at a time,
    or all rows. With the epilogue, and whether TMA could store the result."""
    if plan["kernel"] != "sm90" or plan["swapped"]:
        return set()
    columns = tile["n"] // 2 if case.kind == "swiglu" else tile["n"]
    part = 128 if case.kind == "plain" and tile["n"] % 128 == 0 else 64
    missing = -case.columns % columns
    way = (case.kind, case.request["tma_output"])
    edges = set()
    if tile["cluster_n"] == 2 and -(-case.columns // columns) % 2 and missing >= columns // 2:
        edges.add(("beside", plan["splits"] > 1, *way))
    if case.kind in ("plain", "fp32", "accumulate") and tile["n"] % 64 == 0 and missing >= part:
        edges.add(("part beside", tile["n"], *way))
    if tile["cluster_m"] == 2 and -(-case.m // tile["m"]) % 2:
        edges.add(("below", plan["splits"] > 1, *way))
    return edges


@functools.cache
def small_edges() -> dict[tuple, tuple[GemmCase, int, dict]]:
    """For each such way out of a tile the smallest product that takes it, the number of multiprocessors for which it is planned, and the
    tile: with few of them small products take the tiles of large ones, for the emulator and the PTX interpreter."""
    from amp_kernels import _host

    found: dict[tuple, tuple[GemmCase, int, dict]] = {}
    candidates = _host.gemm_candidates()
    sizes = itertools.product((8, 72, 136), (8, 40, 72, 136, 264, 520), (72, 264, 520))
    layouts = ((), (False, True), (True, True))
    for (m, n, k), odd, kind, layout, sm_count in itertools.product(
        sorted(sizes, key=math.prod), (0, 1), KINDS, layouts, (1, 2, 4)
    ):
        case = GemmCase(kind, m, n if kind == "swiglu" else n + odd, k, *layout)
        plan = _host.plan_gemm(**case.request, sm_count=sm_count)
        tile = candidates[plan["kernel"]][plan["tile"]]
        for edge in edges_of_c(case, plan, tile):
            found.setdefault(edge, (case, sm_count, tile))
    return found


CASES = [
    GemmCase("gelu", 8, 8, 72, False, True),
    GemmCase("gelu", 8, 8, 72, True, True),
    GemmCase("gelu", 8, 8, 4104, True, True),
    GemmCase("plain", 8, 8, 4104, False, True),
    GemmCase("plain", 24, 5128, 4104),
    GemmCase("plain", 8, 8, 4104),
    GemmCase("plain", 8, 8, 4104, True),
    GemmCase("plain", 8, 8, 4104, True, True),
    GemmCase("fp32", 8, 8, 4104),
    GemmCase("swiglu", 8, 8, 4104),
    GemmCase("gelu", 8, 2568, 72, True),
    GemmCase("gelu", 24, 5128, 72),
    GemmCase("gelu", 24, 5128, 1096),
    GemmCase("gelu", 72, 5128, 72),
    GemmCase("plain", 136, 5128, 72),
    GemmCase("swiglu", 5128, 136, 72),
    GemmCase("swiglu", 8, 1544, 4104),
    GemmCase("plain", 264, 5128, 72),
    GemmCase("fp32", 72, 392, 4104),
    GemmCase("gelu", 264, 5128, 1096),
    GemmCase("swiglu", 392, 5128, 72, False, True),
    GemmCase("gelu", 1544, 2568, 72),
    GemmCase("accumulate", 776, 2568, 72),
    GemmCase("accumulate", 2568, 776, 72),
    GemmCase("plain", 392, 5128, 72),
    GemmCase("plain", 5128, 8, 4104, False, True),
    GemmCase("swiglu", 5128, 8, 4104),
    GemmCase("plain", 24, 2568, 4104),
    GemmCase("plain", 1544, 2568, 72),
    GemmCase("swiglu", 72, 5128, 1096, False, True),
    GemmCase("plain", 3080, 3080, 72),
    GemmCase("swiglu", 136, 5128, 4104, False, True),
    GemmCase("plain", 5128, 136, 4104),
    GemmCase("dact", 392, 5128, 4104, False, True),
    GemmCase("plain", 392, 5128, 4104, False, True),
    GemmCase("fp32", 392, 5128, 4104),
    GemmCase("accumulate", 392, 5128, 4104),
    GemmCase("plain", 392, 5129, 4104, False, True),
    GemmCase("fp32", 392, 5129, 4104, False, True),
    GemmCase("accumulate", 392, 5129, 4104, False, True),
    GemmCase("plain", 1, 1, 73),
    GemmCase("plain", 1, 1, 1097),
    GemmCase("plain", 65, 4097, 1097),
    GemmCase("plain", 1025, 1025, 73),
    GemmCase("plain", 1025, 2049, 73),
    GemmCase("plain", 8, 8, 72, True, True),
    GemmCase("plain", 8, 392, 4104, True),
    GemmCase("gelu", 24, 1544, 4104, False, True),
    GemmCase("swiglu", 72, 8, 1096),
    GemmCase("swiglu", 72, 8, 4104),
    GemmCase("swiglu", 1544, 136, 4104),
    GemmCase("plain", 2568, 776, 1096),
    # In phases: odd lines of one operand or both, 4 bytes more than 16, lines that are left over.
    GemmCase("accumulate", 64, 147, 80_003, True, True),
    GemmCase("plain", 777, 72, 40_960, True, True),
    GemmCase("fp32", 41, 395, 8199, True, True),
    GemmCase("plain", 74, 398, 16_390, True, True),
    # Tiles, or parts of them, that lie wholly beside or below the result: an odd number of tiles in a row of clusters of two.
    GemmCase("plain", 1025, 4097, 1097),
    GemmCase("fp32", 392, 392, 4104, False, True),
    GemmCase("fp32", 392, 393, 4104, False, True),
    GemmCase("accumulate", 392, 393, 4104, False, True),
    GemmCase("plain", 776, 3081, 1096),
    GemmCase("dact", 136, 1544, 72),
    GemmCase("gelu", 136, 1545, 72),
    GemmCase("dact", 136, 1545, 72),
    GemmCase("accumulate", 392, 72, 4104),
    GemmCase("fp32", 392, 5128, 72),
    GemmCase("accumulate", 392, 5129, 72),
    GemmCase("plain", 776, 3081, 72),
    GemmCase("fp32", 776, 3081, 72),
    GemmCase("fp32", 1544, 2568, 72),
    GemmCase("accumulate", 1544, 2569, 72),
    GemmCase("gelu", 264, 264, 4104),
    GemmCase("gelu", 3080, 136, 4104),
    GemmCase("dact", 264, 264, 4104),
    GemmCase("plain", 264, 265, 4104),
    GemmCase("accumulate", 5128, 2568, 72),
    GemmCase("fp32", 264, 5128, 1096),
    GemmCase("accumulate", 264, 5128, 1096),
    GemmCase("dact", 264, 5128, 1096),
    GemmCase("accumulate", 392, 5128, 1096),
    GemmCase("fp32", 392, 5129, 1096),
    GemmCase("gelu", 2568, 393, 4104),
    GemmCase("dact", 2568, 393, 4104),
    GemmCase("gelu", 264, 5128, 4104),
    GemmCase("swiglu", 264, 5128, 4104),
    GemmCase("plain", 264, 5129, 4104),
    GemmCase("fp32", 264, 5129, 4104),
    GemmCase("accumulate", 264, 5129, 4104),
    GemmCase("gelu", 264, 5129, 4104),
    GemmCase("dact", 264, 5129, 4104),
    GemmCase("gelu", 392, 5128, 4104, False, True),
    GemmCase("swiglu", 392, 5128, 4104),
    GemmCase("dact", 136, 5128, 72),
    GemmCase("gelu", 136, 5129, 72),
    GemmCase("dact", 136, 5129, 72),
    GemmCase("dact", 264, 5128, 4104),
    GemmCase("swiglu", 1544, 136, 4104),
    GemmCase("plain", 2568, 392, 72),
    GemmCase("fp32", 2568, 392, 72),
    GemmCase("fp32", 2568, 393, 72),
    GemmCase("accumulate", 2568, 393, 72),
    GemmCase("gelu", 5128, 72, 4104),
    GemmCase("dact", 2568, 392, 4104),
    GemmCase("plain", 3080, 136, 4104),
    GemmCase("plain", 3080, 137, 4104),
    GemmCase("dact", 3080, 136, 4104),
    GemmCase("gelu", 2568, 2569, 4104, False, True),
    GemmCase("dact", 2568, 2569, 4104, False, True),
    # Every epilogue in every layout, in one piece and in splits; then where no two elements need be aligned.
    *(
        GemmCase(kind, 264, 400, k, m_major_a, n_major_b)
        for kind in KINDS
        for k in (200, 1096)
        for m_major_a in (False, True)
        for n_major_b in (False, True)
    ),
    *(GemmCase(kind, 131, 262, k, *layout) for kind in KINDS for k in (201, 1097) for layout in ((), (True, True))),
    GemmCase("fp32", 8, 2569, 1096, True, True),
    GemmCase("plain", 392, 5128, 72, True, True),
    GemmCase("fp32", 392, 5128, 72, True),
    GemmCase("accumulate", 392, 5128, 72, True),
    GemmCase("plain", 392, 5129, 72, True, True),
    GemmCase("fp32", 392, 5129, 72, True),
    GemmCase("accumulate", 392, 5129, 72, True),
    GemmCase("gelu", 392, 5129, 72),
    GemmCase("dact", 392, 5129, 72),
    GemmCase("accumulate", 1544, 2568, 72),
    GemmCase("gelu", 72, 1544, 4104, False, True),
    GemmCase("swiglu", 72, 3080, 4104),
    GemmCase("gelu", 5128, 73, 4104),
    GemmCase("dact", 5128, 73, 4104),
    GemmCase("gelu", 136, 5129, 4104),
    GemmCase("dact", 136, 5129, 4104),
    GemmCase("swiglu", 8, 136, 72, True),
    GemmCase("fp32", 392, 2568, 72),
    GemmCase("fp32", 392, 2569, 72),
    GemmCase("accumulate", 392, 2569, 72),
    GemmCase("gelu", 392, 2568, 1096, False, True),
    GemmCase("swiglu", 5128, 136, 4104, True),
    GemmCase("swiglu", 3080, 264, 4104),
]

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


#: Arguments of the planner for the epilogues, other than its defaults.
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


#: Sizes m x n x k by kind and layout: "m" for an A that lies column by column, "n" for a B that lies row by row.
TABLE = [
    ("gelu", "kn", "8x8x72 24x1544x4104"),
    ("gelu", "mn", "8x8x72 8x8x4104"),
    ("plain", "kn", "8x8x4104 5128x8x4104 392x5128x4104 392x5129x4104"),
    ("plain", "kk", "24x5128x4104 8x8x4104 136x5128x72 264x5128x72 392x5128x72 24x2568x4104 1544x2568x72 3080x3080x72 "
     "5128x136x4104 1x1x73 1x1x1097 65x4097x1097 1025x1025x73 1025x2049x73 2568x776x1096"),
    ("plain", "mk", "8x8x4104 8x392x4104"),
    ("plain", "mn", "8x8x4104 8x8x72"),
    ("fp32", "kk", "8x8x4104 72x392x4104 392x5128x4104"),
    ("swiglu", "kk", "8x8x4104 5128x136x72 8x1544x4104 5128x8x4104 72x8x1096 72x8x4104 1544x136x4104"),
    ("gelu", "mk", "8x2568x72"),
    ("gelu", "kk", "24x5128x72 24x5128x1096 72x5128x72 264x5128x1096 1544x2568x72"),
    ("swiglu", "kn", "392x5128x72 72x5128x1096 136x5128x4104"),
    ("accumulate", "kk", "776x2568x72 2568x776x72 392x5128x4104"),
    ("dact", "kn", "392x5128x4104"),
    ("fp32", "kn", "392x5129x4104"),
    ("accumulate", "kn", "392x5129x4104"),
    # In phases: odd lines of one operand or both, 4 bytes more than 16, lines that are left over.
    ("accumulate", "mn", "64x147x80003"),
    ("plain", "mn", "777x72x40960 74x398x16390"),
    ("fp32", "mn", "41x395x8199"),
    # Tiles, or parts of them, that lie wholly beside or below the result: an odd number of tiles in a row of clusters of two.
    ("plain", "kk", "1025x4097x1097 776x3081x1096 776x3081x72 264x265x4104 264x5129x4104 2568x392x72 3080x136x4104 "
     "3080x137x4104"),
    ("fp32", "kn", "392x392x4104 392x393x4104"),
    ("accumulate", "kn", "392x393x4104"),
    ("dact", "kk", "136x1544x72 136x1545x72 264x264x4104 264x5128x1096 2568x393x4104 264x5129x4104 136x5128x72 "
     "136x5129x72 264x5128x4104 2568x392x4104 3080x136x4104"),
    ("gelu", "kk", "136x1545x72 264x264x4104 3080x136x4104 2568x393x4104 264x5128x4104 264x5129x4104 136x5129x72 "
     "5128x72x4104"),
    ("accumulate", "kk", "392x72x4104 392x5129x72 1544x2569x72 5128x2568x72 264x5128x1096 392x5128x1096 264x5129x4104 "
     "2568x393x72"),
    ("fp32", "kk", "392x5128x72 776x3081x72 1544x2568x72 264x5128x1096 392x5129x1096 264x5129x4104 2568x392x72 "
     "2568x393x72"),
    ("swiglu", "kk", "264x5128x4104 392x5128x4104"),
    ("gelu", "kn", "392x5128x4104 2568x2569x4104"),
    ("dact", "kn", "2568x2569x4104"),
    ("fp32", "mn", "8x2569x1096"),
    ("plain", "mn", "392x5128x72 392x5129x72"),
    ("fp32", "mk", "392x5128x72 392x5129x72"),
    ("accumulate", "mk", "392x5128x72 392x5129x72"),
    ("gelu", "kk", "392x5129x72 5128x73x4104 136x5129x4104"),
    ("dact", "kk", "392x5129x72 5128x73x4104 136x5129x4104"),
    ("accumulate", "kk", "1544x2568x72 392x2569x72"),
    ("gelu", "kn", "72x1544x4104 392x2568x1096"),
    ("swiglu", "kk", "72x3080x4104 3080x264x4104"),
    ("swiglu", "mk", "8x136x72 5128x136x4104"),
    ("fp32", "kk", "392x2568x72 392x2569x72"),
    # Plans for rows across lines of L2, as all that lie 8 elements further apart than they are long.
    ("plain", "kn", "2568x136x4104"),
    ("plain", "kk", "136x5128x4104 136x5129x4104"),
    ("fp32", "kk", "136x5128x4104 136x5129x4104"),
    ("accumulate", "kk", "136x5128x4104 136x5129x4104 1544x72x4104"),
    ("gelu", "kk", "136x5128x4104"),
    ("dact", "kk", "136x5128x4104"),
    ("dact", "mk", "136x5128x4104"),
]  # fmt: skip
LAYOUTS = tuple(itertools.product((False, True), repeat=2))

CASES = [
    *(
        GemmCase(kind, *map(int, size.split("x")), layout[0] == "m", layout[1] == "n")
        for kind, layout, sizes in TABLE
        for size in sizes.split()
    ),
    # Every epilogue in every layout, in one piece and in splits; then where no two elements need be aligned.
    *(GemmCase(kind, 264, 400, k, *layout) for kind in KINDS for k in (200, 1096) for layout in LAYOUTS),
    *(GemmCase(kind, 131, 262, k, *layout) for kind in KINDS for k in (201, 1097) for layout in LAYOUTS[::3]),
]

# Symmetric products, batch x n x n with k = 72, that together take every tile; and whether the operands lie by columns.
SYMMETRIC = [
    *((batch, n, False) for batch, n in ((1, 72), (13, 264), (9, 392), (9, 520), (9, 648), (13, 1032))),
    *((batch, n, True) for batch, n in ((1, 136), (9, 392))),
]

"""Problems that together take the GEMM through every tile that its planner chooses on an H200, with and without splits and swap.

tests/tuning holds the list against the planner. The inner sizes end within a step of 64 and the others within a tile.
"""

from __future__ import annotations

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
        """Of the result."""
        return self.n // 2 if self.kind == "swiglu" else self.n

    @property
    def aligned(self) -> bool:
        """Whether TMA can read both operands, whose rows lie 8 elements further apart than they are long."""
        lines = (self.m if self.m_major_a else self.k, self.n if self.n_major_b else self.k)
        return all(line % 8 == 0 for line in lines)

    @property
    def request(self) -> dict:
        """The arguments of ``_host.plan_gemm`` for bf16 operands."""
        sizes = {"m": self.m, "n": self.n, "k": self.k, "m_major_a": self.m_major_a, "n_major_b": self.n_major_b}
        element = 4 if self.kind in ("fp32", "accumulate") else 2
        output = {"tma_output": self.columns * element % 16 == 0}
        if not self.aligned:
            output |= {"tma_operands": False, "odd_operands": True}
        return sizes | output | KINDS[self.kind]


#: What the planner is told of the epilogues, other than by default.
KINDS: dict[str, dict] = {
    "plain": {},
    "fp32": {"out_bytes": 4},
    "accumulate": {"out_bytes": 8},
    "gelu": {"activation": "gelu", "side_bytes": 2},
    "swiglu": {"activation": "swiglu", "side_bytes": 2},
    "dact": {"activation": "relu", "backward": True, "column_sums": True, "side_bytes": 2},
}

CASES = [
    GemmCase("gelu", 8, 8, 72, False, True),
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
    GemmCase("plain", 1, 1, 73),
    GemmCase("plain", 1, 1, 1097),
    GemmCase("plain", 65, 4097, 1097),
    GemmCase("plain", 1025, 1025, 73),
    GemmCase("plain", 1025, 2049, 73),
    # Every epilogue in every layout, in one piece and in splits; then where no two elements need be aligned.
    *(
        GemmCase(kind, 264, 400, k, m_major_a, n_major_b)
        for kind in KINDS
        for k in (200, 1096)
        for m_major_a in (False, True)
        for n_major_b in (False, True)
    ),
    *(GemmCase(kind, 131, 262, k, *layout) for kind in KINDS for k in (201, 1097) for layout in ((), (True, True))),
]

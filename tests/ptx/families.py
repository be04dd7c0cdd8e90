"""Which kernels' PTX is changed, for which architecture, and the cases that must notice (runs_of() in mutant_runs.py)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    kernel: str  # a regular expression
    cases: str | Sequence[str]
    capability: int


FAMILIES = {
    "gemm_sm90": Family("gemm_sm90_kernel", "sm90", 90),
    "gemm_sm90_narrow": Family(r"gemm_sm90_kernel.*MajorE\dELS3_1ELb0ENS0_4TileILi64ELi(16|32)E", "narrow", 90),
    "gemm_grouped": Family("gemm_sm90_kernel.*GroupingE[12]", ("grouped_gemm", "grouped_gemm_accumulate_"), 90),
    "syrk": Family("gemm_sm90_kernel", "symmetric", 90),
    "gemm_sm80": Family("gemm_sm80_kernel", "sm80", 80),
    "gemm_phases": Family("gemm_add_phases_kernel", "phased", 90),
    "gemm_repack": Family("gemm_repack_kernel", "repacked", 90),
    "norm": Family("norm_(forward|backward)_(ring_)?kernel", ("norm_forward", "norm_backward"), 80),
    "norm_cluster": Family("norm_backward_ring_kernelINS_7RowTeamILi8ELi16ELi4E", "shared rows", 90),
    "rows": Family("cross_entropy_rows", ("cross_entropy_rows_",), 80),
    "column_sums": Family("column_sums", ("column_sums",), 80),
    "rotary": Family("rotary_(turn|gradient)_kernel", ("rotary_forward", "rotary_backward"), 80),
    "embedding": Family(r"embedding_\w+_kernel", ("embedding_accumulate_",), 80),
    "check_and_norm": Family("check_and_norm_kernel", ("check_and_norm",), 80),
    "units": Family("judge_units_kernel", ("judge_units_",), 80),
    "histogram": Family("exponent_histogram_kernel", ("exponent_histogram",), 80),
    "lists": Family(
        r"(unscale|cast|activation_\w+|swiglu_\w+)_kernel",
        ("unscale_", "cast_", "activation_backward", "activation_forward"),
        80,
    ),
    "update": Family("update_kernel", ("adamw_", "lion_", "sgd_", "lamb_"), 80),
    "update8": Family("update8_kernel", ("adamw_", "lion_"), 80),
    "lamb": Family("lamb_(moments|rates)_kernel", ("lamb_",), 80),
    "update_scale": Family("update_scale_kernel", ("update_scale_",), 80),
}

# Changes of an operator that no case can notice, by family and title, and why.
CHANGE_NOTHING = {
    ("column_sums", "setp.lt.s64: other comparison"): "a round more, of rows out of bounds, and the smaller of two equal numbers",
}  # fmt: skip

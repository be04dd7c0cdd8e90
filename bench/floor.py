"""The least time of each case on a chip that is not here: its bytes and multiply-adds at the rates of the vendor's data sheet.

This is arithmetic: no kernel reaches all of a data sheet's rates, and no time here was measured.
"""

from collections.abc import Iterable

from .harness.case import Case
from .harness.roofline import Roofline
from .harness.tables import Table, align


def _chip(gb_per_s: float, tflops_16: float, tflops_fp32: float) -> Roofline:
    bandwidth, narrow = gb_per_s * 1e9, tflops_16 * 1e12
    return Roofline(bandwidth, bandwidth, {"bf16": narrow, "fp16": narrow, "fp32": tflops_fp32 * 1e12})


# Memory in GB/s, then TFLOP/s: 16-bit products with FP32 sums on Tensor Cores without sparsity, and FP32 without Tensor Cores.
# From NVIDIA's data sheets of the A100 80GB, H100, H200, L4 and L40S, and its white papers of the Ada and RTX Blackwell architectures.
CHIPS = {
    "A100": _chip(2039, 312, 19.5),  # SXM, 80 GB
    "H100": _chip(3350, 989.5, 67),  # SXM
    "H200": _chip(4800, 989.5, 67),
    "L4": _chip(300, 121, 30.3),
    "L40S": _chip(864, 362, 91.6),
    "RTX4090": _chip(1008, 165.2, 82.6),
    "RTX5090": _chip(1792, 209.5, 104.8),
}


def table(cases: Iterable[Case], chip: str) -> Table:
    """One line for each case: its bytes and flops, the least microseconds, and which of the two takes them."""
    lines: Table = [("op", "case", "dtype", "MB", "GFLOP", "floor us", "bound by")]
    for case in cases:
        memory, both = (1e6 * CHIPS[chip].floor_seconds(case.bytes, flops, case.dtype) for flops in (0, case.flops))
        bound = "memory" if memory == both else "arithmetic"
        size = f"{case.bytes / 1e6:,.1f}", f"{case.flops / 1e9:,.1f}"
        lines.append((case.op, case.shape, case.dtype, *size, f"{both:,.2f}", bound))
    return lines


def text(cases: Iterable[Case], chip: str) -> str:
    rates = ", ".join(
        f"{name} {value:,.4g}" for name, value in CHIPS[chip].record().items() if name != "two_reads_gb_per_s"
    )
    return f"{chip} by its data sheet, not measured: {rates}\n\n{align(table(cases, chip), left=3)}"

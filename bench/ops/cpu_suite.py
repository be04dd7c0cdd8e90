"""The suite ``cpu``: what a CPU is to reach against torch, in one interleaved run of two minutes.

``python -m amp_kernels bench --suite cpu``. Read the ratio to torch first, the median of those within a round, with its
spread; then the share of the roofline, whose two ceilings are measured in the same run. On a machine that does other
work the ratios hold and the times do not.
"""

from collections.abc import Iterator

from ..harness.case import Case, Scope
from . import adamw, gradients, layouts, linear, lists, loss

SMALL: linear.Size = (4, 16, 16)
SIZES: tuple[linear.Size, ...] = ((512, 512, 512), (1024, 1024, 1024), (2048, 3072, 768))
LARGE = {"64 M": [(8192, 8192)]}  # far beyond any cache


def cases(scope: Scope) -> Iterator[Case]:
    device = scope.device
    for size in SIZES[: 1 if scope.quick else None]:
        for dtype in ("bf16", "fp16", "fp32"):
            yield linear.plain(size, dtype, device, goal=0.95, families=("linear, forward",))
    yield linear.activated("gelu", True, (64, 96, 64) if scope.quick else (1024, 3072, 768), device, goal=1.1)
    yield linear.layer(False, SMALL, device, goal=1 / 1.5)
    yield linear.layer(True, SMALL, device, goal=1 / 1.3)
    for backward in (False, True):
        yield loss.log_probs_case(
            *((32, 16, 501) if scope.quick else (512, 1024, 32000)), backward, device, goal=1 / 1.1
        )
    fp32 = layouts.LAYOUTS[0]
    for count, goal in ((161, 9.0), (100 if scope.quick else 10_000, 11.0)):
        yield adamw.step_case(f"{count} x 64", lists.many(count), fp32, device, sets=1, goal=goal)
    for name, shapes in ({"0.3 M": [(512, 512)]} if scope.quick else LARGE).items():
        yield adamw.step_case(name, shapes, fp32, device, by_rows=True, goal=1.5)
        yield adamw.update_case(name, shapes, fp32, device)
        yield gradients.norm_of_list(name, shapes, "fp32", {}, device)

"""The suite of ``--peers``: every library in one table, at the shapes that its users have.

On a CPU the lists are small and torch.compile runs next to the libraries that have CPU kernels.
"""

from collections.abc import Iterator

from ..harness.case import Case, Scope
from . import adamw, linear, lists, loss, muon_step, norm
from .layouts import EIGHT_BIT, LAYOUTS

FP32, _, MASTER, SPLIT, SMALL, *_ = LAYOUTS
LARGE = {"16 M": [(4096, 4096)]}  # beyond a CPU's caches; Muon's products of it take a minute


def cases(scope: Scope) -> Iterator[Case]:
    yield from _steps(scope)
    device = scope.device
    for kind in ("layer_norm", "rms_norm"):
        yield norm.case(kind, *scope.pick((16384, 4096), (2048, 768), (64, 96)), "bf16", True, device, compiles=True)
    yield loss.rows_case(*scope.pick((8192, 50257), (256, 50257), (16, 1001)), "bf16", device, compiles=True)
    yield loss.head_case(*scope.pick((16384, 768, 50257), (256, 256, 50257), (32, 16, 501)), device, compiles=True)
    size = scope.pick((32768, 3072, 768), (1024, 3072, 768), (64, 96, 64))
    for backward in (False, True):
        yield linear.activated("gelu", backward, size, device, compiles=True)
    yield linear.mlp_case(
        "gelu", *scope.pick((32768, 768, 3072), (512, 256, 1024), (64, 48, 96)), device, compiles=True
    )
    yield linear.mlp_case(
        "swiglu", *scope.pick((16384, 2048, 8192), (512, 256, 1024), (64, 48, 96)), device, compiles=True
    )


def _steps(scope: Scope) -> Iterator[Case]:
    on_gpu = scope.device.type == "cuda"
    chosen = lists.chosen(scope) if on_gpu or scope.quick else {"tiny": lists.tiny()} | LARGE
    for name, shapes in chosen.items():
        for layout in (FP32, EIGHT_BIT, *((MASTER, SPLIT) if on_gpu else ()), SMALL):
            compiles = layout is FP32 and len(shapes) <= 200
            by_rows = name in LARGE  # torch's norm of such a tensor is wrong on a CPU
            yield adamw.step_case(
                name, shapes, layout, scope.device, with_peers=True, compiles=compiles, by_rows=by_rows
            )
        if any(map(muon_step.is_matrix, shapes)) and name not in LARGE:
            yield muon_step.case(name, shapes, scope.device)

"""Fits the rates of the GEMM planner's model (csrc/gemm/cost.h) to times of products on one GPU."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from types import ModuleType

from .._dispatch import load, profile
from .._dispatch.product_call import ProductCall

LEAST_PRODUCTS = 6  # for three rates
LEAST_US = 50  # below, the host and launches decide
GAIN = 0.9  # of the RMS error before, that a fit must get below


def planner() -> ModuleType | None:
    """The module ``_host``, if it was built."""
    if load.build_info().get("libraries", {}).get("host", {}).get("built") is not True:
        return None
    return importlib.import_module(f"{load.PACKAGE.name}._host")


def fitted(times: Mapping[ProductCall, float], sm_count: int, capability: int) -> dict[str, float]:
    """The rates with which the model predicts microseconds of plain products by the CUDA kernels best; ``{}`` if there are too few of
    them, the package has no ``_host``, or the model is as good without."""
    requests = {call: call.request() for call, us in times.items() if us >= LEAST_US and _is_plain(call)}
    host = planner()
    if len(requests) < LEAST_PRODUCTS or host is None:
        return {}

    def error(rates: dict[str, float]) -> float:
        squares = [
            math.log(
                times[call]
                / host.plan_gemm(**request, sm_count=sm_count, capability=capability, **rates)["microseconds"]
            )
            ** 2
            for call, request in requests.items()
        ]
        return math.sqrt(sum(squares) / len(squares))

    start = {name: host.gemm_rates()[name] for name in profile.RATES}
    best, least = start, error(start)
    for factor in (1.2, 1.05, 1.02, 1.005):  # coordinate descent: steps get finer where none helps
        improved = True
        while improved:
            improved = False
            for name in profile.RATES:
                for scaled in (best[name] * factor, best[name] / factor):
                    tried = best | {name: scaled}
                    if 0.2 < scaled / start[name] < 5 and (reached := error(tried)) < least - 1e-9:
                        best, least, improved = tried, reached, True
    return best if least < GAIN * error(start) else {}


def _is_plain(call: ProductCall) -> bool:
    aligned = all(size % 8 == 0 for size in (call.m, call.n, call.k))
    return aligned and call.activation == "none" and not (call.bias or call.residual or call.preact)

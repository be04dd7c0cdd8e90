"""``python -m amp_kernels tune``: times the products of a model on this GPU with each backend and with tiles of the CUDA kernels, and
writes the profile by which policy and planner choose (amp_kernels/_dispatch/profile.py)."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .._dispatch import load, policy, profile
from .._dispatch.library import REGISTRY
from .._dispatch.product_call import FIELDS, ProductCall
from . import _function

ROUNDS = 9
SAMPLE_US = 4000  # of a backend in a round
# Plans that are timed: so many of those that the model predicts within this factor of the fastest.
PLANS, WITHIN = 8, 1.25
#: Paired samples in microseconds, by backend, of calls by backend.
Timer = Callable[[dict[str, Callable[[], Any]]], dict[str, list[float]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help=f"JSON list of products, each with m, n, k and any of: {', '.join(FIELDS[3:])}",
    )
    source.add_argument(
        "--model",
        type=_function.load,
        metavar="MODULE:FUNCTION",
        help="a function without arguments that runs one training step of a model on the GPU",
    )


def run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("error: tune needs a CUDA GPU: there is nothing to time", file=sys.stderr)
        return 2
    try:
        calls = products(options.shapes, options.model)
    except (OSError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_properties(device)
    chip = {
        "sm_count": gpu.multi_processor_count,
        "capability": 10 * gpu.major + gpu.minor,
        "gpu": gpu.name,
    }
    found = tuned(calls, profile.machine(None), device, timed, chip)
    for call in map(str, calls):
        times = ", ".join(f"{name} {us:.1f}" for name, us in found.times.get(call, {}).items())
        chosen = [found.winners[call]] if call in found.winners else ["another tile"] if call in found.plans else []
        print(f"{call}: {times} us" + "".join(f"; {name} from now on" for name in chosen))
    print(f"wrote {found.save()}; it holds for processes that start from now on")
    return 0


def products(shapes: Path | None, model: Callable[[], Any] | None) -> list[ProductCall]:
    """The products of a file or of a step of a model, or those of two widths of transformers.

    Raises:
        ValueError, TypeError: the file is no such list; a value is not accepted; the step has no products.
    """
    if shapes is not None:
        rows = json.loads(shapes.read_text())
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{shapes}: a list of objects with m, n and k is needed")
        for row in rows:
            if unknown := set(row) - set(FIELDS):
                raise ValueError(f"{shapes}: {sorted(unknown)} are no fields; accepted: {', '.join(FIELDS)}")
        return [ProductCall(**row) for row in rows]
    if model is not None:
        with policy.recorded_products() as found:
            model()
        if not found:
            raise ValueError("the function ran no matrix product of this package")
        return list(found)
    return [
        call
        for rows, width in ((8192, 768), (8192, 4096))
        for n, k in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        for call in (
            ProductCall(rows, n, k, bias=True),
            ProductCall(rows, k, n, layout="NN"),
            ProductCall(n, k, rows, layout="TN", out="fp32"),
        )
    ]


def tuned(
    calls: list[ProductCall],
    machine: dict[str, str],
    device: torch.device,
    timer: Timer,
    chip: dict[str, Any] | None = None,
) -> profile.Profile:
    """The machine's profile with these products decided again. A backend that fails for a product is left out of it. ``chip``: the GPU
    as the planner knows it; without one no plans are tried."""
    found = profile.read(machine)
    for number, call in enumerate(calls, start=1):
        print(f"{number} of {len(calls)}: {call}", flush=True)
        op = REGISTRY[call.op]
        excluded = policy.why_not(device.type, policy.capability_of(device.type, device.index), op.built)
        args, kwargs = call.arguments(device)
        candidates = {}
        for name in profile.BACKENDS:
            if name not in excluded and (candidate := _working(op, name, args, kwargs)):
                candidates[name] = candidate
        plans = plans_of(call, chip) if chip is not None and profile.PLANNED in candidates else {}
        with _Plans(call, device) as planned:
            if plans:
                run = candidates[profile.PLANNED]
                candidates |= {name: planned.by(plan, run) for name, plan in {profile.PLANNED: [], **plans}.items()}
            if candidates:
                found.add(call, policy.choice_on(op, device).backend, timer(candidates), plans)
    return found


def planner() -> ModuleType | None:
    """The module ``_host``, if it was built."""
    if load.build_info().get("libraries", {}).get("host", {}).get("built") is not True:
        return None
    return importlib.import_module(f"{load.PACKAGE.name}._host")


def plans_of(call: ProductCall, chip: dict[str, Any]) -> dict[str, list[int]]:
    """Plans for a product by name, in addition to the planner's own: the fastest by its model. None for operands that are copied first."""
    host = planner()
    if host is None:
        return {}
    own, tiles = host.plan_gemm(**call.request(), **chip), host.gemm_candidates()
    found = [plan for plan in host.gemm_plans(**call.request(), **chip) if not (plan["repacked"] or plan["in_phases"])]
    found.sort(key=lambda plan: plan["microseconds"])
    near = [plan for plan in found if plan["microseconds"] < WITHIN * found[0]["microseconds"] and plan != own][:PLANS]
    return {_name(plan, tiles): _numbers(plan) for plan in near}


def _numbers(plan: dict[str, Any]) -> list[int]:
    return [("none", "sm80", "sm90").index(plan["kernel"]), plan["tile"], plan["splits"], int(plan["swapped"])]


def _name(plan: dict[str, Any], tiles: dict[str, Any]) -> str:
    tile = tiles[plan["kernel"]][plan["tile"]]
    text = f"{plan['kernel']} {tile['m']}x{tile['n']}"
    if plan["kernel"] == "sm90":
        text += f" cluster {tile['cluster_m']}x{tile['cluster_n']}" + " pingpong" * tile["pingpong"]
    return text + f" {plan['splits']} splits" * (plan["splits"] > 1) + " swapped" * plan["swapped"]


class _Plans:
    """Calls of one product by several plans; the planner decides again when the block ends."""

    def __init__(self, call: ProductCall, device: torch.device):
        self._call, self._on = call, torch.empty(0, device=device)
        self._current: list[int] = []

    def by(self, plan: list[int], run: Callable[[], Any]) -> Callable[[], Any]:
        def planned() -> None:
            self._set(plan)
            run()

        return planned

    def _set(self, plan: list[int]) -> None:
        if plan != self._current:
            with policy.backend(profile.PLANNED):
                policy.set_plan(self._on, self._call, plan)
            self._current = plan

    def __enter__(self) -> _Plans:
        return self

    def __exit__(self, *exception: object) -> None:
        self._set([])


def _working(op: Any, backend: str, args: tuple, kwargs: dict) -> Callable[[], Any] | None:
    def call() -> None:
        with policy.backend(backend):
            op(*args, **kwargs)

    try:
        call()
        return call
    except RuntimeError as error:
        print(f"{backend} is left out: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def timed(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Times on the GPU, back to back as a training step makes them, in rounds of all backends."""
    repeats = {name: max(1, int(SAMPLE_US / _sample(call, 5))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append(_sample(call, repeats[name]))
    return samples


def _sample(call: Callable[[], Any], repeats: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return max(begin.elapsed_time(end) * 1e3 / repeats, 1e-3)

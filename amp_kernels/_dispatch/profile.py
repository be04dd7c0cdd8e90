"""Profiles: what ``python -m amp_kernels tune`` measured on a GPU, by which the policy may prefer another backend for a product.

A profile is a JSON file in the cache folder, one for each kind of GPU. It holds for the GPU, driver, torch and version of the
package that it was measured with; any other is ignored, with a warning.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from .._version import __version__
from .files import replacing
from .product_call import ProductCall

logger = logging.getLogger("amp_kernels")

MARGIN = 1.02  # by which a backend must be faster than the policy's choice
BACKENDS = ("cuda", "aten")
PLANNED = "cuda"  # the backend whose tiles a profile may choose
TUNE = "python -m amp_kernels tune"


@dataclass
class Profile:
    """``times``: microseconds by product and backend. ``winners``: the backend of a product that does not go where the policy sends
    others. ``plans``: a product of the CUDA kernels whose plan is not the planner's, and the plan, the numbers of GemmChoice
    (csrc/gemm/plan.h): kernel, tile, splits, swapped."""

    machine: dict[str, str]
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    winners: dict[str, str] = field(default_factory=dict)
    plans: dict[str, tuple[ProductCall, list[int]]] = field(default_factory=dict)

    def add(
        self,
        call: ProductCall,
        default: str,
        samples: dict[str, list[float]],
        plans: Mapping[str, list[int]] | None = None,
    ) -> None:
        """Decide a product by paired samples: in round i, ``samples[backend][i]`` microseconds. ``plans``: those of the CUDA kernels
        that have samples by these names, in addition to the planner's."""
        name, plans = str(call), plans or {}
        self.times[name] = {each: _median(times) for each, times in samples.items()}
        self.winners.pop(name, None)
        self.plans.pop(name, None)
        backends = {each: times for each, times in samples.items() if each not in plans}
        if plans and (best := _faster(samples, PLANNED, plans)) != PLANNED:
            self.plans[name] = call, plans[best]
            backends[PLANNED] = samples[best]
        if default in backends and (best := _faster(backends, default, backends)) != default:
            self.winners[name] = best

    def save(self) -> Path:
        """Replaces the file of this kind of GPU."""
        path = path_of(self.machine["gpu"])
        with replacing(path) as file:
            file.write(json.dumps(asdict(self), indent=1).encode())
        return path


def _faster(samples: dict[str, list[float]], usual: str, others: Iterable[str]) -> str:
    """The fastest of the others, if it is ahead of ``usual`` by more than the margin; else ``usual``."""
    best = min(others, key=lambda name: _median(samples[name]))
    ratios = [own / other for own, other in zip(samples[usual], samples[best], strict=True)]
    return best if _median(ratios) > MARGIN else usual


def _is_plan(plan: object) -> bool:
    numbers = isinstance(plan, list) and len(plan) == 4 and all(type(n) is int and 0 <= n < 2**31 for n in plan)
    return numbers and plan[0] in (1, 2) and plan[2] > 0


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def driver_version() -> str:
    """The newest CUDA version that the driver runs, such as "13000"; "none" without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return "none"
    return str(version.value)


def machine(index: int | None) -> dict[str, str]:
    """The machine and versions that a profile is for."""
    return {
        "gpu": torch.cuda.get_device_name(index),
        "driver": driver_version(),
        "torch": torch.__version__,
        "amp_kernels": __version__,
    }


def path_of(gpu: str) -> Path:
    """The file for a kind of GPU, in ``$XDG_CACHE_HOME/amp_kernels`` or ``~/.cache/amp_kernels``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "amp_kernels" / f"{'-'.join(gpu.lower().split())}.json"


def read(here: dict[str, str]) -> Profile:
    """The profile of a machine; an empty one if there is none, or with a warning if the file is damaged or another machine's."""
    path = path_of(here["gpu"])
    try:
        found = json.loads(path.read_text())
        for name, value in here.items():
            if found["machine"][name] != value:
                raise ValueError(f"it was measured with {name} {found['machine'][name]}, this is {value}")
        plans = {name: (ProductCall(**call), plan) for name, (call, plan) in found["plans"].items()}
        # Older ones also name Triton, which is no choice any more, and rates of the planner's model.
        winners = {name: winner for name, winner in found["winners"].items() if winner != "triton"}
        profile = Profile(here, dict(found["times"]), winners, plans)
        if unknown := set(profile.winners.values()) - set(BACKENDS):
            raise ValueError(f"it names the backends {sorted(map(str, unknown))}")
        if wrong := [plan for _, plan in plans.values() if not _is_plan(plan)]:
            raise ValueError(f"it names the plans {wrong}")
        return profile
    except FileNotFoundError:
        return Profile(here)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the profile %s is ignored: %s; %s replaces it", path, error, TUNE)
        return Profile(here)


@functools.cache
def of_device(index: int | None) -> Profile:
    """The profile of a CUDA device; read once."""
    return read(machine(index))

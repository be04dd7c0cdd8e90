"""``python -m amp_kernels info``: versions, built libraries, and the backend of each op with the reason."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import textwrap

import torch

from .._dispatch import load, policy, profile
from .._dispatch.library import REGISTRY
from .._version import __version__
from .check import available_backends, check_backend


def devices() -> list[str]:
    """Device types that ops can run on here."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def run(brief: bool = False, check: bool = False) -> int:
    """Print the report; with ``check``, compare every op on every available backend with the reference. Returns the exit status."""
    requested = policy.requested_backend()
    if requested not in (None, *policy.BACKENDS):
        print(f"AMP_KERNELS_BACKEND is {requested!r}; accepted: {', '.join(policy.BACKENDS)}", file=sys.stderr)
        return 2
    print(_libraries() if brief else "\n".join([_versions(), "", _libraries(), "", _ops()]))
    return _check() if check else 0


def _versions() -> str:
    triton = importlib.metadata.version("triton") if load.has_triton() else "not installed"
    lines = [
        ("amp_kernels", __version__),
        ("python", f"{platform.python_version()} ({sys.platform} {platform.machine()})"),
        ("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"),
        ("triton", triton),
    ]
    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        gpu = torch.cuda.get_device_properties(index)
        size = f"{gpu.total_memory / 2**30:.0f} GiB"
        lines.append((f"gpu {index}", f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {size}"))
        lines.append((f"profile {index}", _profile(index)))
    if not torch.cuda.is_available():
        lines.append(("gpu", "none visible"))
    return _aligned(lines)


def _aligned(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<18}{value}" for name, value in lines)


def _profile(index: int) -> str:
    found = profile.read(profile.machine(index))
    if not found.times:
        return f"none ({profile.TUNE})"
    others = ", ".join(f"{call}: {winner}" for call, winner in found.winners.items())
    return (
        f"{profile.path_of(found.machine['gpu'])}, {len(found.times)} products, {len(found.plans)} with another tile; not the automatic "
        f"backend: {others or 'none'}"
    )


def _libraries() -> str:
    info = load.build_info()
    lines = []
    for name, entry in info.get("libraries", {}).items():
        state = "built" if entry["built"] else f"not built: {entry['reason']}"
        if entry["built"] and name in load.absent():
            state = f"built, not loaded: {load.absent()[name]}"
        if entry["built"] and name == "cuda":
            state += f" with nvcc {info.get('nvcc')} for {', '.join(load.cuda_archs())}"
        lines.append((f"library {name}", state))
    return _aligned(lines or [("library", f"none: {load.build_reason('cpu')}")])


def _ops() -> str:
    composite = sorted(name for name, op in REGISTRY.items() if op.composite)
    rows = [("kernel", "backends", "chosen", "why")]
    for name, op in sorted(REGISTRY.items()):
        if op.composite:
            continue
        built = op.built
        exists = [b for b in ("cpu", "cuda", "triton", "aten", "emulate") if getattr(built, b)] + ["reference"]
        for i, device in enumerate(devices()):
            try:
                choice = policy.choice_on(op, torch.device(device), policy.requested_backend())
                chosen, reason = choice.backend, choice.reason
            except policy.BackendUnavailable:
                requested = policy.requested_backend()
                chosen = "none"
                excluded = policy.why_not(device, policy.capability_of(device), built)
                reason = f"{requested} was asked for: {excluded[requested]}"
            rows.append((name if i == 0 else "", " ".join(exists) if i == 0 else "", f"{device}: {chosen}", reason))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    table = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row[:3], widths, strict=True)), row[3]]).rstrip() for row in rows
    ]
    public = textwrap.wrap(", ".join(composite), 100, initial_indent=" " * 18, subsequent_indent=" " * 18)
    return "\n".join([f"{'differentiable':<18}" + public[0].lstrip(), *public[1:], "", *table])


def _check() -> int:
    failures, width = 0, max(map(len, REGISTRY))
    print()
    for name, op in sorted(REGISTRY.items()):
        for device in devices():
            for backend in available_backends(op, device):
                try:
                    print(f"check {name:{width}} {device:5} {backend:9} ok, {check_backend(op, backend, device)} cases")
                except Exception as error:
                    failures += 1
                    print(f"check {name:{width}} {device:5} {backend:9} FAILED: {error}")
    print("all backends agree with the reference" if not failures else f"{failures} backends FAILED")
    return min(failures, 1)

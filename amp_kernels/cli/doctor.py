"""``python -m amp_kernels doctor``: which 16-bit format this machine should train in, whether it needs loss scaling, and why."""

from __future__ import annotations

import torch

from .. import amp
from .._dispatch import cpu_isa, load


def run() -> int:
    """Print one verdict per device. Returns the exit status, always 0: every device can train in some format."""
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else ["cpu"]
    for name in names:
        advice = amp.advise(name)
        print(f"{name}: {advice.device_name}")
        print(f"  dtype         {str(advice.dtype).removeprefix('torch.')}")
        print(f"  loss scaling  {'needed' if advice.needs_scaler else 'not needed'}")
        print(f"  why           {advice.reason}")
        if name == "cpu":
            others = ", ".join(isa for isa in cpu_isa.available() if isa != cpu_isa.chosen())
            print(f"  products      {cpu_isa.chosen()} (AMP_KERNELS_CPU_ISA may name {others})")
        for warning in advice.warnings:
            print(f"  warning       {warning}")
    if "cuda" in load.absent():
        print(f"note: no CUDA kernels are loaded: {load.absent()['cuda']}")
    if "nodes" in load.absent():
        print(f"note: small layers on the CPU wait for Python: {load.absent()['nodes']}")
    return 0

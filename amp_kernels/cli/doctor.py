"""``python -m amp_kernels doctor``: which 16-bit format this machine should train in, whether it needs loss scaling, and why."""

from __future__ import annotations

import torch

from .. import amp
from .._dispatch import cpu_isa, load

_WIDENED = "no 16-bit arithmetic: fp16 and bf16 are widened, at the rate of fp32; they save memory, not time"
#: What the instructions of a CPU mean for the choice of a dtype.
INSTRUCTIONS = {
    "portable": "torch's fp32 products of widened operands, whose bits no instruction of this machine changes",
    "avx2": _WIDENED,
    "avx512": _WIDENED,
    "avx512_bf16": "bf16 in pairs (vdpbf16ps), twice the rate of fp32; fp16 is widened, at the rate of fp32: choose bf16",
    "amx": "bf16 in tiles (tdpbf16ps), many times the rate of fp32; fp16 is widened, at the rate of fp32: choose bf16",
    "amx_emulated": "the instructions of amx in plain C++, for tests: slow",
}


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
            print(f"  16-bit        {INSTRUCTIONS[cpu_isa.chosen()]}")
        for warning in advice.warnings:
            print(f"  warning       {warning}")
    if "cuda" in load.absent():
        print(f"note: no CUDA kernels are loaded: {load.absent()['cuda']}")
    if "nodes" in load.absent():
        print(f"note: small layers on the CPU wait for Python: {load.absent()['nodes']}")
    return 0

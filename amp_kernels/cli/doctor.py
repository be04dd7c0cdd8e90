"""``python -m amp_kernels doctor``: recommends a 16-bit format for this machine, and says whether it needs loss scaling."""

from __future__ import annotations

import sys

import torch

from .. import amp
from .._dispatch import cpu_isa, load, policy, profile
from .._dispatch.library import REGISTRY

_WIDENED = "no 16-bit arithmetic: fp16 and bf16 are widened and run at fp32 speed; they save memory, not time"
#: The speed of 16-bit formats with each instruction set.
INSTRUCTIONS = {
    "portable": "torch's fp32 matmul of widened operands: independent of this machine's 16-bit instructions",
    "avx2": _WIDENED,
    "avx512": _WIDENED,
    "avx512_bf16": "bf16 runs at twice the speed of fp32 (vdpbf16ps); fp16 is widened and runs at fp32 speed: choose bf16",
    "amx": "bf16 runs at many times the speed of fp32 (tdpbf16ps); fp16 is widened and runs at fp32 speed: choose bf16",
    "amx_emulated": "the instructions of amx in plain C++, for tests: slow",
}


def run() -> int:
    """Print one verdict per device. Returns the exit status: 2 if ``AMP_KERNELS_CPU_ISA`` is not accepted, else 0, because every
    device can train in some format."""
    try:
        cpu_isa.chosen()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else ["cpu"]
    for name in names:
        advice = amp.advise(name)
        print(f"{name}: {advice.device_name}")
        print(f"  dtype         {str(advice.dtype).removeprefix('torch.')}")
        print(f"  loss scaling  {'needed' if advice.needs_scaler else 'not needed'}")
        print(f"  why           {advice.reason}")
        products = policy.choice_on(REGISTRY["gemm"], torch.device(name))
        print(f"  products      {products.backend}: {products.reason}")
        if name != "cpu":
            print(
                f"  profile       {len(profile.of_device(torch.device(name).index).winners)} products go to a faster backend (info)"
            )
        if name == "cpu":
            others = ", ".join(isa for isa in cpu_isa.available() if isa != cpu_isa.chosen())
            print(f"  matmul        {cpu_isa.chosen()} (AMP_KERNELS_CPU_ISA also accepts {others})")
            print(f"  16-bit        {INSTRUCTIONS[cpu_isa.chosen()]}")
        for warning in advice.warnings:
            print(f"  warning       {warning}")
    if "cuda" in load.absent():
        print(f"note: no CUDA kernels are loaded: {load.absent()['cuda']}")
    if "nodes" in load.absent():
        print(f"note: small layers on the CPU are slower without the C++ autograd nodes: {load.absent()['nodes']}")
    return 0

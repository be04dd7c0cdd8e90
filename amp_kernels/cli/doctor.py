"""``python -m amp_kernels doctor``: recommends a 16-bit format for this machine, and says whether it needs loss scaling; of a model,
which sizes do not suit Tensor Cores and what ``convert`` changes."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable

import torch

from .. import amp
from .._checks.types import type_name
from .._dispatch import cpu_isa, load, policy, profile
from .._dispatch.library import REGISTRY
from ..nn import convert
from . import _function

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


MULTIPLE = 8  # 16-bit elements in the 16 bytes that Tensor Core kernels load at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=_function.load,
        metavar="NAME",
        help="module:function or path.py:function that returns a model: list sizes that are no multiples of 8, and what convert changes",
    )
    parser.add_argument("--device", type=_function.device, help="device to judge (default: all GPUs, else the CPU)")


def run(options: argparse.Namespace) -> int:
    """Print one verdict per device, and one of the model. Returns the exit status: 2 if ``AMP_KERNELS_CPU_ISA`` is not accepted or the
    function returns no model, else 0, because every device can train in some format."""
    try:
        cpu_isa.chosen()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else ["cpu"]
    names = names if options.device is None else [str(options.device)]
    for name in names:
        advice = amp.advise(name)
        print(f"{name}: {advice.device_name}")
        print(f"  dtype         {str(advice.dtype).removeprefix('torch.')}")
        print(f"  loss scaling  {'needed' if advice.needs_scaler else 'not needed'}")
        print(f"  why           {advice.reason}")
        products = policy.choice_on(REGISTRY["gemm"], torch.device(name))
        print(f"  products      {products.backend}: {products.reason}")
        if name.startswith("cuda"):
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
    return 0 if options.model is None else _judge(options.model)


def _judge(function: Callable[[], torch.nn.Module]) -> int:
    """Print what holds of the model. Returns the exit status."""
    try:
        model = function if isinstance(function, torch.nn.Module) else function()
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"doctor: --model returned a value of type {type_name(model)}; accepted: a torch.nn.Module")
        odd = {
            f"{name or 'the model'} ({type(module).__name__})": _odd(module) for name, module in model.named_modules()
        }
        fates: dict[str, list[str]] = {}
        convert(model, report=lambda module, fate: fates.setdefault(fate, []).append(module))
    except Exception:  # most likely from the function
        traceback.print_exc()
        return 2
    print(f"model: {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters")
    odd = {name: sizes for name, sizes in odd.items() if sizes}
    print(f"  sizes that are no multiples of {MULTIPLE}, which Tensor Cores load slower:" + " none" * (not odd))
    for name, sizes in odd.items():
        print(f"    {name}: " + ", ".join(f"{size} (next: {-(-size // MULTIPLE) * MULTIPLE})" for size in sizes))
    print("  convert:" + " nothing to change" * (not fates))
    for fate, modules in sorted(fates.items()):
        print(f"    {fate} ({len(modules)}): " + ", ".join(modules[:3]) + ", ..." * (len(modules) > 3))
    return 0


def _odd(module: torch.nn.Module) -> list[int]:
    """Sizes of the matrix of a layer that are no multiples of 8: those of its input and output, or of the channels of a convolution."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() < 2 or getattr(module, "groups", 1) > 1:
        return []
    return [size for size in dict.fromkeys(weight.shape[:2]) if size % MULTIPLE]

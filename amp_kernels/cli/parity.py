"""``python -m amp_kernels parity module:function``: exit code 0 if every format trains as FP32 does, else 1."""

from __future__ import annotations

import argparse

from .. import numerics
from ..numerics.comparison import PRECISIONS
from . import _function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", type=_function.load, help=_function.CONTRACT)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp16"], help="besides fp32")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--device", default="cpu", help="where to train (default: cpu)")
    parser.add_argument("--factor", type=float, default=3.0, help="standard errors that are parity (default: 3)")


def run(options: argparse.Namespace) -> int:
    result = numerics.parity(
        options.function,
        precisions=options.precisions,
        seeds=options.seeds,
        device=options.device,
        factor=options.factor,
        show=lambda o: print(
            f"{o.precision} seed {o.seed}: metric {o.metric:.5g}, {o.steps} steps, {o.seconds:.1f} s", flush=True
        ),
    )
    print(result)
    return 0 if result else 1

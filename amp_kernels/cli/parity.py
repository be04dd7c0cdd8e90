"""``python -m amp_kernels parity module:function``: exit code 0 if every format trains as FP32 does, 1 if one does not, 2 if
that could not be found out."""

from __future__ import annotations

import argparse
import traceback

from .. import numerics
from ..numerics.comparison import PRECISIONS
from . import _function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", type=_function.load, help=_function.CONTRACT)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp16"], help="besides fp32")
    parser.add_argument(
        "--seeds", type=_function.at_least(2, int), default=3, metavar="N", help="how many, at least 2 (default: 3)"
    )
    parser.add_argument("--device", type=_function.device, default="cpu", help="where to train (default: cpu)")
    parser.add_argument(
        "--factor",
        type=_function.at_least(0, float),
        default=3.0,
        metavar="X",
        help="standard errors that are parity (default: 3)",
    )


def run(options: argparse.Namespace) -> int:
    try:
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
    except Exception:  # most likely of the training function; Python's own exit code would be that of a difference
        traceback.print_exc()
        return 2
    print(result)
    return 0 if result else 1

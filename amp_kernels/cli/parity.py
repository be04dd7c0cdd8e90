"""``python -m amp_kernels parity module:function``: exit code 0 if every format matches FP32, 1 if one differs, 2 if training
fails, 3 if seeds differ too much to tell."""

from __future__ import annotations

import argparse
import traceback

from .. import numerics
from ..numerics.comparison import PRECISIONS
from . import _function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", type=_function.load, help=_function.CONTRACT)
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp16"], help="formats to compare with fp32"
    )
    parser.add_argument(
        "--seeds",
        type=_function.at_least(2, int),
        default=3,
        metavar="N",
        help="number of seeds, at least 2 (default: 3)",
    )
    parser.add_argument("--device", type=_function.device, default="cpu", help="device to train on (default: cpu)")
    parser.add_argument(
        "--curve",
        action="store_true",
        help="the function returns the losses of all steps: say from which step on they part",
    )
    parser.add_argument(
        "--factor",
        type=_function.at_least(0, float),
        default=3.0,
        metavar="X",
        help="accepted difference in standard errors (default: 3)",
    )


def run(options: argparse.Namespace) -> int:
    try:
        result = numerics.parity(
            options.function,
            precisions=options.precisions,
            seeds=options.seeds,
            device=options.device,
            factor=options.factor,
            curve=options.curve,
            show=lambda o: print(
                f"{o.precision} seed {o.seed}: metric {o.metric:.5g}, {o.steps} steps, {o.seconds:.1f} s", flush=True
            ),
        )
    except Exception:  # most likely from the training function; Python's own exit code, 1, means a difference here
        traceback.print_exc()
        return 2
    print(result)
    verdicts = {result.verdict(precision) for precision in result.precisions}
    return 1 if "DIFFERS" in verdicts else 3 if "inconclusive" in verdicts else 0

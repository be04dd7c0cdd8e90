"""``python -m amp_kernels numerics module:function``: the gradients of a training run by power of two, and loss scales for
FP16."""

from __future__ import annotations

import argparse
import sys

from ..numerics import GradientHistogram
from ..numerics.comparison import PRECISIONS, seeded
from . import _function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "function", type=_function.load, help=_function.CONTRACT + " It passes its model to run.watch()."
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="format to train in (default: fp32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: 0)")
    parser.add_argument("--device", type=_function.device, default="cpu", help="device to train on (default: cpu)")


def run(options: argparse.Namespace) -> int:
    training = seeded(options.precision, options.seed, options.device)
    histograms: list[GradientHistogram] = []
    training.on_watch = lambda model: histograms.append(GradientHistogram(model, training.scaler).__enter__())
    options.function(training)
    if not histograms:
        print("error: the function did not call run.watch(model), so there is no model to measure", file=sys.stderr)
        return 2
    for histogram in histograms:
        histogram.__exit__(None, None, None)
        print(histogram)
    return 0

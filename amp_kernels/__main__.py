"""``python -m amp_kernels {info,doctor,precision,parity,numerics,bench}``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path


def _bench() -> Callable[[list[str]], int]:
    """The benchmarks' own main: installed they are a part of the package, in a source tree they lie beside it."""
    if importlib.util.find_spec(f"{__package__}.bench") is not None:
        return importlib.import_module(f"{__package__}.bench.run").main
    sys.path.insert(0, str(Path(__file__).parents[1]))
    return importlib.import_module("bench.run").main


def main(argv: list[str] | None = None) -> int:
    from .cli import doctor, info, numerics, parity, precision

    parser = argparse.ArgumentParser(prog="python -m amp_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    about = commands.add_parser("info", help="versions, GPU, what is built, which backend each op takes and why")
    about.add_argument("--check", action="store_true", help="run a tiny case of every op on every available backend")
    about.add_argument("--brief", action="store_true", help="only what was built")
    commands.add_parser("doctor", help="which 16-bit format to train in on this machine, and why")
    commands.add_parser("precision", help="what autocast does to each op, this package's and torch's")
    compare = commands.add_parser("parity", help="train in FP32, BF16 and FP16 with the same seeds, and compare")
    parity.add_arguments(compare)
    spread = commands.add_parser(
        "numerics", help="how the gradients of a training function are spread over the powers of two"
    )
    numerics.add_arguments(spread)
    commands.add_parser("bench", help="run the benchmarks", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "bench":
        return _bench()(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command == "info":
        return info.run(brief=arguments.brief, check=arguments.check)
    if arguments.command in ("parity", "numerics"):
        return {"parity": parity, "numerics": numerics}[arguments.command].run(arguments)
    return {"doctor": doctor, "precision": precision}[arguments.command].run()


if __name__ == "__main__":
    sys.exit(main())

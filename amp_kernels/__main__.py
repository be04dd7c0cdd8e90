"""``python -m amp_kernels {info,doctor,tune,parity,bench}``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path


def _bench() -> Callable[[list[str]], int]:
    """The main function of the benchmarks, which are part of an installed package and a sibling folder in a source tree."""
    if importlib.util.find_spec(f"{__package__}.bench") is not None:
        return importlib.import_module(f"{__package__}.bench.run").main
    sys.path.insert(0, str(Path(__file__).parents[1]))
    return importlib.import_module("bench.run").main


def main(argv: list[str] | None = None) -> int:
    from . import __version__
    from .cli import doctor, info, parity, tune

    parser = argparse.ArgumentParser(prog="python -m amp_kernels", description="Tools of amp_kernels.")
    parser.add_argument("--version", action="version", version=f"amp_kernels {__version__}")
    commands = parser.add_subparsers(dest="command")
    about = commands.add_parser("info", help="show versions, the GPU, the built libraries, and the backend of each op")
    about.add_argument("--check", action="store_true", help="also compare every available backend with the reference")
    about.add_argument("--brief", action="store_true", help="show the built libraries only")
    judge = commands.add_parser("doctor", help="recommend a 16-bit format for this machine, and judge a model")
    doctor.add_arguments(judge)
    times = commands.add_parser("tune", help="time matrix products on this GPU and let the fastest backend serve each")
    tune.add_arguments(times)
    compare = commands.add_parser("parity", help="compare training in FP32, BF16 and FP16 over seeds")
    parity.add_arguments(compare)
    commands.add_parser("bench", help="run the benchmarks", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    if arguments.command == "bench":
        return _bench()(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command == "info":
        return info.run(brief=arguments.brief, check=arguments.check)
    return {"doctor": doctor, "parity": parity, "tune": tune}[arguments.command].run(arguments)


if __name__ == "__main__":
    if (
        sys.argv[1:2] == ["bench"] and "OMP_WAIT_POLICY" not in os.environ
    ):  # torch, which is loaded, read it; see bench/__init__.py
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    sys.exit(main())

"""``python -m amp_kernels {info,doctor,bench}``."""

from __future__ import annotations

import argparse
import importlib.util
import sys


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m amp_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, GPU, what is built, which backend each op takes and why")
    info.add_argument("--check", action="store_true", help="run a tiny case of every op on every available backend")
    info.add_argument("--brief", action="store_true", help="only what was built")
    commands.add_parser("doctor", help="which 16-bit format to train in on this machine, and why")
    commands.add_parser("bench", help="run the benchmarks", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "bench":
        if importlib.util.find_spec(f"{__package__}.bench") is None:
            parser.error("the benchmarks are a part of the installed package; in a source tree run python -m bench.run")
        from .bench.run import main as run_bench

        return run_bench(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command == "info":
        from .cli import info

        return info.run(brief=arguments.brief, check=arguments.check)
    from .cli import doctor

    return doctor.run()


if __name__ == "__main__":
    sys.exit(main())

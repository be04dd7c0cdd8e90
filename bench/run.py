"""Times the ops against their peers on this machine and records rows, a table and a plot.

python -m amp_kernels bench                          # everything, on CUDA if there is a GPU, else on the CPU
python -m amp_kernels bench --op gemm --shape 4096x4096x11008 --dtype fp16  # x @ w.T of that size, M x N x K
python -m amp_kernels bench --op gemm --shape "4096x4096x11008 NN"  # with w stored as K x N
python -m amp_kernels bench --op rms_norm --shape 4096 --quick      # a look at the cases whose shape contains 4096
python -m amp_kernels bench --op step --quick --memory 16           # reduced to what fits into 16 GiB
python -m amp_kernels bench --peers                  # other libraries, whole steps and GPT-2: one table (bench.peers_page)
python -m amp_kernels bench --suite cpu              # what a CPU is to reach against torch, in two minutes
python -m amp_kernels bench --floor H100 --op gemm   # the least time of the cases on that chip, without a GPU (bench.floor)
"""

import argparse
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from . import floor, gpt2, report
from . import options as common
from .harness import environment, rows, sources
from .harness.case import Case, Scope
from .harness.measure import measure
from .harness.roofline import Roofline
from .harness.tables import format_bytes
from .harness.timer import Effort
from .harness.watch import CEILINGS, PATIENCE, watched
from .ops import OPS, cpu_suite, peer_suite, peers

UNSTEADY = 1.5  # the ratio of the slow to the fast fifth of a provider's times, from which a case is measured once more
PRODUCT = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?: ([NT]{2}))?")
TRAINING_SECONDS = 150  # of GPT-2 with every library on a GPU; without them it took 77
CONTEXT_LOST = 3  # exit status: a kernel broke the GPU's context, so that nothing more can be measured


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m amp_kernels bench",
        description=__doc__.splitlines()[0],
        epilog="examples:\n" + __doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--op", help=f"comma-separated list of {', '.join(OPS)} (default: all)")
    parser.add_argument("--suite", choices=["cpu"], help="a chosen few cases with the goals that they have")
    parser.add_argument(
        "--peers", action="store_true", help="all libraries that run here, in one table, and GPT-2's step"
    )
    parser.add_argument(
        "--shape", help="MxNxK: that product of --op gemm and linear; else only cases whose shape contains this text"
    )
    parser.add_argument("--dtype", help="only cases whose dtype contains this text, such as bf16")
    parser.add_argument("--provider", help="comma-separated list of torch, amp_kernels and peers (default: all)")
    parser.add_argument("--no-triton", action="store_true", help="without the Triton kernels, which compile first")
    parser.add_argument("--device", help="cpu, cuda or cuda:<index> (default: CUDA if there is one)")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: a look, kept in the cache folder")
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="fit the cases into this much memory (default: what a GPU has free)"
    )
    parser.add_argument(
        "--seconds", type=float, help="start no case after this time; cases left out make the exit status 1"
    )
    parser.add_argument("--after", metavar="CASE", help="start after the case of this name, as --list prints it")
    parser.add_argument("--resume", action="store_true", help="skip the cases that --out has from this commit")
    parser.add_argument("--progress-file", type=Path, help="file that names the running case, removed at the end")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--floor", choices=floor.CHIPS, help="print the least time of each case there, and stop")
    parser.add_argument("--out", type=Path, help="folder of the results (default: bench/results/<device>)")
    options = parser.parse_args(argv)
    for given, name in ((options.suite, "--suite"), (options.peers, "--peers")):
        if given and (options.op or (options.suite and options.peers)):
            parser.error(f"argument {name}: not with --op, which chooses among all cases, nor with another suite")
    options.op = common.names(parser, "--op", options.op, OPS)
    if options.provider is not None:  # else all, torch.compile too
        options.provider = common.names(parser, "--provider", options.provider, ("torch", "amp_kernels", *peers.PEERS))
    if options.floor:
        options.device, options.memory = torch.device("cuda"), options.memory or float("inf")
    else:
        options.device = common.device(parser, options.device or options.suite)
    return options


def select(options: argparse.Namespace) -> Iterator[Case]:
    """The cases that the options ask for and that fit into memory."""
    memory = _memory(options)
    asked = PRODUCT.fullmatch(options.shape or "")
    product, layout = (tuple(map(int, asked.groups()[:3])), asked[4] or "") if asked else (None, "")
    scope = Scope(options.device, options.quick, memory, product, layout, options.dtype or "")
    started = options.after is None
    for cases in _chosen(options):
        for case in cases(scope):
            if options.no_triton:
                case.providers.pop(rows.TRITON, None)
            if (options.shape or "") not in case.shape or (options.dtype or "") not in case.dtype:
                continue
            if options.provider and not any(name.split(":")[0] in options.provider for name in case.providers):
                continue
            if started and case.memory > memory:
                print(f"left out: {case.name} needs {format_bytes(case.memory)} of memory", file=sys.stderr)
            elif started:
                yield case
            started = started or case.name == options.after
    if not started:
        sys.exit(f"error: --after: no selected case is called {options.after!r} (--list names them)")


def _chosen(options: argparse.Namespace) -> list[Callable[[Scope], Iterator[Case]]]:
    if options.suite or options.peers:
        return [cpu_suite.cases if options.suite else peer_suite.cases]
    return [OPS[name] for name in options.op]


def _memory(options: argparse.Namespace) -> float:
    if options.memory is not None:
        return options.memory * 2**30
    return 0.95 * torch.cuda.mem_get_info(options.device)[0] if options.device.type == "cuda" else float("inf")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks; 0 if every provider of this package and torch gave right results, else 1."""
    begin, options = time.monotonic(), parse(argv)
    if options.list:
        for case in select(options):
            print(f"{case.name:72} {', '.join(case.providers)}")
        return 0
    if options.floor:
        print(floor.text(select(options), options.floor))
        return 0
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
    selected = list(select(options))
    if not selected:
        print("error: no case matches --op, --shape, --dtype and --provider (--list names them)", file=sys.stderr)
        return 2
    out = options.out or environment.results_folder(options.device, options.quick) / ("peers" if options.peers else "")
    found, merged, late = _measured(options, selected, out)
    if found:
        print(f"\n{report.text(found)}\n")
        report.write(out, merged)
        print(f"results in {out}")
    bad = [r for r in found if r["status"] != "ok" and r["provider"].split(":")[0] in ("torch", "amp_kernels")]
    for row in bad:
        print(f"{row['status'].upper()}: {row['op']} {row['shape']} {row['dtype']} {row['provider']}: {row['reason']}")
    unsteady = [row for row in found if options.device.type == "cpu" and spread([row]) > UNSTEADY]
    for row in unsteady:
        print(
            f"UNSTEADY, times vary by {spread([row]):.1f}: {row['op']} {row['shape']} {row['dtype']} {row['provider']}"
        )
    trained = 0
    if options.peers and (options.seconds is None or time.monotonic() - begin + TRAINING_SECONDS <= options.seconds):
        trained = _train(options, out)
    elif options.peers:
        late.append("the training step of GPT-2")
    for name in late:
        print(f"NOT MEASURED within {options.seconds:.0f} s: {name}")
    return int(bool(bad or late or trained))


def _train(options: argparse.Namespace, out: Path) -> int:
    """GPT-2's training step with every library; on a CPU one layer and one sequence. Returns the exit status."""
    arguments = ["--peers", "--dtype", "bf16", "--device", str(options.device), "--out", str(out)]
    if options.device.type == "cpu":
        arguments += ["--layers", "1", "--batch", "1", "--steps", "1", "--rounds", "1" if options.quick else "7"]
    return gpt2.main(arguments)


def _measured(options: argparse.Namespace, cases: list[Case], out: Path) -> tuple[list[dict], list[dict], list[str]]:
    """The rows of this run, those with the rows of earlier runs, and the names of the cases there was no time for."""
    begin, device = time.monotonic(), options.device
    effort = Effort.of(device, options.quick)
    machine = environment.describe(device)
    installed = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    print(f"{machine['device']}; {installed}; commit {machine['commit'] or 'unknown'}")
    versions = {name: peers.version(name) for name in peers.PEERS}
    if warning := environment.load_warning(device):
        print(warning, file=sys.stderr)
    print("peers: " + ", ".join(f"{name} {found or 'absent'}" for name, found in versions.items()))
    left_out = {name: why for name in peers.PEERS if (why := peers.skipped(name, device))}
    for name, why in left_out.items() if options.peers else ():
        print(f"not timed: {name} {why}; {peers.PEERS[name].install}")
    patience = PATIENCE[device.type] * (
        5 if options.peers else 1
    )  # torch.compile takes a minute for a model's optimizer
    with watched(options.progress_file, patience) as note:
        note(CEILINGS)
        if options.quick:
            roofline = Roofline.kept(out / "ceilings.json", machine, device, effort.settle)
        else:
            roofline = Roofline.measured(device, effort.settle)
        ceilings = roofline.record()
        print("; ".join(f"{name} {value:,.1f}" for name, value in ceilings.items()), flush=True)
        said = ("device", "threads", "isa", "load", "commit", "date", "versions")
        told = {"quick": options.quick, "peers": {name: found or "absent" for name, found in versions.items()}}
        told["skipped"] = left_out
        told |= {key: machine[key] for key in said if key in machine} | ceilings
        found, merged, late = [], [], []
        sources.record(out, machine["commit"])
        if options.resume:
            done = rows.cases(row for row in rows.load(out) if row["commit"] == machine["commit"])
            cases = [case for case in cases if (case.op, case.shape, case.dtype) not in done]
        print(f"{len(cases)} cases, {_least_time(cases, options.provider, effort, roofline)} or more", flush=True)
        for number, case in enumerate(cases, 1):
            if options.seconds is not None and time.monotonic() - begin > options.seconds:
                late.append(case.name)
                continue
            print(f"{number}/{len(cases)} {case.name} ...", file=sys.stderr, flush=True)
            note(case.name)

            def attempt(case: Case = case) -> list[dict]:
                return measure(case, device, effort, options.provider, lambda doing: note(case.name, doing))

            measured = attempt()
            if device.type == "cpu" and spread(measured) > UNSTEADY:
                measured = min(measured, attempt(), key=spread)
            now = environment.clocks(device)
            for row in measured:
                row.update(now)
                _complete(row, roofline, device)
                name = row["provider"].split(":")[0]
                row["version"] = machine["versions"].get("torch" if name == "torch.compile" else name) or versions.get(
                    name
                )
                row.update(told)
            found += measured
            merged = rows.record(out / "rows.jsonl", measured)  # now: a later case may take the process with it
            _clean_up(case, device)
    return found, merged, late


def spread(measured: list[dict]) -> float:
    """The largest ratio of the slow to the fast fifth of a provider's times."""
    return max((row["p80_us"] / row["p20_us"] for row in measured if row.get("p20_us")), default=1.0)


def _clean_up(case: Case, device: torch.device) -> None:
    """Frees what one case cached, which must not be what the next one lacks."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            print(f"CONTEXT LOST: {case.name}: {error}", flush=True)
            os._exit(CONTEXT_LOST)  # as it is: the progress file still names the case


def _least_time(cases: list[Case], chosen: list[str] | None, effort: Effort, roofline: Roofline) -> str:
    """The time of warm-up and samples if every provider ran at the machine's ceilings; checks come on top."""
    seconds = 0.0
    for case in cases:
        floor = roofline.floor_seconds(case.bytes, case.flops, case.dtype, case.written)
        providers = [name for name in case.providers if chosen is None or name.split(":")[0] in chosen]
        seconds += len(providers) * (effort.warmup + effort.rounds * max(effort.sample, floor))
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _complete(row: dict, roofline: Roofline, device: torch.device) -> None:
    """Adds rates and the share of the roofline to a timed row."""
    if "p50_us" not in row:
        return
    seconds = row["p50_us"] / 1e6
    row["gb_per_s"] = row["bytes"] / seconds / 1e9
    row["tflops"] = row["flops"] / seconds / 1e12
    floor = roofline.floor_seconds(row["bytes"], row["flops"], row["dtype"], row.get("written"))
    row["floor_us"], row["roofline_share"] = floor * 1e6, floor / seconds
    if roofline.in_cache(device, row["bytes"], row["flops"], row["dtype"], row["roofline_share"]):
        row["in_cache"] = True
    if "device_us" in row:
        row["device_share"] = row["floor_us"] / row["device_us"]


if __name__ == "__main__":
    sys.exit(main())

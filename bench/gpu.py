"""``make gpu``: everything that needs a GPU: the gpu tests, then a training step, then the benchmarks.

python -m bench.gpu                                # all parts, in the order of what they tell in a minute
python -m bench.gpu --part tests,training          # some of them
python -m bench.gpu --part first                   # ten minutes of what no GPU has shown yet (FIRST)
python -m bench.gpu --seconds 500 --resume         # start no part that would end later; leave out what an earlier run of this
                                                   # commit finished

Each part runs in processes of its own, within its share of the time. A kernel that hangs or breaks the GPU's context is reported with
the test or case (op and shape) that was running. The benchmarks then go on with the next case, the tests with the next test where
pytest-xdist and pytest-timeout are installed, else with the next file. Results go to RESULTS (default ``bench/results/<gpu>``):
rows.jsonl, gpt2.jsonl, outcomes.jsonl (of the tests, by op), profile.txt (the kernels of a training step), gemm_tiles.csv, peers/ (the
other libraries), first/, table.txt, plots, summary.txt, and parts.json, which ``--resume`` reads.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from . import options as common
from .harness import environment
from .harness.watch import CEILINGS
from .ops import OPS
from .ops.peers import PEERS

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "triton", "pytest", "setuptools", "cmake", "ninja")
SIDE_BY_SIDE = ("xdist", "pytest_timeout")  # both: without the second a hang would take all tests with it
PEER_MODULES = tuple(peer.module for peer in PEERS.values())
OPTIONAL = (*SIDE_BY_SIDE, "pybind11", "hypothesis", "matplotlib", "tqdm", *PEER_MODULES)

TESTS = ("tests/gpu", "tests/ops", "tests/triton", "tests/examples")  # where tests are marked gpu
NO_TESTS = "FAILED (exit 5)"  # of pytest, which has found none in a file

# Seconds of each part, of which none may take more than nine minutes with the build before it.
MOST_SECONDS = 540
BUILD_SECONDS = 80  # spent by make before this starts: compiling for the one GPU that is there
TEST_SECONDS = 200  # measured on 16 cores: 141 on an H100, 121 on an H200, with xdist
TRAINING_SECONDS = 200  # measured: 77, after Inductor had compiled the models once
TILE_SECONDS = 240  # nvcc takes half of it
PEER_SECONDS = 440  # an estimate, with all libraries; torch.compile takes most of it
HOST_STATE_SECONDS = 300  # an estimate: 400 M parameters, 7 kinds of steps, 3 numbers of tokens, twice
TEST_PROCESSES = 8  # files at a time, without xdist
ONE_TEST_SECONDS = 100  # with it; the longest took 19
GRACE_SECONDS = 20  # beyond its share, for a part to end the case it is in and to write its tables


Outcome = tuple[str, str, float]  # what, how it ended ("passed" or the reason), seconds


@dataclass(frozen=True)
class Part:
    """Work that runs in one process or in several side by side, and its share of the time."""

    name: str
    seconds: int
    run: Callable[[Path, float, bool], list[Outcome]]  # results folder, seconds, whether an earlier run is resumed


def parts() -> list[Part]:
    """In the order of what a minute of them tells. bf16 stands for both 16-bit formats in the products, and the whole step for
    adamw_, which is most of it."""
    products = ("gemm", "linear", "mlp")
    rest = tuple(name for name in OPS if name not in (*products, "step", "adamw", "adapters"))
    return [
        Part("tests", TEST_SECONDS, tests),
        Part("training", TRAINING_SECONDS, training),
        benchmark("products", products, 150, ("--dtype", "bf16")),  # measured: 116
        benchmark("step", ("step",), 130),  # measured: 107
        benchmark("adapters", ("adapters",), 120),  # an estimate: 12 cases, whose time is the host's
        benchmark("ops", rest, 440),  # an estimate: 120 cases, of which 20 took 75 s
        Part("host-state", HOST_STATE_SECONDS, host_state),
        Part("peers", PEER_SECONDS, other_libraries),
        Part("tiles", TILE_SECONDS, tiles),
    ]


NO_OVERLAP = {"AMP_KERNELS_PDL": "0"}
SMOKE = "tests/gpu/test_ops.py::test_backend_equals_the_reference -k cuda"
STEP = "--op step --shape llama-1b --provider"
OTHERS = "linear_log_probs,newton_schulz,grouped_mm,syrk,rotary"  # the last waits for torch.compile
GPT2 = "--provider 'torch,amp_kernels three lines,amp_kernels' --rounds 3 --dtype"
#: What no GPU has shown yet, in the order of what it decides: name, seconds (estimates), module and options, environment. Each part has a
#: folder of its own, first/<name>, so that rows of the same case under other conditions do not replace each other.
FIRST: tuple[tuple[str, int, tuple[str, str], dict[str, str]], ...] = (
    ("smoke", 40, ("pytest", SMOKE), {}),
    ("step", 85, ("bench.run", f"{STEP} torch,amp_kernels"), {}),
    ("step-no-overlap", 50, ("bench.run", f"{STEP} amp_kernels --dtype fp32 --no-triton"), NO_OVERLAP),
    ("fp16-layers", 35, ("bench.run", "--op linear,mlp --dtype fp16 --no-triton"), {}),
    ("fp16-products", 50, ("bench.run", "--op gemm --dtype fp16 --shape 4096 --no-triton"), {}),
    ("gpt2-fp16", 40, ("bench.gpt2", f"{GPT2} fp16"), {}),
    ("gpt2-fp32", 45, ("bench.gpt2", "--dtype fp32,tf32 --provider torch --rounds 3 --steps 4"), {}),
    ("resnet", 45, ("bench.resnet", "--rounds 3"), {}),
    ("others", 90, ("bench.run", f"--op {OTHERS} --dtype bf16 --no-triton"), {}),
    ("profile", 40, ("bench.gpt2", f"{GPT2} bf16 --profile"), NO_OVERLAP),
)  # fmt: skip


def first() -> list[Part]:
    """The parts of FIRST, ten minutes of an H200 with the build."""
    return [Part(f"first/{name}", seconds, partial(_first, name, *how)) for name, seconds, *how in FIRST]


def _first(
    name: str, command: tuple[str, str], env: dict[str, str], results: Path, seconds: float, resume: bool
) -> list[Outcome]:
    module, options = command
    folder = results / "first" / name
    runner = [sys.executable, "-m", module, *shlex.split(options)]
    if module == "bench.run":
        return benchmark_in(folder, f"first/{name}", runner, seconds, resume, env)
    folder.mkdir(parents=True, exist_ok=True)
    runner += side_by_side(results / "outcomes.jsonl") if module == "pytest" else ["--out", folder]
    return [run(f"first/{name}", runner, seconds, folder / "log.txt", env)]


def benchmark(name: str, ops: tuple[str, ...], seconds: int, options: tuple[str, ...] = ()) -> Part:
    command = [sys.executable, "-m", "bench.run", "--op", ",".join(ops), *options]

    def run(results: Path, seconds: float, resume: bool) -> list[Outcome]:
        return benchmark_in(results, name, command, seconds, resume)

    return Part(name, seconds, run)


def benchmark_in(
    results: Path, name: str, command: list, seconds: float, resume: bool, env: dict[str, str] | None = None
) -> list[Outcome]:
    results.mkdir(parents=True, exist_ok=True)
    return bench(name, [*command, *["--resume"] * resume], seconds, results, env)


def missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None and shutil.which(name) is None]


def check() -> str | None:
    """Why `make gpu` cannot run here, or None."""
    absent = missing(NEEDED)
    if absent:
        return f"make gpu needs these packages or programs: {', '.join(absent)}"
    if not torch.cuda.is_available():
        return f"make gpu needs a CUDA GPU; torch {torch.__version__} sees none"
    return None


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    named = f"comma-separated (default: {','.join(part.name for part in parts())}), first, or parts of it as first/step"
    parser.add_argument("--part", help=named)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no part that would end later")
    parser.add_argument("--resume", action="store_true", help="leave out what an earlier run of this commit finished")
    parser.add_argument("--check", action="store_true", help="say whether this can run here, and stop")
    options = parser.parse_args(argv)
    if options.part == "first":
        options.part = [part.name for part in first()]
    else:
        accepted = [*parts(), *(first() if options.part else ())]  # without --part all but these
        options.part = common.names(parser, "--part", options.part, [part.name for part in accepted])
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    problem = check()
    if problem:
        print(problem, file=sys.stderr)
        return 2
    if options.check:
        return 0
    print(f"absent, not used: {', '.join(missing(OPTIONAL)) or 'nothing'}")
    device = torch.device("cuda")
    results = Path(os.environ.get("RESULTS") or environment.results_folder(device))
    results.mkdir(parents=True, exist_ok=True)
    outcomes = run_parts([part for part in [*first(), *parts()] if part.name in options.part], results, options)
    summary = "\n".join(f"{name:32} {outcome:60} {seconds:6.1f} s" for name, outcome, seconds in outcomes)
    (results / "summary.txt").write_text(summary + "\n")
    print(f"\n{summary}\nresults: {results}\ninto the README: python -m bench.report {results} --readme README.md")
    return int(any(not outcome.startswith("passed") for _, outcome, _ in outcomes))


def run_parts(chosen: list[Part], results: Path, options: argparse.Namespace) -> list[Outcome]:
    """The outcomes of the chosen parts, those of an earlier run included if it is resumed.

    A run of all parts starts an empty folder: its rows were measured side by side. Named parts and a resumed run keep the rest.
    """
    begin = time.monotonic()
    record, commit = results / "parts.json", environment.commit()
    if not options.resume and options.part == [part.name for part in parts()]:
        for path in (results / "rows.jsonl", record):
            path.unlink(missing_ok=True)
    done = json.loads(record.read_text()) if record.exists() else {}
    done = {name: told for name, told in done.items() if told["commit"] == commit}
    outcomes: list[Outcome] = []
    for part in chosen:
        earlier = [tuple(outcome) for outcome in done.get(part.name, {}).get("outcomes", [])]
        if options.resume and earlier and all(outcome.startswith("passed") for _, outcome, _ in earlier):
            outcomes += earlier
            continue
        if time.monotonic() - begin + part.seconds > options.seconds:
            outcomes.append((part.name, "NOT RUN: no time left", 0.0))
            continue
        found = part.run(results, part.seconds, options.resume)
        outcomes += found
        done[part.name] = {"commit": commit, "outcomes": found}
        record.write_text(json.dumps(done, indent=1) + "\n")  # now: a machine may be gone before the next part ends
    return outcomes


def tests(results: Path, seconds: float, resume: bool) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        return run_tests(Path(folder), seconds, results / "outcomes.jsonl")


def run_tests(folder: Path, seconds: float, outcomes: Path) -> list[Outcome]:
    """`info --check` with the gpu tests, which are one run with xdist, and one for each file without; output comes at the end."""
    end = time.monotonic() + seconds
    pytest = ["-m", "pytest", *side_by_side(outcomes)]
    commands = [("info --check", folder / "info", ["-m", "amp_kernels", "info", "--check"])]
    if missing(SIDE_BY_SIDE):
        for file in (file for part in TESTS for file in sorted((ROOT / part).glob("test_*.py"))):
            name, progress = str(file.relative_to(ROOT)), folder / f"{file.parent.name}-{file.stem}"
            commands.append((name, progress, [*pytest, "--progress-file", progress, name]))
    else:
        commands.append(("gpu tests", folder / "tests", [*pytest, *TESTS]))

    def one(test: tuple[str, Path, list]) -> Outcome:
        name, progress, command = test
        log = progress.with_suffix(".log")
        name, outcome, seconds = run(name, [sys.executable, *command], end - time.monotonic(), log)
        if outcome == NO_TESTS and name.endswith(".py"):
            outcome = "passed"
        if outcome not in ("passed", "FAILED (exit 1)"):  # failed tests are named in the log; here the process ended
            outcome += _where(progress)
        text = log.read_text() if log.exists() else ""
        print(f"== {name}\n{text}", flush=True)
        return name, outcome, seconds

    with concurrent.futures.ThreadPoolExecutor(TEST_PROCESSES) as pool:
        return list(pool.map(one, commands))


def side_by_side(outcomes: Path) -> list:
    """pytest's options for gpu tests: where its plugins are installed in as many processes as cores, a new one for a broken context."""
    options = ["-m", "gpu", "--require-gpu", "-p", "tests.gpu.outcomes", "--outcomes", outcomes]
    if missing(SIDE_BY_SIDE):
        return options
    options += ["-p", "tests.gpu.fresh_context", "-n", max(1, (os.cpu_count() or 1) - 2), "--dist", "load"]
    # A thread ends the worker; signals wait for kernels.
    return [*options, "--max-worker-restart", 100, "--timeout", ONE_TEST_SECONDS, "--timeout-method", "thread"]


def bench(name: str, runner: list, seconds: float, results: Path, env: dict[str, str] | None = None) -> list[Outcome]:
    """Runs benchmarks; if a case ends their process, again from the next case on, as long as there is time."""
    outcomes: list[Outcome] = []
    progress = results / ".running"
    end = time.monotonic() + seconds
    after: list[str] = []
    while (left := end - time.monotonic()) > 0:
        progress.unlink(missing_ok=True)
        options = ["--seconds", f"{left:.0f}", *after]
        command = [*runner, *options, "--out", results, "--progress-file", progress]
        title, outcome, spent = run(f"benchmarks: {name}", command, left + GRACE_SECONDS, env=env)
        outcomes.append((title, outcome + _where(progress), spent))
        case = progress.read_text().splitlines()[0] if progress.exists() else None
        if case is None or case == CEILINGS or after == ["--after", case]:
            break
        after = ["--after", case]
    progress.unlink(missing_ok=True)
    return outcomes


def training(results: Path, seconds: float, resume: bool) -> list[Outcome]:
    """GPT-2's step with every provider, and profile.txt with the kernels of each."""
    command = [sys.executable, "-m", "bench.gpt2", "--dtype", "bf16", "--profile", "--out", results]
    outcome = run("training step of GPT-2", command, seconds, results / "profile.txt")
    lines = (results / "profile.txt").read_text().splitlines()
    print("\n".join(line for line in lines if " ms a step" in line or "Error" in line), flush=True)
    return [outcome]


def other_libraries(results: Path, seconds: float, resume: bool) -> list[Outcome]:
    """peers/: every library that is installed, in one table, and GPT-2's step with it; the picture, too."""
    command = [sys.executable, "-m", "bench.run", "--peers"]
    outcomes = benchmark_in(results / "peers", "peers", command, seconds, resume)
    page = [sys.executable, "-m", "bench.peers_page", results / "peers"]
    return [*outcomes, run("page of the peers", page, GRACE_SECONDS, results / "peers" / "peers.md")]


def host_state(results: Path, seconds: float, resume: bool) -> list[Outcome]:
    """host_state.json: steps with state on the device and in host memory, with their bits, in free streams and in order."""
    command = [sys.executable, "-m", "bench.host_state", "--blocking", "--rounds", "1", "--out", results]
    return [run("host state", command, seconds, results / "host_state.txt")]


def tiles(results: Path, seconds: float, resume: bool) -> list[Outcome]:
    """gemm_tiles.csv, on the only GPU that the kernel runs on."""
    if torch.cuda.get_device_capability() != (9, 0):
        return [("tiles", "passed: none, gemm_sm90 runs on compute capability 9.0 alone", 0.0)]
    command = [sys.executable, "-m", "bench.tiles", "--out", results, "--seconds", f"{seconds / 2:.0f}"]
    return [run("tiles", command, seconds)]


def run(
    name: str, command: list, seconds: float, log: Path | None = None, env: dict[str, str] | None = None
) -> Outcome:
    """Runs a command for at most so long, its output going to `log` if there is one, with `env` added to the environment."""
    start = time.monotonic()
    if seconds <= 0:
        return name, "NOT RUN: no time left", 0.0
    with open(log, "w") if log else contextlib.nullcontext() as output:
        streams = {"stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen([str(part) for part in command], cwd=ROOT, env=os.environ | (env or {}), **streams)
        try:
            status = process.wait(seconds)
            outcome = "passed" if status == 0 else f"FAILED (exit {status})"
        except subprocess.TimeoutExpired:
            outcome = f"HUNG for {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its workers, one of which may keep the GPU busy
                process.wait()
    return name, outcome, time.monotonic() - start


def _where(progress: Path) -> str:
    """The case and provider that a process left in its progress file."""
    return " in " + ", ".join(progress.read_text().splitlines()) if progress.exists() else ""


if __name__ == "__main__":
    sys.exit(main())

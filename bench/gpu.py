"""``make gpu``: everything that needs a GPU, in one go: the gpu tests, then the benchmarks.

The tests, ``info --check`` beside them, each part of the benchmarks and GPT-2's training step run in processes of their own, within
their share of the time. A kernel that hangs or breaks the GPU's context is reported with the test or case (op and shape) that was
running. The benchmarks then go on with the next case, the tests with the next test where pytest-xdist and pytest-timeout are installed,
else with the next file. Results go to RESULTS (default ``bench/results/<gpu>``): rows.jsonl, gpt2.jsonl, table.txt, plots,
predicted.txt (what the cost model says, beside what was measured), summary.txt.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .harness.environment import results_folder
from .harness.watch import CEILINGS
from .ops import OPS
from .ops.peers import MODULES, PEERS

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "triton", "pytest", "setuptools", "cmake", "ninja")
SIDE_BY_SIDE = ("xdist", "pytest_timeout")  # both: without the second a hang would take all tests with it
PEER_MODULES = tuple(MODULES.get(name, name) for name in PEERS)
OPTIONAL = (*SIDE_BY_SIDE, "pybind11", "hypothesis", "matplotlib", "tqdm", *PEER_MODULES)

TESTS = ("tests/gpu", "tests/ops", "tests/triton", "tests/examples")  # where tests are marked gpu
NO_TESTS = "FAILED (exit 5)"  # of pytest, which has found none in a file

# Seconds, on a machine with 16 cores and an H200: together, with the build before them, below nine minutes. What does not fit
# is reported as not measured, and that is an error.
TOTAL_SECONDS = 540
BUILD_SECONDS = 80  # spent by make before this starts: compiling for the one GPU that is there
TEST_SECONDS = (
    110  # measured: 70 with xdist; `info --check`, which compiles all of Triton's kernels in one process, above 60
)
TRAINING_SECONDS = 55  # measured: 47
PREDICTION_SECONDS = 15  # on two cores: 9
TEST_PROCESSES = 8  # files at a time, without xdist
ONE_TEST_SECONDS = 100  # with it; the longest took 19
GRACE_SECONDS = 20  # beyond its share, for a part to end the case it is in and to write its tables


@dataclass(frozen=True)
class Part:
    """Benchmarks that run in one process, and their share of the time."""

    name: str
    ops: tuple[str, ...]
    seconds: int
    options: tuple[str, ...] = ()


def parts() -> list[Part]:
    """bf16 stands for both 16-bit formats in the products, and the whole step for adamw_, which is most of it."""
    products = ("gemm", "linear", "mlp")
    rest = tuple(name for name in OPS if name not in (*products, "step", "adamw"))
    return [
        Part("products", products, 110, ("--dtype", "bf16")),  # measured: 100
        Part("step", ("step",), 95),  # measured: 87
        Part("ops", rest, 75),  # an estimate: 32 cases at about 1.4 s, and six to compile
    ]


Outcome = tuple[str, str, float]  # what, how it ended ("passed" or the reason), seconds


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


def arch(capability: tuple[int, int]) -> str:
    """The entry of TORCH_CUDA_ARCH_LIST for a GPU; Hopper's own instructions need the suffix."""
    return "{}.{}".format(*capability) + ("a" if capability == (9, 0) else "")


def main(argv: list[str] | None = None) -> int:
    problem = check()
    if problem:
        print(problem, file=sys.stderr)
        return 2
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--check"]:
        return 0
    if argv == ["--arch"]:
        print(arch(torch.cuda.get_device_capability()))
        return 0

    print(f"absent, not used: {', '.join(missing(OPTIONAL)) or 'nothing'}")
    results = Path(os.environ.get("RESULTS") or results_folder(torch.device("cuda")))
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = tests(Path(folder))
    progress = results / ".running"
    (results / "rows.jsonl").unlink(missing_ok=True)  # a folder holds one run: its rows were measured side by side
    for part in parts():
        outcomes += bench(part, [sys.executable, "-m", "bench.run"], results, progress)
    progress.unlink(missing_ok=True)
    training = [sys.executable, "-m", "bench.gpt2", "--dtype", "bf16", "--out", results]
    outcomes.append(run("training step of GPT-2", training, TRAINING_SECONDS))
    outcomes.append(predictions(results))
    summary = "\n".join(f"{name:32} {outcome:60} {seconds:6.1f} s" for name, outcome, seconds in outcomes)
    (results / "summary.txt").write_text(summary + "\n")
    print(f"\n{summary}\nresults: {results}\ninto the README: python -m bench.report {results} --readme README.md")
    return int(any(not outcome.startswith("passed") for _, outcome, _ in outcomes))


def tests(folder: Path) -> list[Outcome]:
    """`info --check` beside the gpu tests, which are one run with xdist, and one for each file without; output comes at the end."""
    end = time.monotonic() + TEST_SECONDS
    pytest = ["-m", "pytest", "-m", "gpu", "--require-gpu"]
    commands = [("info --check", folder / "info", ["-m", "amp_kernels", "info", "--check"])]
    if missing(SIDE_BY_SIDE):
        for file in (file for part in TESTS for file in sorted((ROOT / part).glob("test_*.py"))):
            name, progress = str(file.relative_to(ROOT)), folder / f"{file.parent.name}-{file.stem}"
            commands.append((name, progress, [*pytest, "--progress-file", progress, name]))
    else:
        workers = max(1, (os.cpu_count() or 1) - 2)
        options = ["-p", "tests.gpu.fresh_context", "-n", workers, "--dist", "load", "--max-worker-restart", 100]
        options += [
            "--timeout",
            ONE_TEST_SECONDS,
            "--timeout-method",
            "thread",
        ]  # ends the worker; signals wait for kernels
        commands.append(("gpu tests", folder / "tests", [*pytest, *options, *TESTS]))

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


def bench(part: Part, runner: list, results: Path, progress: Path) -> list[Outcome]:
    """Runs a part; if a case ends its process, again from the next case on, as long as there is time."""
    outcomes: list[Outcome] = []
    end = time.monotonic() + part.seconds
    after: list[str] = []
    while (left := end - time.monotonic()) > 0:
        progress.unlink(missing_ok=True)
        options = ["--op", ",".join(part.ops), *part.options, "--seconds", f"{left:.0f}", *after]
        command = [*runner, *options, "--out", results, "--progress-file", progress]
        name, outcome, seconds = run(f"benchmarks: {part.name}", command, left + GRACE_SECONDS)
        outcomes.append((name, outcome + _where(progress), seconds))
        case = progress.read_text().splitlines()[0] if progress.exists() else None
        if case is None or case == CEILINGS or after == ["--after", case]:
            break
        after = ["--after", case]
    return outcomes


def predictions(results: Path) -> Outcome:
    """Writes predicted.txt: the cost model's times for this GPU, beside those that were just measured."""
    if importlib.util.find_spec("amp_kernels._host") is None:
        return "predictions", "passed: none, the package was built without pybind11", 0.0
    command = [sys.executable, "-m", "bench.predict", "--run", results]
    return run("predictions", command, PREDICTION_SECONDS, results / "predicted.txt")


def run(name: str, command: list, seconds: float, log: Path | None = None) -> Outcome:
    """Runs a command for at most so long, its output going to `log` if there is one."""
    start = time.monotonic()
    if seconds <= 0:
        return name, "NOT RUN: no time left", 0.0
    with open(log, "w") if log else contextlib.nullcontext() as output:
        try:
            done = subprocess.run(
                [str(part) for part in command], cwd=ROOT, timeout=seconds, stdout=output, stderr=output
            )
            outcome = "passed" if done.returncode == 0 else f"FAILED (exit {done.returncode})"
        except subprocess.TimeoutExpired:
            outcome = f"HUNG for {seconds:.0f} s"
    return name, outcome, time.monotonic() - start


def _where(progress: Path) -> str:
    """The case and provider that a process left in its progress file."""
    return " in " + ", ".join(progress.read_text().splitlines()) if progress.exists() else ""


if __name__ == "__main__":
    sys.exit(main())

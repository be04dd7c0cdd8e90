"""``make gpu``: everything that needs a GPU, in one go: the gpu tests, then the benchmarks.

Each test file and each benchmark runs in its own process under a timeout. A kernel that hangs is reported with the test (op and
shape) that was running. Results go to RESULTS (default ``bench/results/<gpu>``).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from .environment import results_folder

ROOT = Path(__file__).resolve().parents[1]
TEST_SECONDS = 150  # per test file
BENCH_SECONDS = 240
NEEDED = ("triton", "pytest")
OPTIONAL = ("pybind11", "hypothesis", "matplotlib", "tqdm", "apex", "flashoptim", "transformer_engine")


def main() -> int:
    if not torch.cuda.is_available():
        print(f"make gpu needs a CUDA GPU; torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"make gpu needs these packages: {', '.join(missing)}", file=sys.stderr)
        return 2
    print(f"absent, not used: {', '.join(n for n in OPTIONAL if importlib.util.find_spec(n) is None) or 'nothing'}")
    results = Path(os.environ.get("RESULTS") or results_folder(torch.device("cuda")))
    results.mkdir(parents=True, exist_ok=True)
    rows = [_run("info --check", [sys.executable, "-m", "amp_kernels", "info", "--check"], TEST_SECONDS)]
    progress = results / ".running"
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    for file in sorted(files):
        command = [sys.executable, "-m", "pytest", file, "-m", "gpu", "--require-gpu", "--progress-file", progress]
        rows.append(_run(file.name, command, TEST_SECONDS, progress))
    command = [sys.executable, "-m", "bench.run", "--quick", "--out", results]
    rows.append(_run("benchmarks", command, BENCH_SECONDS))
    progress.unlink(missing_ok=True)
    print()
    for name, outcome, seconds in rows:
        print(f"{name:32} {outcome:40} {seconds:6.1f} s")
    print(f"results: {results}")
    return int(any(outcome != "passed" for _, outcome, _ in rows))


def _run(name: str, command: list, seconds: int, progress: Path | None = None) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        code = subprocess.run([str(part) for part in command], cwd=ROOT, timeout=seconds).returncode
        outcome = "passed" if code == 0 else f"FAILED (exit {code})"
    except subprocess.TimeoutExpired:
        where = f" in {progress.read_text()}" if progress and progress.exists() else ""
        outcome = f"HUNG for {seconds} s{where}"
    return name, outcome, time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())

"""Functions of rows on the CPU, ours and torch's: ``python -m bench.cpu_rows`` (``--help`` says what it can leave out).

Calls of the two take turns, so that whatever else the machine does hits both; times are CPU times of one thread. A cell
is torch's time over ours, of the least of each, so 1 is torch's speed and more is faster. `forward` records nothing,
`both` is forward and backward through autograd.

malloc keeps what is freed, as far as it can be told to: else it gives results of some MB back to the system and takes them
again, page by page, of one side or the other as the heap happens to lie, and that is all that such rows would show.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import amp_kernels as ak

from .harness.case import DTYPES

SHAPES = "4x16 16x64 64x64 1024x64 1024x100 255x257 256x768 2048x768 16384x768 64x4097 16x50257 256x50257"
FORMATS = ("fp32", "bf16", "fp16")
EPS = 1e-5
SAMPLE = 0.002  # seconds of a batch
Call = Callable[[], Any]
# op -> (rows, weight, bias, target) -> result, of torch and of this package
PAIRS: dict[str, tuple[Callable, Callable]] = {
    "layer_norm": (
        lambda x, weight, bias, target: F.layer_norm(x, weight.shape, weight, bias, EPS),
        lambda x, weight, bias, target: ak.layer_norm(x, weight.shape, weight, bias, EPS),
    ),
    "rms_norm": (
        lambda x, weight, bias, target: F.rms_norm(x, weight.shape, weight, EPS),
        lambda x, weight, bias, target: ak.rms_norm(x, weight.shape, weight, EPS),
    ),
    "cross_entropy": (
        lambda x, weight, bias, target: F.cross_entropy(x, target),
        lambda x, weight, bias, target: ak.cross_entropy(x, target),
    ),
}


def calls(op: str, rows: int, columns: int, dtype: torch.dtype, backward: bool) -> tuple[Call, Call]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator).to(dtype)
    weight = (torch.rand(columns, generator=generator) + 0.5).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype)
    target = torch.randint(columns, (rows,), generator=generator)
    grad = torch.ones((), dtype=dtype) if op == "cross_entropy" else torch.randn(x.shape, generator=generator).to(dtype)
    leaves = {"layer_norm": [x, weight, bias], "rms_norm": [x, weight]}.get(op, [x])

    def call_of(function: Callable) -> Call:
        if not backward:
            return lambda: function(x, weight, bias, target)
        return lambda: torch.autograd.grad(function(x, weight, bias, target), leaves, grad)

    if backward:
        for leaf in leaves:
            leaf.requires_grad_()
    theirs, ours = PAIRS[op]
    return call_of(theirs), call_of(ours)


def least_times(pair: tuple[Call, Call], rounds: int) -> list[float]:
    """Seconds of a call of each: the least of `rounds` batches, each of about `SAMPLE` seconds, taken in turns."""
    repeats = []
    for call in pair:
        call()
        begin = time.thread_time()
        for _ in range(3):
            call()
        repeats.append(max(1, int(SAMPLE / max((time.thread_time() - begin) / 3, 1e-7))))
    least = [float("inf")] * 2
    for round_ in range(rounds):
        for which in (0, 1) if round_ % 2 else (1, 0):
            call = pair[which]
            call()  # what the other one left in the caches
            begin = time.thread_time()
            for _ in range(repeats[which]):
                call()
            least[which] = min(least[which], (time.thread_time() - begin) / repeats[which])
    return least


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory; does nothing on other systems."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for parameter, size in ((-1, 2**30), (-3, 2**25)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and its largest value
        if mallopt is not None:
            mallopt(parameter, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="*", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--shapes", nargs="*", default=SHAPES.split(), help="rows x columns")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread; {', '.join(FORMATS)}: torch's time over ours\n")
    gc.disable()
    keep_freed_memory()
    for op in options.ops:
        for which in ("forward", "both"):
            print(f"| {op}, {which} | " + " | ".join(options.shapes) + " |", flush=True)
            cells = []
            for shape in options.shapes:
                rows, columns = map(int, shape.split("x"))
                found = []
                for dtype in FORMATS:
                    pair = calls(op, rows, columns, DTYPES[dtype], which == "both")
                    theirs, ours = least_times(pair, options.rounds)
                    found.append(f"{theirs / ours:.2f}")
                cells.append(", ".join(found))
            print("| | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

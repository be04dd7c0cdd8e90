"""A training step with the optimizer's state on the device and in host memory, and the pipeline of buckets over a pretended bus.

python -m bench.host_state                                                # on CUDA: 24 layers of 4096, 4 K, 16 K and 32 K tokens
python -m bench.host_state --device cpu --layers 3 --width 64 --tokens 8 --bucket 8192 --sleep 0.002   # that it runs

The step is forward, backward with each layer recomputed, and AdamW (split24, 8-bit moments): plain, with released gradients and with
state in host memory, each without and with clipping where it is accepted; beside them torchao's CPUOffloadOptimizer over its AdamW in
BF16 without masters, if it is installed. The bits of the weights are compared (``SAME``), and with ``--blocking`` also with those of a
run in which each launch waits for the one before. Rows give the least time of the rounds and, on a GPU, the peak of torch's allocator.
The pipeline's stages sleep for each bucket: its time over that of the slowest stage is the overlap that threads and slots allow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_kernels as ak
from amp_kernels.optim import _host

from . import options as common
from .harness import environment

LAYOUT = {"master_weights": "split24", "state_dtype": "8bit"}
LR = 1e-4
#: By name: options, and whether gradients are released.
KINDS = {
    "plain": ({}, False),
    "plain, clipped": ({"max_grad_norm": 1.0}, False),
    "released": ({}, True),
    "host state": ({"state_device": "cpu"}, False),
    "host state, clipped": ({"state_device": "cpu", "max_grad_norm": 1.0}, False),
    "host state, released": ({"state_device": "cpu"}, True),
    "host state, released, clipped": ({"state_device": "cpu", "max_grad_norm": 1.0}, True),
}
PEER = "torchao CPUOffloadOptimizer"
STEPS = 3  # of each round


class Stack(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == PEER:
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=LR, fused=True)
    options, is_released = KINDS[kind]
    optimizer = ak.optim.AdamW(model.parameters(), lr=LR, **LAYOUT, **options)
    if is_released:
        ak.optim.release_gradients(optimizer)
    return optimizer


def row(kind: str, layers: int, width: int, tokens: int, rounds: int, device: torch.device) -> dict:
    """Times, memory, and a digest of the weights after all steps."""
    torch.manual_seed(0)
    model = Stack(nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=device) for _ in range(layers))
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    optimizer, times = optimizer_of(kind, model), []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(1 + rounds):
        start = time.perf_counter()
        for _ in range(STEPS):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / STEPS)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    digest = [weight.detach().view(torch.int16).sum(dtype=torch.int64).item() for weight in model.parameters()]
    return {"kind": kind, "tokens": tokens, "seconds": min(times[1:]), "peak_bytes": peak, "digest": digest}


def steps(options: argparse.Namespace) -> Iterator[dict]:
    for tokens in options.tokens:
        for kind in options.kinds:
            yield row(kind, options.layers, options.width, tokens, options.rounds, options.device)
            if options.device.type == "cuda":
                torch.cuda.empty_cache()


def pipeline(stages: dict[str, float], buckets: int) -> dict:
    """The time of ``buckets`` whose stages sleep so long, over that of the slowest stage alone."""
    line = _host.Pipeline(range(_host.SLOTS), 1)

    def sleeping(stage: str) -> Callable[[int], None]:
        return lambda _: time.sleep(stages[stage])

    start = time.perf_counter()
    for _ in range(buckets):
        slot = line.take()
        sleeping("down")(slot)
        line.put(slot, sleeping("update"), sleeping("back"))
    line.drain()
    seconds = time.perf_counter() - start
    return {
        "stages": stages,
        "buckets": buckets,
        "seconds": seconds,
        "ratio": seconds / (buckets * max(stages.values())),
    }


#: The kinds that must have the bits of another one; on a CPU, where all updates and norms run in one place, the rest, too.
SAME = {"released": "plain", "host state, released": "host state"}
SAME_ON_CPU = {
    "host state": "plain",
    "host state, clipped": "plain, clipped",
    "host state, released, clipped": "plain, clipped",
}


def differing(rows: list[dict], device: torch.device) -> list[str]:
    """The rows whose weights have other bits than they must."""
    same = {**SAME, **(SAME_ON_CPU if device.type == "cpu" else {})}
    digests = {(r["kind"], r["tokens"]): r["digest"] for r in rows}
    return [
        f"{kind} at {tokens} tokens"
        for (kind, tokens), digest in digests.items()
        if digests.get((same.get(kind), tokens), digest) != digest
    ]


def blocking(argv: list[str]) -> list[dict]:
    """The rows of a run in which each launch waits for the one before."""
    command = [sys.executable, "-m", "bench.host_state", *[word for word in argv if word != "--blocking"], "--rows"]
    environ = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
    return json.loads(subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.host_state", description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--layers", type=common.positive, default=24)
    parser.add_argument("--width", type=common.positive, default=4096)
    parser.add_argument("--tokens", default="4096,16384,32768", help="of a batch, separated by commas")
    parser.add_argument("--kinds", help=f"some of: {'; '.join([*KINDS, PEER])}; separated by semicolons")
    parser.add_argument("--rounds", type=common.positive, default=3)
    parser.add_argument("--bucket", type=common.positive, default=_host.BUCKET_BYTES, help="bytes of a bucket")
    parser.add_argument("--sleep", type=float, default=0.02, help="seconds of the pretended bus for each bucket")
    parser.add_argument(
        "--blocking", action="store_true", help="compare the bits with a run under CUDA_LAUNCH_BLOCKING=1"
    )
    parser.add_argument("--rows", action="store_true", help="print the rows as JSON alone")
    parser.add_argument("--out", type=Path, help="folder for host_state.json")
    options = parser.parse_args(argv)
    options.device = common.device(parser, options.device)
    options.tokens = [common.positive(number) for number in options.tokens.split(",")]
    known = [*KINDS]
    with contextlib.suppress(ImportError):
        import torchao.optim  # noqa: F401

        known += [PEER] * (options.device.type == "cuda")  # its class needs CUDA
    options.kinds = known if options.kinds is None else [kind.strip() for kind in options.kinds.split(";")]
    if unknown := [kind for kind in options.kinds if kind not in known]:
        parser.error(f"argument --kinds: {unknown[0]!r} is unknown or not installed; accepted: {'; '.join(known)}")
    return options


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    _host.BUCKET_BYTES = options.bucket
    rows = list(steps(options))
    if options.rows:
        print(json.dumps(rows))
        return 0
    for r in rows:
        peak = "" if r["peak_bytes"] is None else f", peak {r['peak_bytes'] / 2**30:.2f} GiB"
        print(f"{r['kind']:30} {r['tokens']:6} tokens  {1e3 * r['seconds']:9.2f} ms a step{peak}")
    stages = {"down": options.sleep, "update": 1.2 * options.sleep, "back": options.sleep}
    pretended = pipeline(stages, math.ceil(0.8 / options.sleep) if options.sleep > 0.005 else 20)
    print(
        f"pipeline over a pretended bus: {pretended['ratio']:.2f} of its slowest stage, {pretended['buckets']} buckets"
    )
    wrong = differing(rows, options.device)
    if options.blocking and [r["digest"] for r in rows] != [r["digest"] for r in blocking(argv)]:
        wrong.append("a run under CUDA_LAUNCH_BLOCKING=1")
    for name in wrong:
        print(f"other bits: {name}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {**environment.describe(options.device), "rows": rows, "pipeline": pretended}
        (options.out / "host_state.json").write_text(json.dumps(record, indent=1, default=str))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Records the bits that every op, optimizer and layer computes, and compares two records: a refactoring changes none.

    python -m tests.bits record build/bits.json     # before
    python -m tests.bits compare build/bits.json    # after; exit code 1 if a call's bits differ or a call is missing

``TRITON_INTERPRET=1`` adds the Triton kernels. Bits depend on the processor: record and compare on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import amp_kernels as ak
from amp_kernels._dispatch import cpu_isa
from amp_kernels._dispatch.library import REGISTRY, Op
from amp_kernels.cli.check import available_backends

from .helpers.backends import use
from .ops.composites import samples

OPTIMIZERS = {
    "AdamW": {},
    "AdamW amsgrad": {"amsgrad": True},
    "Adam": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Lion": {},
    "LAMB": {},
}
LAYERS = {
    "linear": lambda: torch.nn.Linear(40, 24),
    "linear + gelu": lambda: torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.GELU(), torch.nn.Linear(24, 8)),
    "layer_norm": lambda: torch.nn.LayerNorm(40),
    "rms_norm": lambda: torch.nn.RMSNorm(40),
}


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor within lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors(value[key])


def digest(*values: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors(list(values)):
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def ways(op: Op) -> list[str]:
    """The backends of an op on a CPU, one entry for each instruction set."""
    names = ["reference", *available_backends(op, "cpu")]
    isas = [f"cpu/{isa}" for isa in cpu_isa.available()] if op.tensor_cores else ["cpu"]
    return [way for name in names for way in (isas if name == "cpu" else [name])]


def op_records(op: Op) -> Iterator[tuple[str, str]]:
    for way in ways(op):
        for number, (args, kwargs) in enumerate(samples(op, "cpu")):
            with use(way):
                returned = op(*args, **kwargs)
            mutated = [args[i] if i < len(args) else kwargs.get(name) for i, name in op.mutated]
            yield f"{op.name} {way} {number}", digest(returned, mutated)


def model_of(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    return model.to(dtype)


def optimizer_records() -> Iterator[tuple[str, str]]:
    for name, options in OPTIMIZERS.items():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            kinds = ("fp32",) if dtype is torch.float32 else ("fp32", "split", "none", "none_rne")
            for masters in kinds:
                for more in ({}, {"max_grad_norm": 0.1, "state_dtype": torch.bfloat16, "ema_decay": 0.9}):
                    model = model_of(dtype)
                    kind = getattr(ak.optim, name.split()[0])
                    optimizer = kind(model.parameters(), lr=0.01, master_weights=masters, **options, **more)
                    scaler = ak.GradScaler("cpu", init_scale=64.0, enabled=dtype is not torch.bfloat16)
                    for step in range(4):
                        optimizer.zero_grad()
                        x = torch.linspace(-2, 2, 60).view(5, 12).to(dtype) * (float("inf") if step == 2 else 1.0)
                        scaler.scale(model(x).float().square().mean()).backward()
                        scaler.step(optimizer)
                        scaler.update()
                    found = digest(list(model.parameters()), optimizer.state_dict()["state"], scaler.state_dict())
                    yield f"{name} {dtype} {masters} {sorted(more)}", found


def layer_records() -> Iterator[tuple[str, str]]:
    for name, make in LAYERS.items():
        for dtype in (torch.float16, torch.bfloat16):
            torch.manual_seed(1)
            layer = ak.convert(torch.nn.Sequential(make()))
            x = torch.randn(6, 40, requires_grad=True)
            with torch.autocast("cpu", dtype):
                y = layer(x)
            y.float().square().sum().backward()
            yield f"{name} {dtype}", digest(y, x.grad, [p.grad for p in layer.parameters()])


def record(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        found.update(op_records(REGISTRY[name]))
    if os.environ.get("TRITON_INTERPRET") != "1":
        found.update(optimizer_records())
        found.update(layer_records())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = record(sorted(REGISTRY))
    if arguments.command == "record":
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        arguments.file.write_text(json.dumps(found, indent=1))
        print(f"{len(found)} calls recorded")
        return 0
    before = json.loads(arguments.file.read_text())
    wrong = [key for key, value in before.items() if found.get(key) != value]
    print("\n".join([*wrong, f"{len(before) - len(wrong)} of {len(before)} calls have the same bits"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

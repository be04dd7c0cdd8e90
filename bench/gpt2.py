"""A training step of GPT-2, as users write it with torch.amp and as it is with amp_kernels: time, tokens a second, memory.

python -m bench.gpt2                                      # 124 M parameters, 32 x 1,024 tokens, bf16 and fp16, on CUDA
python -m bench.gpt2 --model gpt2-1.5b --dtype bf16 --provider torch,amp_kernels --profile
python -m bench.gpt2 --dtype fp32,tf32 --provider torch   # what mixed precision is compared with
python -m bench.gpt2 --peers                              # also with the optimizers and kernels of other libraries
python -m bench.gpt2 --device cpu --layers 1 --batch 1 --steps 1     # that it runs

All providers are built and warmed up first, one after the other, which gives each one's peak memory; then they take turns (A B A B),
so that a hot GPU's clock hits all alike. The step is forward, backward, clipping to norm 1 and AdamW, with loss scaling in fp16.

"three lines" is `ak.convert` of model and loss, and the optimizer. All other rows of amp_kernels also compute head and loss by
`ak.linear_cross_entropy`, which a user writes into the model; torch's rows compute them separately. The first loss of every provider
is compared with float64; one that is wrong is reported, not timed, and makes the exit status 1. The rows of other libraries are
torch's step with their optimizer, and of Liger and Apex with their norms and, of Liger, the head with loss.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import amp_kernels as ak

from . import options as common
from .harness import environment, sources
from .harness.case import DTYPES
from .harness.check import Mismatch
from .harness.rows import OURS
from .harness.timer import kernel_times
from .training import peer_trainers
from .training.gpt import CONTEXT, GPT2, GPT2_MODELS, WORDS, GPT2Config
from .training.trainers import TRAINERS, our_adamw, our_muon, torch_muon

LR = 1e-4
LOSS_BOUND = 5e-3  # of the first loss: rounding in 16 bits, which 12 layers add up
GROWTH_INTERVAL = 2000  # torch's default
Step = Callable[[], torch.Tensor]


def build(
    provider: str,
    model: GPT2,
    data: tuple,
    dtype: torch.dtype,
    compiled: bool = False,
    graph: bool = False,
    fused_norms: bool = False,
    fused_loss: bool = True,
    fuse_residuals: bool = False,
    kernels: Callable[[GPT2], None] = lambda model: None,
    tf32: bool = False,
    **of_trainer,
) -> Step:
    """The step of this trainer: its forward compiled, all of it as one CUDA graph, the model's additions in its norms by an edit or
    by the conversion, its head in the loss (only this package's); `kernels` puts another library's modules into the model."""
    device = data[0].device
    if has_shadows(provider, compiled):
        of_trainer["optimizers"] = functools.partial(of_trainer.get("optimizers", our_adamw), shadow_dtype=dtype)
    trainer = TRAINERS[provider](model, device, LR, dtype == torch.float16, GROWTH_INTERVAL, **of_trainer)
    trainer.model.fused_loss = fused_loss and provider == OURS
    trainer.model.fused_norms = fused_norms
    if fuse_residuals:
        ak.convert(trainer.model, fuse_residuals=True)
    kernels(trainer.model)
    forward = torch.compile(trainer.model) if compiled else trainer.model

    def step(*data):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = forward(*data)
        trainer.update(loss)
        return loss.detach()

    run = (
        ak.graph_step(step, model=trainer.model, optimizer=trainer.optimizer, scaler=trainer.scaler) if graph else step
    )
    return lambda: run(*data)


def has_shadows(provider: str, compiled: bool = False, **_: bool) -> bool:
    """The update writes 16-bit weights, so that no forward casts any. A compiled forward casts them all the same."""
    return provider == OURS and not compiled


PROVIDERS = {
    "torch": {"provider": "torch"},
    "torch.compile": {"provider": "torch", "compiled": True},
    "amp_kernels three lines": {"provider": OURS, "fused_loss": False},
    "amp_kernels": {"provider": OURS},
    "amp_kernels compile": {"provider": OURS, "compiled": True},
    "amp_kernels fuse_residuals": {"provider": OURS, "fuse_residuals": True},
    "amp_kernels fused norms": {"provider": OURS, "fused_norms": True},
    "amp_kernels graph": {"provider": OURS, "graph": True},
    "torch Muon": {"provider": "torch", "optimizers": torch_muon},
    "amp_kernels Muon": {"provider": OURS, "optimizers": our_muon},
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpt2", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=GPT2_MODELS, default="gpt2-124m")
    parser.add_argument("--dtype", help="comma-separated (default: bf16,fp16)")
    parser.add_argument("--provider", help="comma-separated (default: all)")
    parser.add_argument("--device", help="cpu, cuda or cuda:<index> (default: CUDA if there is one)")
    parser.add_argument(
        "--batch", type=common.positive, help=f"sequences of {CONTEXT} tokens a step (default: the model's)"
    )
    parser.add_argument("--layers", type=common.positive, help="default: the model's")
    parser.add_argument("--steps", type=common.positive, default=10, help="of each provider in a turn (default: 10)")
    parser.add_argument("--rounds", type=common.positive, default=5, help="turns (default: 5)")
    parser.add_argument("--peers", action="store_true", help="also with the parts of other libraries that run here")
    parser.add_argument("--profile", action="store_true", help="also list the kernels that take longest")
    parser.add_argument("--out", type=Path, help="folder that gets gpt2.jsonl")
    options = parser.parse_args(argv)
    options.dtype = common.names(parser, "--dtype", options.dtype or "bf16,fp16", ("bf16", "fp16", "fp32", "tf32"))
    options.device = common.device(parser, options.device)
    options.providers = dict(PROVIDERS)
    if options.peers or options.provider:
        options.providers |= peer_trainers.providers(options.device)
    options.provider = common.names(parser, "--provider", options.provider, options.providers)
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    config = GPT2_MODELS[options.model]
    config = replace(config, batch=options.batch or config.batch, layers=options.layers or config.layers)
    machine = environment.describe(options.device)
    print(
        f"{machine['device']}; {options.model}, {config.layers} layers, {config.batch} x {CONTEXT} tokens", flush=True
    )
    rows, wrong = [], 0
    for dtype in options.dtype:
        measured = measure(options, config, dtype)
        rows += [row | {key: machine[key] for key in ("device", "commit", "date", "versions")} for row in measured]
        timed = {row["provider"] for row in measured}
        wrong += sum(name in PROVIDERS and name not in timed for name in options.provider)
        if options.out:  # now: the next dtype may be cut off
            options.out.mkdir(parents=True, exist_ok=True)
            sources.record(options.out, machine["commit"])
            (options.out / "gpt2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return int(wrong > 0)


def measure(options: argparse.Namespace, config: GPT2Config, dtype: str) -> list[dict]:
    device, tokens = options.device, config.batch * CONTEXT
    generator = torch.Generator().manual_seed(0)
    data = tuple(torch.randint(WORDS, (config.batch, CONTEXT), generator=generator).to(device) for _ in range(2))
    exact = exact_loss(fresh(config, device), data)
    steps: dict[str, Step] = {}
    rows = []
    for name in options.provider:
        row = {"model": options.model, "layers": config.layers, "batch": config.batch, "dtype": dtype, "provider": name}
        try:
            steps[name] = prepared(row, options.providers[name], config, data, exact)
            rows.append(row)
        except Exception as error:
            if name in PROVIDERS and not isinstance(error, Mismatch):
                raise
            print(f"NOT TIMED: {dtype} {name}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
    times: dict[str, list[float]] = {name: [] for name in steps}
    clocks: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, options.steps, device))
            clocks[name] = environment.clocks(device)  # now: the GPU slows down when it idles
    first = next(iter(steps), None)
    for row in rows:
        name = row["provider"]
        row["ms"] = statistics.median(times[name]) * 1e3
        row["ktok_per_s"] = tokens / row["ms"]
        row |= clocks[name]
        row["speedup"] = statistics.median(a / b for a, b in zip(times[first], times[name], strict=True))
        memory = f", peak {row['peak_gib']:.2f} GiB" if "peak_gib" in row else ""
        print(
            f"{dtype} {name:24} {row['ms']:8.1f} ms a step, {row['ktok_per_s']:7.1f} thousand tokens/s, "
            f"{row['speedup']:.2f} of {first}{memory}, loss {row['losses'][0]:.4f} .. {row['losses'][-1]:.4f}",
            flush=True,
        )
    for name, step in steps.items() if options.profile else ():
        print(f"\n{dtype} {name}: microseconds of a step")
        for kernel, count, micros in kernel_times(step, device)[:30]:
            print(f"{micros:10.0f} {count:5d} x {kernel[:130]}")
    sys.stdout.flush()
    return rows


def prepared(row: dict, provider: dict, config: GPT2Config, data: tuple, exact: float) -> Step:
    """A provider's step after four of them, whose losses and peak memory go into the row.

    Raises Mismatch if the first loss is not `exact`.
    """
    device = data[0].device
    before = start_peak(device)
    tf32, dtype = row["dtype"] == "tf32", DTYPES.get(row["dtype"], torch.float32)
    step = build(model=fresh(config, device), data=data, dtype=dtype, tf32=tf32, **provider)
    row["shadows"] = has_shadows(**provider)
    row["losses"] = [step().item() for _ in range(4)]
    row["error"] = abs(row["losses"][0] / exact - 1)
    if not row["error"] <= LOSS_BOUND:
        raise Mismatch(f"the first loss is {row['losses'][0]:.4f} instead of {exact:.4f}")
    if device.type == "cuda":
        row["peak_gib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    return step


def fresh(config: GPT2Config, device: torch.device) -> GPT2:
    """The same model for all."""
    torch.manual_seed(0)
    with device:
        return GPT2(config, config.layers)


def exact_loss(model: GPT2, data: tuple) -> float:
    """The loss of the first step in float64, sequence by sequence: of the whole batch, the logits would take 13 GB."""
    model = model.double()
    with torch.no_grad():
        return statistics.fmean(model(*(t[None] for t in sequence)).item() for sequence in zip(*data, strict=True))


def start_peak(device: torch.device) -> int:
    """Bytes that are held now; the peak is counted from here on."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def seconds(step: Step, steps: int, device: torch.device) -> float:
    """Wall seconds of a step, over `steps` of them."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - begin) / steps


if __name__ == "__main__":
    sys.exit(main())

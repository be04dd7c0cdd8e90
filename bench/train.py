"""The training benchmark: train a byte-level GPT on real text in FP32, BF16 and FP16, with stock torch AMP and with amp_kernels.

python -m bench.train                    # every precision with both providers, then a table, a plot and a JSON record
python -m bench.train --dtype fp16 --provider amp_kernels --steps 200
torchrun --nproc-per-node 8 -m bench.train --ddp    # or --fsdp, --hsdp 2, --tp 4: on many processes (ranks.py)
python -m bench.train --resume           # after Ctrl-C, a crash or a kill: continues bit for bit
"""

import sys

if __package__ in (None, ""):  # run as a file: make `bench` a package, and keep this folder's names off the top level
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    __package__ = "bench"
    import bench  # noqa: F401

import argparse
import dataclasses
import functools
import os
import shutil
from pathlib import Path

import torch

import amp_kernels as ak

from . import options as common
from .harness import environment
from .harness.case import DTYPES
from .training import report
from .training.data import Text, load_text
from .training.gpt import MODELS
from .training.runner import Interrupts, run_all
from .training.trainers import TRAINERS
from .training.trial import KEPT, Settings, Trial

CHECKPOINTS = "checkpoints"  # folder in --out


class Parser(argparse.ArgumentParser):
    """A bad option is shown as one line, without the usage."""

    def error(self, message: str):
        raise ValueError(f"{message} (--help lists the options)")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m bench.train", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", choices=MODELS, help="default: micro on the CPU, gpt2 on CUDA")
    parser.add_argument("--steps", type=common.positive, help="steps of each run (default: the model's)")
    parser.add_argument("--dtype", help=f"comma-separated list of {', '.join(DTYPES)} (default: all)")
    parser.add_argument("--provider", help=f"comma-separated list of {', '.join(TRAINERS)} (default: all)")
    parser.add_argument("--device", help="cpu, cuda or cuda:<index> (default: CUDA if there is one)")
    parser.add_argument("--seed", type=int, help="of weights and batches (default 0)")
    parser.add_argument(
        "--deterministic", action="store_true", help="only deterministic kernels (CUDA attention has others)"
    )
    parser.add_argument(
        "--save-every",
        type=common.positive,
        default=100,
        metavar="STEPS",
        help="steps between two checkpoints (default 100)",
    )
    parser.add_argument(
        "--out", type=Path, help="folder of table, plot, record and checkpoints (default bench/results/<device>/train)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the interrupted run of the --out folder, with its options"
    )
    layout = parser.add_mutually_exclusive_group()
    for name, help in (("ddp", "DistributedDataParallel"), ("fsdp", "fully_shard")):
        layout.add_argument(
            f"--{name}", dest="layout", action="store_const", const=(name, 1), help=f"under torchrun: {help}"
        )
    for name, metavar, help in (
        ("hsdp", "R", "fully_shard in R replicas"),
        ("tp", "T", "tensor parallel over T ranks"),
    ):
        layout.add_argument(
            f"--{name}",
            dest="layout",
            metavar=metavar,
            type=lambda number, name=name: (name, common.positive(number)),
            help=f"under torchrun: {help}",
        )
    options = parser.parse_args(argv)
    for name, accepted in (("dtype", DTYPES), ("provider", TRAINERS)):
        if (given := getattr(options, name)) is not None:
            setattr(options, name, tuple(common.names(parser, f"--{name}", given, accepted)))
    return options


def settings_from(options: argparse.Namespace, device: torch.device) -> Settings:
    """Options with their defaults filled in. Raises ValueError."""
    model = options.model or ("gpt2" if device.type == "cuda" else "micro")
    dtypes = options.dtype or tuple(DTYPES)
    if device.type == "cuda" and "bf16" in dtypes and not torch.cuda.is_bf16_supported(including_emulation=False):
        if options.dtype:
            raise ValueError(f"argument --dtype: {environment.device_name(device)} has no bf16; choose fp16 or fp32")
        print(f"{environment.device_name(device)} has no bf16: left out")
        dtypes = tuple(dtype for dtype in dtypes if dtype != "bf16")
    return Settings(
        model=model,
        steps=options.steps or MODELS[model].steps,
        dtypes=dtypes,
        providers=options.provider or tuple(TRAINERS),
        seed=0 if options.seed is None else options.seed,
        deterministic=options.deterministic,
        device=str(device),
    )


def resume(options: argparse.Namespace, folder: Path, text: Text) -> tuple[Settings, list[dict], Path | None]:
    """Settings, finished runs and the unfinished one's checkpoint. Options given with --resume must agree with them."""
    path = ak.checkpoint.latest(folder)
    if path is None:
        raise ValueError(f"argument --resume: no whole checkpoint in {folder}: nothing to resume")
    saved = ak.checkpoint.load(path, rng=False)
    settings = Settings(**{name: tuple(v) if isinstance(v, list) else v for name, v in saved["settings"].items()})
    asked = {
        "model": options.model,
        "steps": options.steps,
        "dtypes": options.dtype,
        "providers": options.provider,
        "seed": options.seed,
        "deterministic": True if options.deterministic else None,
        "device": options.device and str(environment.pick_device(options.device)),
    }
    for name, value in asked.items():
        if value is not None and value != getattr(settings, name):
            raise ValueError(
                f"argument --resume: the checkpoint has {name} = {getattr(settings, name)}, the command line {value}"
            )
    if saved["text"] != text.sha256:
        raise ValueError(f"argument --resume: the checkpoint was trained on another text than {text.source}")
    environment.pick_device(settings.device)
    return settings, saved["finished"], path if saved["running"] else None


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the process's exit code."""
    try:
        options = parse(argv)
        text = load_text()
        device = environment.pick_device(options.device)
        if options.layout:
            from .training import ranks  # imports what one process does without

            return ranks.main(*options.layout, options, text, device, functools.partial(settings_from, options))
        out = options.out or environment.results_folder(device) / "train"
        if options.resume:
            settings, finished, running = resume(options, out / CHECKPOINTS, text)
        else:
            settings, finished, running = settings_from(options, device), [], None
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return run(settings, text, finished, running, out, options.save_every)
    except torch.OutOfMemoryError as error:
        print(f"error: not enough GPU memory; choose a smaller --model ({str(error).splitlines()[0]})", file=sys.stderr)
        return 1


def run(settings: Settings, text: Text, finished: list[dict], running: Path | None, out: Path, save_every: int) -> int:
    """Every run that is not in `finished` yet, the first from the checkpoint `running` if there is one; then the report."""
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    machine = environment.describe(torch.device(settings.device))
    plan = [(provider, dtype) for dtype in settings.dtypes for provider in settings.providers]
    summary = f"{settings.model}, {settings.steps} steps, seed {settings.seed}, on {machine['device']}"
    print(f"{summary}; text: {text.source}, {text.train.numel():,} training bytes; {len(plan)} runs")

    folder = out / CHECKPOINTS
    extra = {"settings": dataclasses.asdict(settings), "text": text.sha256, "finished": finished}

    def save(trial: Trial | None = None) -> Path:
        path = folder / f"{len(finished)}-{trial.step if trial else 0}.pt"
        if trial is None:
            ak.checkpoint.save(path, extra={**extra, "running": None}, keep=KEPT)
        else:
            trial.save(path, **extra)
        return path

    def save_on_the_way(*trial: Trial) -> None:
        try:
            save(*trial)
        except OSError as error:  # a full disk ends no run: the checkpoint before is still there
            print(f"not saved: {error}", file=sys.stderr, flush=True)

    def start(provider: str, dtype: str, running: Path | None) -> Trial:
        if running is None:  # so that --resume never finds another run's checkpoint in the same folder
            save_on_the_way()
        return Trial(settings, text, provider, dtype, running)

    interrupts = Interrupts()
    try:
        interrupted = run_all(plan, finished, running, start, save_on_the_way, interrupts, save_every)
        if interrupted is not None:
            try:
                path = save(interrupted)
            except OSError as error:
                print(f"error: not saved: {error}", file=sys.stderr)
                return 1
            print(f"saved {path} at step {interrupted.step} of {interrupted.name}; add --resume to continue")
            return 128 + interrupts.signal
    finally:
        interrupts.restore()
    _report(settings, text, finished, out, machine, summary)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _report(settings: Settings, text: Text, finished: list[dict], out: Path, machine: dict, summary: str) -> None:
    """Table, plot and record of all runs."""
    shown = report.table(finished)
    print(f"\n{shown}\n")
    record = {
        "settings": dataclasses.asdict(settings),
        "model": dataclasses.asdict(MODELS[settings.model]),
        "text": {"source": text.source, "sha256": text.sha256},
        "machine": machine,
        "memory": "peak of torch's allocator over the run"
        if machine["device_type"] == "cuda"
        else "peak of torch's CPU allocator in a step",
        "runs": finished,
    }
    report.write_json(out / "train.json", record)
    (out / "train.txt").write_text(f"{summary}\n{shown}\n")
    written = ["train.json", "train.txt"]
    if report.plot(out / "train.png", finished, summary):
        written.insert(0, "train.png")
    else:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
    print(f"{', '.join(written)} in {out}")


if __name__ == "__main__":
    sys.exit(main())

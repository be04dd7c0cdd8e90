"""The training benchmark on many processes: `torchrun --nproc-per-node N -m bench.train --ddp | --fsdp | --hsdp R | --tp T`.

Over gloo without GPUs and NCCL with them. Weak scaling: every data-parallel rank trains on batches of the model's size of its
own. The first rank prints; it leaves one record a layout and number of ranks in --out, and a table of all that are there.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ..harness import environment
from ..harness.tables import align
from . import report
from .collectives import CountSent
from .data import Text
from .progress import Progress
from .runner import Interrupts, run_all
from .trial import KEPT, Settings, Trial


class Layout:
    """Places a model on the ranks: `name` is ddp, fsdp, hsdp or tp, `number` the replicas of hsdp or the width of tp."""

    def __init__(self, name: str, number: int, device: torch.device):
        self.name, self.world = name, dist.get_world_size()
        number = number if name in ("hsdp", "tp") else 1
        if self.world % number:
            raise ValueError(f"argument --{name}: {number} does not divide the number of processes, {self.world}")
        self.title = name if name in ("ddp", "fsdp") else f"{name} {number}"
        shape, names = (self.world,), ("dp",)
        if name == "hsdp":
            shape, names = (number, self.world // number), ("replicate", "dp")
        elif name == "tp":
            shape, names = (self.world // number, number), ("dp", "tp")
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        #: Ranks with batches of their own, and which of them this is.
        self.data_ranks = self.world // number if name == "tp" else self.world
        self.data_rank = self.mesh["dp"].get_local_rank() if name == "tp" else dist.get_rank()

    def place(self, model: nn.Module) -> nn.Module:
        if self.name == "ddp":
            return DistributedDataParallel(model)
        mesh = self.mesh
        if self.name == "tp":
            mesh = self.mesh["dp"]
            for block in model.blocks:
                parallelize_module(block, self.mesh["tp"], {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class RankTrial(Trial):
    """One rank's part of a trial; `checkpoint` is the folder of a run to continue, by any number of ranks."""

    def __init__(self, layout: Layout, *trial):
        self.layout, self.sent = layout, CountSent()
        super().__init__(*trial, layout=layout)
        if self.step == 0:
            torch.manual_seed(self.settings.seed + 1 + layout.data_rank)  # of dropout

    def _batch(self):
        number = self.step * self.layout.data_ranks + self.layout.data_rank
        return self.text.batch(self.settings.seed, number, self.config.batch, self.config.context)

    def _segment(self, interrupted) -> bool:
        """The ranks stop together."""
        super()._segment(lambda: False)
        flag = torch.tensor(float(interrupted()), device=self.device)
        dist.all_reduce(flag)
        return flag.item() > 0

    def _progress(self) -> Progress:
        return Progress(self.name, self.settings.steps, self.step, silent=dist.get_rank() > 0)

    def _train_step(self) -> None:
        # DistributedDataParallel forms its buckets in the second; fully_shard's root stays gathered over a validation.
        usual = (step for step in range(self.first_step + 2, self.settings.steps) if step not in self.points)
        with self.sent if self.step == next(usual, self.settings.steps - 1) else contextlib.nullcontext():
            super()._train_step()

    def _state(self) -> dict:
        parts = self.trainer.parts()
        model, optimizer = get_state_dict(parts["model"], parts["optimizer"])
        return {"model": model, "optimizer": optimizer, "scaler": parts["scaler"]}

    def save(self, path: Path, **extra) -> None:
        running = self._running() | {"losses": self._averaged(self.losses), "scales": self._averaged(self.scales)}
        generators = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.device)
        random = [None] * self.layout.world
        dist.all_gather_object(random, generators)
        if dist.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            torch.save({**extra, "running": running, "random": random}, path / "run.pt")
        dcp.save(self._state(), checkpoint_id=path)  # writes .metadata last
        if dist.get_rank() == 0:
            for old in checkpoints(path.parent)[:-KEPT]:
                shutil.rmtree(old)

    def _load(self, path: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        parts = self.trainer.parts()
        set_state_dict(
            parts["model"], parts["optimizer"], model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        saved = torch.load(path / "run.pt", map_location=self.device, weights_only=True)
        self._restore(saved["running"])
        if len(saved["random"]) == self.layout.world:  # another number of ranks draws other dropout
            own = saved["random"][dist.get_rank()]
            torch.set_rng_state(own["cpu"].cpu())
            if "cuda" in own:
                torch.cuda.set_rng_state(own["cuda"].cpu(), self.device)

    def _averaged(self, history: torch.Tensor) -> torch.Tensor:
        history = history / self.layout.world
        dist.all_reduce(history)
        return history

    def result(self) -> dict:
        self.losses, self.scales = map(self._averaged, (self.losses, self.scales))
        found = super().result()
        found["tokens_per_second"] *= self.layout.data_ranks
        return found | {"bytes_sent_per_step": self.sent.bytes, "collectives": self.sent.calls}


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    whole = [path.parent for path in folder.glob("*-*/.metadata")]
    return sorted(whole, key=lambda path: tuple(map(int, path.name.split("-"))))


def start(device: torch.device) -> torch.device:
    """This process's device, with the process group made."""
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "arguments --ddp, --fsdp, --hsdp, --tp: start the processes with torchrun --nproc-per-node N -m bench.train"
        )
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda")  # this process's, whichever it is
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def resumed(folder: Path, settings: Settings, text: Text) -> tuple[list[dict], Path | None]:
    """Finished runs and the unfinished one's checkpoint."""
    whole = checkpoints(folder)
    if not whole:
        raise ValueError(f"argument --resume: no whole checkpoint in {folder}: nothing to resume")
    saved = torch.load(whole[-1] / "run.pt", weights_only=True)
    if saved["settings"] != dataclasses.asdict(settings) or saved["text"] != text.sha256:
        raise ValueError("argument --resume: the checkpoint is of a run with other options or another text")
    return saved["finished"], whole[-1]


def run(layout: Layout, settings: Settings, text: Text, out: Path, resume: bool, interrupts, save_every: int) -> int:
    """Every precision and provider, then a record and the table; the exit code."""
    device, folder, first = torch.device(settings.device), out / f"checkpoints-{layout.title}", dist.get_rank() == 0
    finished, running = resumed(folder, settings, text) if resume else ([], None)
    extra = {"settings": dataclasses.asdict(settings), "text": text.sha256, "finished": finished}
    plan = [(provider, dtype) for dtype in settings.dtypes for provider in settings.providers]

    def start(*trial) -> RankTrial:
        return RankTrial(layout, settings, text, *trial)

    def save(trial: RankTrial) -> None:
        trial.save(folder / f"{len(finished)}-{trial.step}", **extra)

    interrupted = run_all(plan, finished, running, start, save, interrupts, save_every)
    if interrupted is not None:
        save(interrupted)
        if first:
            print(f"saved {folder} at step {interrupted.step} of {interrupted.name}; add --resume to continue")
        return 128 + (interrupts.signal or 0)
    if first:
        shutil.rmtree(folder, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        record = {
            "layout": layout.title,
            "ranks": layout.world,
            "settings": dataclasses.asdict(settings),
            "machine": environment.describe(device),
            "runs": finished,
        }
        report.write_json(out / f"ranks-{layout.title.replace(' ', '-')}-{layout.world}.json", record)
        print(f"\n{report.table(finished)}\n\n{scaling(out)}\n")
    dist.barrier()  # nobody leaves while another still talks to it
    return 0


def scaling(out: Path) -> str:
    """Every record in the folder: tokens/s, also a rank, and what a rank sends in a step if each collective is a ring."""
    rows = [("layout", "ranks", "precision", "provider", "tokens/s", "a rank", "bytes sent a step", "collectives")]
    records = [json.loads(path.read_text()) for path in out.glob("ranks-*.json")]
    for record in sorted(records, key=lambda record: (record["layout"], record["ranks"])):
        for found in record["runs"]:
            calls = ", ".join(f"{n} {kind}" for kind, n in found["collectives"].items() if n)
            rate = found["tokens_per_second"]
            rows.append(
                (
                    record["layout"],
                    str(record["ranks"]),
                    found["dtype"],
                    found["provider"],
                    f"{rate:,.0f}",
                    f"{rate / record['ranks']:,.0f}",
                    f"{found['bytes_sent_per_step']:,.0f}",
                    calls,
                )
            )
    return align(rows, left=1)


def main(name: str, number: int, options, text: Text, device: torch.device, settings_from) -> int:
    """The benchmark on the ranks of torchrun; `settings_from(device)` has the options' defaults filled in."""
    try:
        device = start(device)
        settings = dataclasses.replace(settings_from(device), device=device.type)
        layout = Layout(name, number, device)
        if name == "tp" and "torch" in settings.providers:
            settings = dataclasses.replace(settings, providers=("amp_kernels",))
            if dist.get_rank() == 0:
                print("tp: torch.nn.utils.clip_grad_norm_ takes no gradients of two meshes; provider torch left out")
        out = options.out or environment.results_folder(device) / "train"
        return run(layout, settings, text, out, options.resume, Interrupts(), options.save_every)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

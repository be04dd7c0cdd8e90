"""The training benchmark on two processes: what it prints and records, what it counts, and that it goes on where it stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench import train
from bench.training import ranks as bench_ranks
from bench.training.collectives import CountSent
from bench.training.data import load_text
from bench.training.gpt import GPT, MODELS
from bench.training.trial import Settings

from ..helpers.patience import PATIENCE
from .worlds import everyone

ROOT = Path(__file__).parents[2]
COUNTED = ("collectives", "bytes_sent_per_step")
SETTINGS = Settings("nano", 20, ("fp16",), ("amp_kernels",), scaler=True, seed=0, deterministic=False, device="cpu")


def test_two_processes_train_and_count_what_they_send(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "bench.train"]
    command += ["--model", "nano", "--device", "cpu", "--steps", "6", "--dtype", "fp16", "--provider", "amp_kernels"]
    run = subprocess.run(
        [*command, "--ddp", "--out", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("val. loss") == run.stdout.count("bytes sent a step") == 1  # the first rank alone prints
    record = json.loads((tmp_path / "ranks-ddp-2.json").read_text())
    (found,) = record["runs"]
    gradients = 4 * sum(p.numel() for p in GPT(MODELS["nano"]).parameters())
    assert found["collectives"] == {"all_reduce": 1, "reduce_scatter": 0, "all_gather": 0, "broadcast": 0}
    assert found["bytes_sent_per_step"] == gradients  # twice (2 - 1) / 2 of them
    assert len(found["losses"]) == 6


class StopOnce:
    """On rank 1 alone, the second time that it is asked."""

    signal = 15

    def __init__(self):
        self.asked = 0

    def __call__(self):
        self.asked += 1
        return dist.get_rank() == 1 and self.asked == 2


def trained(folder, name, number, interrupts, resume=False):
    layout = bench_ranks.Layout(name, number, torch.device("cpu"))
    code = bench_ranks.run(layout, SETTINGS, load_text(), Path(folder), resume, interrupts, 1000)
    if code:
        return code
    (found,) = json.loads(next(Path(folder).glob("ranks-*.json")).read_text())["runs"]
    return {key: found[key] for key in ("losses", "scales", "validation_loss", *COUNTED)}


def stopped_and_resumed(folder, name, number):
    whole = trained(f"{folder}/whole", name, number, lambda: False)
    code = trained(f"{folder}/cut", name, number, StopOnce())
    resumed = trained(f"{folder}/cut", name, number, lambda: False, resume=True)
    with pytest.raises(ValueError, match="no whole checkpoint in"):
        trained(f"{folder}/cut", name, number, lambda: False, resume=True)
    return whole, code, resumed


@pytest.mark.parametrize(("world", "name", "number"), [(2, "fsdp", 1), (4, "tp", 2), (4, "hsdp", 2)])
def test_ranks_stop_together_and_resume_to_the_same_losses(ranks, tmp_path, world, name, number):
    for whole, code, resumed in ranks.run(stopped_and_resumed, str(tmp_path), name, number, world=world):
        assert code == 128 + 15
        assert {key: whole[key] for key in ("losses", "scales", "validation_loss")} == {
            key: resumed[key] for key in ("losses", "scales", "validation_loss")
        }
        assert whole["losses"][-1] < whole["losses"][0]
        assert (whole["collectives"]["all_reduce"], whole["bytes_sent_per_step"]) == sent(name)
        assert (whole["collectives"]["reduce_scatter"], whole["collectives"]["all_gather"]) == (2, 3)


def sent(name):
    """Sums over ranks and bytes of all collectives that a step takes: fully_shard over 2 ranks gathers all weights and, for the
    backward, those of the block again; it reduces all gradients. Then two float64 are summed over all ranks."""
    model = GPT(MODELS["nano"])
    all_of, block = (sum(p.numel() for p in module.parameters()) for module in (model, model.blocks[0]))
    if name == "fsdp":
        return 1, 4 * (2 * all_of + block) / 2 + 16
    if name == "hsdp":  # each half of the gradients once more, between two replicas
        return 3, 4 * (2 * all_of + block) / 2 + 4 * all_of / 2 + 24
    mlp = model.blocks[0].mlp[0].weight.numel() * 2 + model.blocks[0].mlp[0].bias.numel()
    activations = 2 * MODELS["nano"].batch * MODELS["nano"].context * MODELS["nano"].width
    return 3, 4 * (2 * (all_of - mlp / 2) + block - mlp / 2) / 2 + 2 * activations + 24


def counted():
    data = torch.zeros(12)
    with CountSent() as sent:
        dist.all_reduce(data)
        dist.all_gather_into_tensor(torch.zeros(48), data)
        dist.reduce_scatter_tensor(torch.zeros(3), data)
        dist.broadcast(data, 0)
        torch.distributed.tensor.DTensor.from_local(data, everyone(), [torch.distributed.tensor.Shard(0)]).full_tensor()
    return sent.bytes, sent.calls


def test_bytes_of_each_collective(ranks):
    """48 bytes on each of 4 ranks: 2 * 3/4, 3, 3/4 and 1 of them, and the gather within a DTensor."""
    for sent, calls in ranks.run(counted):
        assert sent == 72 + 144 + 36 + 48 + 144
        assert calls == {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 2, "broadcast": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ddp"], "start the processes with torchrun"),
        (["--tp", "0"], "argument --tp: '0' is not a positive number"),
        (["--ddp", "--fsdp"], "argument --fsdp: not allowed with argument --ddp"),
    ],
)
def test_wrong_options_are_one_line(options, message, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert train.main(["--model", "nano", "--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err


def check_indivisible():
    with pytest.raises(ValueError, match="argument --hsdp: 3 does not divide the number of processes, 2"):
        bench_ranks.Layout("hsdp", 3, torch.device("cpu"))


def test_replicas_must_divide_the_ranks(ranks):
    ranks.run(check_indivisible, world=2)

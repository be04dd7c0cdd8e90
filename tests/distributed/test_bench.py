"""The counts of the training benchmark on ranks, and its options."""

import pytest
import torch
import torch.distributed as dist

from bench import train
from bench.training import ranks as bench_ranks
from bench.training.collectives import CountSent

from ..helpers.ranks import on_ranks
from .worlds import everyone


@on_ranks(4)
def test_bytes_of_each_collective():
    """48 bytes on each of 4 ranks: 2 * 3/4, 3, 3/4 and 1 of them, and the gather within a DTensor."""
    data = torch.zeros(12)
    with CountSent() as sent:
        dist.all_reduce(data)
        dist.all_gather_into_tensor(torch.zeros(48), data)
        dist.reduce_scatter_tensor(torch.zeros(3), data)
        dist.broadcast(data, 0)
        torch.distributed.tensor.DTensor.from_local(data, everyone(), [torch.distributed.tensor.Shard(0)]).full_tensor()
    assert sent.bytes == 72 + 144 + 36 + 48 + 144
    assert sent.calls == {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 2, "broadcast": 1}


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


@on_ranks(2)
def test_replicas_must_divide_the_ranks():
    with pytest.raises(ValueError, match="argument --hsdp: 3 does not divide the number of processes, 2"):
        bench_ranks.Layout("hsdp", 3, torch.device("cpu"))

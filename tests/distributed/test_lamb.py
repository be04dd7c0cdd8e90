"""LAMB over pieces of tensors: its ratios are those of norms of whole tensors, which no rank can tell alone."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor

import amp_kernels as ak
from amp_kernels._sharding.local import local

from ..helpers.ranks import on_ranks
from .test_optimizers import BAD, WORLDS
from .worlds import compare, difference, everyone, make_model

F32, BF16 = torch.float32, torch.bfloat16
LAMB_CASES = {
    "fp32": ("LAMB", F32, {"ema_decay": 0.9}),
    "fp32 adapts all": ("LAMB", F32, {"weight_decay": 0.0, "use_nvlamb": True, "state_dtype": BF16}),
    "bf16 master": ("LAMB", BF16, {}),
    "bf16 split": ("LAMB", BF16, {"master_weights": "split", "bias_correction": False}),
}


@pytest.mark.parametrize(("world", "layout"), [(2, "replicated"), *WORLDS])
@on_ranks("world")
def test_lamb_of_pieces_is_lamb_of_tensors(layout):
    """The squares of a tensor are added in double, in another order: the ratio is off by some 2^-50 before it is rounded to
    float32, so by one unit of 2^-24 where it lies at a tie. In six steps that moves a weight by 6 lr 2^-24 of itself."""
    for case, arguments in LAMB_CASES.items():
        weights, _ = compare(layout, *arguments, None, BAD)
        assert weights <= (2.0**-24 if "fp32" in case else 2.0**-8), case


def lamb_alone():
    """A rank without any gradient takes part in the sum, and its piece stays."""
    param = torch.nn.Parameter(distribute_tensor(torch.full((8,), 2.0), everyone(), [Shard(0)]))
    optimizer = ak.optim.LAMB([param], lr=0.5, weight_decay=0.0, use_nvlamb=True)
    if dist.get_rank():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return local(param.detach()).tolist()


def test_lamb_on_ranks_without_gradients(ranks):
    first, *others = ranks.run(lamb_alone)
    assert first == [2.0, 2.0]
    assert others == [pytest.approx([1.0, 1.0])] * 3


def lamb_under_fsdp1(use_orig_params, declared):
    model = FullyShardedDataParallel(make_model(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    optimizer = ak.optim.LAMB(model.parameters(), lr=1e-2, shard_group=model.process_group if declared else None)
    reference = make_model()
    alone = ak.optim.LAMB(reference.parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 21).view(3, 7)
    for _ in range(3):
        for m, o in ((model, optimizer), (reference, alone)):
            o.zero_grad()
            m(x).square().sum().backward()
            o.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return max(map(difference, model.parameters(), reference.parameters()))


def refusals():
    for arguments, error, message in (
        ((True, False), ValueError, "shard_group is None"),
        ((False, True), TypeError, "use_orig_params=True"),
    ):
        with pytest.raises(error, match=message):
            lamb_under_fsdp1(*arguments)


def test_lamb_under_fsdp1(ranks):
    """The gradients are averaged over ranks that all have the same: equal up to the rounding of that average."""
    assert max(ranks.run(lamb_under_fsdp1, True, True, world=2)) <= 2.0**-22
    ranks.run(refusals, world=2)

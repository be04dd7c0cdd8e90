"""main_grad under DistributedDataParallel: two processes over gloo."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

import amp_kernels as ak

from ..helpers.ranks import on_ranks

WORLD, STEPS, MICRO_BATCHES = 2, 2, 3


def inputs(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 8, generator=generator).to(dtype) for _ in range(MICRO_BATCHES)]


def loss(model, x):
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
        return model(x).float().pow(2).sum()


def difference(as_view, wrapped_first):
    """Gradients of accumulated micro-batches, all-reduced by DDP, against those of one process; the largest relative error."""
    torch.manual_seed(0)
    model = ak.nn.MLP(8, 16)
    plain = copy.deepcopy(model)
    handle = None if wrapped_first else ak.nn.accumulate_fp32(model)
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    handle = handle or ak.nn.accumulate_fp32(model)
    for step in range(STEPS):
        parallel.zero_grad(set_to_none=step == 0)
        *local, last = inputs(dist.get_rank(), torch.float32)
        with parallel.no_sync():
            for x in local:
                loss(parallel, x).backward()
        loss(parallel, last).backward()
    for x in itertools.chain.from_iterable(inputs(rank, torch.float32) for rank in range(WORLD)):
        (loss(plain, x) / WORLD).backward()
    in_place = all(p.grad.data_ptr() == p.main_grad.data_ptr() for p in (model.fc1.weight, model.fc2.weight))
    errors = [
        ((a.grad - b.grad).norm() / b.grad.norm()).item()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    handle.remove()
    return max(errors), in_place


@on_ranks(WORLD)
def test_ddp_reduces_main_grad_or_says_why_not():
    for as_view, wrapped_first in itertools.product((False, True), repeat=2):
        error, in_place = difference(as_view, wrapped_first)
        assert error < 1e-6
        assert in_place != as_view  # DDP puts views of its buckets into .grad, if it is told to
    model, x = ak.nn.MLP(8, 16, dtype=torch.bfloat16), inputs(0, torch.bfloat16)[0]
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    loss(parallel, x).backward()
    message = r"torch.bfloat16 weight of shape \[16, 8\] has an fp32 main_grad, which DistributedDataParallel"
    with ak.nn.accumulate_fp32(model), pytest.raises(RuntimeError, match=message):
        parallel(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_ddp_nothing_is_refused(dtype):
    model = ak.nn.MLP(8, 16, dtype=dtype)
    plain = copy.deepcopy(model)
    with ak.nn.accumulate_fp32(model):
        for own in (model, plain):
            loss(own, inputs(0, dtype)[0]).backward()
        for p, q in ((model.fc1.weight, plain.fc1.weight), (model.fc2.weight, plain.fc2.weight)):
            apart = (p.main_grad - q.grad).abs().amax()
            assert apart <= 2.0**-8 * q.grad.abs().amax()  # which is rounded to bf16

"""FP32 sums of 16-bit gradients averaged over ranks, against one process that has all micro-batches."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import amp_kernels as ak
from amp_kernels.distributed.grad_reducer import GradReducer

from ..helpers.ranks import on_ranks
from .worlds import everyone

BF16, MICRO_BATCHES = torch.bfloat16, 3


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(ak.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.LayerNorm(16), ak.nn.Linear(16, 3)).to(
        BF16
    )


def inputs(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(4, 8, generator=generator).to(BF16) for _ in range(MICRO_BATCHES)]


def loss(model, x):
    return model(x).float().square().sum()


def accumulate(model, reducer, step):
    *first, last = inputs(dist.get_rank(), step)
    with reducer.no_sync():
        for x in first:
            loss(model, x).backward()
    loss(model, last).backward()


def error(model, step):
    """Against the average over ranks of the sums, in float64 from the gradients of each rank's backwards."""
    reference = copy.deepcopy(make_model())
    reference.load_state_dict(model.state_dict())
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in reference.parameters()]
    with ak.nn.accumulate_fp32(reference):
        for rank in range(dist.get_world_size()):
            for x in inputs(rank, step):
                reference.zero_grad()
                loss(reference, x).backward()
                for total, p in zip(sums, reference.parameters(), strict=True):
                    total += p.grad.double() / dist.get_world_size()
    pairs = zip(model.parameters(), sums, strict=True)
    return max(((p.grad.double() - total).norm() / total.norm()).item() for p, total in pairs)


def steps(bucket_mb, set_to_none):
    """Largest error of some steps; the ranks start with different weights."""
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(dist.get_rank())
    handle = ak.nn.accumulate_fp32(model)
    reducer = GradReducer(model, bucket_mb=bucket_mb)
    optimizer = ak.optim.AdamW(model.parameters(), lr=1e-2)
    errors = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        accumulate(model, reducer, step)
        errors.append(error(model, step))
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        assert all(p.grad.data_ptr() == p.main_grad.data_ptr() for p in (model[0].weight, model[3].weight))
        optimizer.step()
    weights = [p.detach().float() for p in model.parameters()]
    reducer.remove()
    handle.remove()
    loss(model, inputs(0, 0)[0]).backward()  # ordinary again
    return max(errors), weights, len(reducer._buckets)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("bucket_mb", "set_to_none", "buckets"), [(25, True, 1), (1e-4, True, 6), (1e-4, False, 6)])
def test_sums_are_averaged_in_fp32(ranks, world, bucket_mb, set_to_none, buckets):
    """Each of the sums over 3 micro-batches and ``world`` ranks rounds once to 2^-24."""
    found = ranks.run(steps, bucket_mb, set_to_none, world=world)
    for worst, weights, count in found:
        assert worst <= (MICRO_BATCHES + world) * 2.0**-24
        assert count == buckets
        assert all(map(torch.equal, weights, found[0][1]))


@on_ranks(2)
def test_buckets_are_sent_while_the_backward_runs():
    """Gradients present when a bucket is sent: an early bucket leaves while the backward still runs."""
    model = make_model()
    ak.nn.accumulate_fp32(model)
    reducer = GradReducer(model, bucket_mb=1e-4)
    seen = []

    def hook(state, bucket):
        seen.append((bucket.index(), sum(p.grad is not None for p in model.parameters())))
        assert bucket.is_last() == (bucket.index() == len(reducer._buckets) - 1)
        return default_hooks.allreduce_hook(state, bucket)

    reducer.register_comm_hook(None, hook)
    with reducer.no_sync():
        loss(model, inputs(0, 0)[0]).backward()
    assert seen == []
    model.zero_grad()
    loss(model, inputs(0, 0)[0]).backward()
    assert [index for index, _ in seen] == list(range(6))
    assert seen[0][1] < 3
    assert seen[-1][1] == 6


def elsewhere(state, bucket):
    """Leaves the bucket as it is: the average is another tensor."""
    averaged = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(averaged, async_op=True).get_future().then(lambda future: future.value()[0])


HOOKS = {
    "another tensor": (lambda: (None, elsewhere), 2.0**-23),
    "fp16": (lambda: (None, default_hooks.fp16_compress_hook), 2.0**-11),
    "bf16": (lambda: (None, default_hooks.bf16_compress_hook), 2.0**-8),
    "PowerSGD": (
        lambda: (PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2), powerSGD_hook),
        1e-5,
    ),
}


def hooked(name):
    model = make_model()
    ak.nn.accumulate_fp32(model)
    reducer = GradReducer(model)
    reducer.register_comm_hook(*HOOKS[name][0]())
    worst = 0.0
    for step in range(4):
        model.zero_grad()
        accumulate(model, reducer, step)
        worst = max(worst, error(model, step))
    return worst, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", HOOKS)
def test_communication_hooks_of_torch(ranks, name):
    """Compression rounds each gradient once, before the sum, and the sum once; rank 16 approximates these matrices exactly."""
    found = ranks.run(hooked, name, world=2)
    for worst, grads in found:
        assert worst <= 2 * HOOKS[name][1]
        assert all(map(torch.equal, grads, found[0][1]))
    if "16" in name:
        assert found[0][0] > 2.0**-20  # it did compress


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(ak.nn.Linear(4, 4, bias=False, dtype=BF16) for _ in range(3))

    def forward(self, x, used):
        return sum(self.branches[i](x).sum() for i in used)


@on_ranks(2)
def test_unused_parameters_of_a_rank_count_as_zeros():
    """Rank 0 uses one branch, rank 1 another, nobody the third; then all use the third alone."""
    model = Branches()
    ak.nn.accumulate_fp32(model)
    GradReducer(model, bucket_mb=1e-6)
    found = []
    for used in (dist.get_rank(), 2):
        model.zero_grad()
        model(torch.ones(1, 4, dtype=BF16), [used]).backward()
        found += [branch.weight.grad[0, 0].item() for branch in model.branches]
    assert found == [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]


@on_ranks(2)
def test_all_start_from_the_first_rank():
    """Values of the first rank, wherever the others keep theirs."""
    want, rank = torch.arange(12.0).view(3, 4), dist.get_rank()
    values = want + 100 * rank
    places = [torch.zeros(3, 4), torch.zeros(4, 3).t(), torch.zeros(3, 8)[:, ::2]]
    model = torch.nn.Module()
    for i in range(3):
        place = places[(i + rank) % 3]
        place.copy_(values)
        model.register_parameter(f"weight{i}", torch.nn.Parameter(place))
        model.register_buffer(f"buffer{i}", place.clone().t()[::2].t())
    GradReducer(model)
    whole, halves = want.tolist(), want[:, ::2].tolist()
    assert [tensor.tolist() for tensor in model.state_dict().values()] == [whole] * 3 + [halves] * 3


@on_ranks(2)
def test_refusals():
    model = torch.nn.Linear(2, 2)
    placed = torch.nn.ParameterList([distribute_tensor(torch.ones(4), everyone(), [Shard(0)])])
    for arguments, exception, message in (
        ((torch.nn.Tanh(),), ValueError, "no parameter of model requires a gradient"),
        ((placed,), TypeError, r"0 is a DTensor; accepted: plain parameters \(fully_shard"),
        (
            (torch.nn.ModuleList([model, torch.nn.Linear(1, 1, device="meta")]),),
            ValueError,
            "cpu, meta; accepted: one device",
        ),
    ):
        with pytest.raises(exception, match=message):
            GradReducer(*arguments)
    with pytest.raises(ValueError, match=r"bucket_mb is 0; accepted: a number above 0"):
        GradReducer(model, bucket_mb=0)
    reducer = GradReducer(model)
    with pytest.raises(TypeError, match="hook has type str"):
        reducer.register_comm_hook(None, "fp16")
    with pytest.raises(
        TypeError, match=r"weight has type .*DTensor; accepted: plain parameters.*reduce_dtype=torch\.float32"
    ):
        ak.nn.accumulate_fp32(fully_shard(ak.nn.Linear(4, 4)))

    late = ak.nn.Linear(2, 2, dtype=BF16)
    reducer = GradReducer(late)
    ak.nn.accumulate_fp32(late)
    with pytest.raises(
        TypeError, match=r"is torch\.float32, and was torch\.bfloat16.*accepted: accumulate_fp32 before"
    ):
        late(torch.ones(1, 2, dtype=BF16)).sum().backward()


@pytest.mark.parametrize("bucket_mb", [25, 1e-6])
@pytest.mark.parametrize("after", [[0, 1], [0]])
@on_ranks(2)
def test_a_failed_backward_leaves_no_trace(bucket_mb, after):
    """An exception in one backward after the branch numbered 1 has come: the next one, of the branches ``after``, says so;
    the one after it is right. ``[0]`` is a backward that shares no parameter with the failed one. Its gradients must not stay each
    rank's own."""
    model = Branches()
    ak.nn.accumulate_fp32(model)
    GradReducer(model, bucket_mb=bucket_mb)
    x = torch.ones(1, 4, dtype=BF16)

    def fail(grad):
        raise ArithmeticError

    hidden = model.branches[0](x)
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError) as kept:  # a traceback that lives on keeps nothing of the backward
        (model.branches[1](hidden).sum() + model.branches[2](x).sum()).backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="an earlier backward ended in an exception"):
        model(x, after).backward()
    model.zero_grad()
    model(x * (1 + 2 * dist.get_rank()), [0, 1, 2]).backward()
    assert kept.type is ArithmeticError
    assert [branch.weight.grad[0, 0].item() for branch in model.branches] == [2.0, 2.0, 2.0]


@on_ranks(2)
def test_reentrant_checkpoints():
    """Two branches within one reentrant checkpoint, one outside of it: its gradients come in a backward of their own."""
    model = Branches()
    ak.nn.accumulate_fp32(model)
    GradReducer(model, bucket_mb=1e-6)
    x = torch.full((1, 4), 1.0 + 2 * dist.get_rank(), dtype=BF16, requires_grad=True)
    for _ in range(2):
        model.zero_grad()
        inner = torch.utils.checkpoint.checkpoint(lambda x: model(x, [0, 1]), x, use_reentrant=True)
        (model(x, [2]) + inner).backward()
    found = [branch.weight.grad[0, 0].item() for branch in model.branches]
    twice = [torch.utils.checkpoint.checkpoint(lambda x: model(x, [0]), x, use_reentrant=True) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"branches\.0\.weight changed after.*accepted: .*use_reentrant=False"):
        (model(x, [2]) + sum(twice)).backward()
    assert found == [2.0, 2.0, 2.0]


@on_ranks(2)
def test_fully_shard_adds_micro_batches_up_in_fp32():
    """300 micro-batches whose gradients are 1: bfloat16 sums would end at 256. accumulate_fp32 refers its users to this."""
    model = torch.nn.Linear(4, 2, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=everyone(), mp_policy=policy)
    for i in range(300):
        model.set_requires_gradient_sync(i == 299)
        model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((2, 4), 300.0))

"""Cross-entropy over a vocabulary that is spread over several ranks, against one process in float64."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from amp_kernels.distributed import vocab_parallel_cross_entropy

from ..helpers.ops import Ops
from ..helpers.ranks import on_ranks
from .worlds import everyone, whole

ROWS, CLASSES = 6, 12
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def problem(dtype, spread, smoothing):
    generator = torch.Generator().manual_seed(7)
    logits = (spread * torch.randn(ROWS, CLASSES, generator=generator)).to(dtype)
    target = torch.tensor([0, 5, -100, 11, 6, 3])
    logits[2] = torch.nan  # ignored
    if not smoothing:  # which makes the loss of such a row infinite
        logits[4, 6:] = -torch.inf  # whole ranks have nothing of this row, not even its class
        logits[4, 6] = 0.0
    return logits, target


def reference(logits, target, reduction, z_loss, smoothing, weights):
    x = logits.double().requires_grad_()
    known = x.nan_to_num(nan=0.0, neginf=-torch.inf)
    loss = F.cross_entropy(known, target, reduction="none", label_smoothing=smoothing)
    loss = loss + torch.where(target == -100, 0.0, z_loss * known.logsumexp(1) ** 2)
    loss = {"none": loss, "sum": loss.sum(), "mean": loss.sum() / (target != -100).sum()}[reduction]
    (loss * weights if reduction == "none" else loss).sum().backward()
    return loss.detach(), x.grad.nan_to_num(nan=0.0)


def worst(dtype, reduction, z_loss, smoothing, spread, as_dtensor):
    """Largest errors of loss and gradient, in units of the dtype's rounding of the largest of them in a row."""
    logits, target = problem(dtype, spread, smoothing)
    weights = torch.linspace(-1, 2, ROWS)
    expected, gradient = reference(logits, target, reduction, z_loss, smoothing, weights)
    if as_dtensor:
        x = distribute_tensor(logits, everyone(), [Shard(1)], src_data_rank=None).requires_grad_()
    else:
        x = logits.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone().requires_grad_()
    options = {"reduction": reduction, "z_loss": z_loss, "label_smoothing": smoothing}
    loss = vocab_parallel_cross_entropy(x, target, **options)
    assert loss.dtype == torch.float32
    assert loss.shape == expected.shape
    (loss * weights if reduction == "none" else loss).sum().backward()
    assert x.grad.dtype == dtype
    grad = whole(x.grad) if as_dtensor else torch.cat(gathered(x.grad), 1)
    scale = gradient.abs().amax(1, keepdim=True).clamp(min=1e-30)
    return (
        ((loss.detach() - expected).abs() / expected.abs().clamp(min=1.0)).max().item(),
        ((grad.double() - gradient).abs() / scale).max().item(),
        grad[2].abs().sum().item(),
    )


def gathered(piece):
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, piece)
    return pieces


@pytest.mark.parametrize("world", [2, 4])
@on_ranks("world")
def test_is_the_loss_of_the_whole_vocabulary():
    """Sums of 12 exponentials and a dozen fp32 operations on numbers up to ``spread`` * 4; gradients round once to their
    dtype, with label smoothing twice. An ignored row has exactly no gradient."""
    options = [("mean", 0.0, 0.0), ("sum", 1e-2, 0.0), ("none", 1e-3, 0.3), ("mean", 0.0, 1.0)]
    for dtype, (*how, smoothing), spread, as_dtensor in itertools.product(EPS, options, (1.0, 30.0), (False, True)):
        case = dtype, *how, smoothing, spread, as_dtensor
        loss, grad, ignored = worst(*case)
        roundings, of_sums = 2 if smoothing else 1, 16 * EPS[torch.float32] * max(1.0, 4 * spread)
        assert loss <= of_sums, case
        assert grad <= roundings * EPS[dtype] + 2 * of_sums, case
        assert ignored == 0.0


@on_ranks(4)
def test_rows_and_classes_over_two_dimensions_of_a_mesh_in_two_collectives():
    """Rows over one dimension of the mesh, classes, unevenly, over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 3, 7, generator=generator)
    target = torch.randint(7, (4, 3), generator=generator)
    x = distribute_tensor(logits, mesh, [Shard(0), Shard(2)], src_data_rank=None).requires_grad_()
    mine = target.chunk(2)[mesh["dp"].get_local_rank()]
    with Ops() as ops:
        loss = vocab_parallel_cross_entropy(x, mine, reduction="none")
        loss.sum().backward()
    expected = logits.clone().requires_grad_()
    F.cross_entropy(expected.movedim(-1, 1), target, reduction="sum").backward()
    wanted = F.cross_entropy(logits.movedim(-1, 1), target, reduction="none").chunk(2)[mesh["dp"].get_local_rank()]
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole(x.grad), expected.grad, rtol=1e-6, atol=1e-7)
    assert [name for name in ops.names if "c10d" in name] == ["c10d::allreduce_"] * 2


@on_ranks(2)
def test_refusals_and_classes_out_of_range():
    logits, target = torch.zeros(2, 3), torch.tensor([0, 5])
    mesh = everyone()
    for arguments, options, error, message in (
        ((logits.double(), target), {}, TypeError, "logits"),
        ((logits, target.int()), {}, TypeError, "target"),
        (
            (logits, target[:1]),
            {},
            ValueError,
            r"logits has shape \[2, 3\] and target \[1\]; accepted: \[\.\.\., V / T\]",
        ),
        ((logits[:, :0], target), {}, ValueError, "at least one class on each rank"),
        ((logits, target), {"reduction": "max"}, ValueError, "reduction is 'max'"),
        ((logits, target), {"z_loss": -1.0}, ValueError, "z_loss is -1"),
        ((logits, target), {"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5"),
        ((distribute_tensor(logits, mesh, [Replicate()]), target), {}, ValueError, r"accepted: one Shard\(1\)"),
        ((distribute_tensor(logits, mesh, [Shard(0)]), target), {}, ValueError, r"accepted: one Shard\(1\)"),
        ((distribute_tensor(torch.zeros(2, 1), mesh, [Shard(1)]), target), {}, ValueError, "1 classes over 2 ranks"),
        ((distribute_tensor(logits, mesh, [Partial()]), target), {}, ValueError, "none that is Partial"),
    ):
        with pytest.raises(error, match=message):
            vocab_parallel_cross_entropy(*arguments, **options)
    x = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(x, torch.tensor([6, 5]), reduction="none")  # six classes: 6 is none of them
    loss.sum().backward()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(vocab_parallel_cross_entropy(x, target), x, create_graph=True)
    assert loss.isnan().tolist() == x.grad.isnan().all(1).tolist() == [True, False]

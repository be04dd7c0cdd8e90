"""Log-probabilities of a head that is spread over ranks, against one process in float64."""

import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import amp_kernels as ak
from amp_kernels.distributed import vocab_parallel_log_probs

from ..helpers.ops import Ops
from ..helpers.ranks import on_ranks
from ..nn.test_head_loss import WORDS as VOCABULARY
from ..nn.test_head_loss import Model, causal_loss
from .worlds import everyone, whole

ROWS, WIDTH, WORDS = 7, 16, 22
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def problem(dtype, case):
    """Operands in the dtype, a target for each row, the first words' and the last's among them, and weights of both results."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    weight = (0.3 * torch.randn(WORDS, WIDTH, generator=generator)).to(dtype)
    bias = torch.randn(WORDS, generator=generator)
    if case == "apart":
        bias[: WORDS // 2] -= 300
    if case == "masked":
        bias[: WORDS // 2] = -torch.inf  # all words of the first ranks
    target = torch.tensor([WORDS - 1, WORDS // 2, -100, 13, 12, 14, 20])
    if case == "plain":
        target[:2] = torch.tensor([0, 5])
    return x, weight, bias, target, torch.linspace(-1, 2, ROWS), torch.linspace(1, -1, ROWS)


def exact(x, weight, bias, target, of_log_probs, of_entropy, temperature):
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    log_p = ((leaves[0] @ leaves[1].t() + leaves[2]) / temperature[:, None]).log_softmax(1)
    counted = target != -100
    log_probs = log_p.gather(1, target.clamp(min=0)[:, None])[:, 0].where(counted, 0.0)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(1).where(counted, 0.0)
    (log_probs * of_log_probs + entropy * of_entropy).sum().backward()
    return log_probs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)


def piece(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()


def placed(tensor):
    return distribute_tensor(tensor, everyone(), [Shard(0)], src_data_rank=None).requires_grad_()


def worst(dtype, case, as_dtensor, chunk_size):
    """The largest errors of results and gradients, in units of the largest; the results' bits; the collectives."""
    x, weight, bias, target, *factors = problem(dtype, case)
    temperature = torch.linspace(0.7, 1.5, ROWS)
    want = exact(x, weight, bias, target, *factors, temperature)
    x = x.clone().requires_grad_()
    weight, bias = (placed(t) if as_dtensor else piece(t) for t in (weight, bias))
    with Ops() as ops:
        options = {"linear_bias": bias, "temperature": temperature, "entropy": True, "chunk_size": chunk_size}
        found = vocab_parallel_log_probs(x, weight, target, **options)
    forward = ops.count("c10d::allreduce_")
    with Ops() as ops:
        sum((one * factor).sum() for one, factor in zip(found, factors, strict=True)).backward()
    grads = [x.grad, *(whole(t.grad) if as_dtensor else torch.cat(gathered(t.grad)) for t in (weight, bias))]
    errors = []
    for got, wanted in zip([*found, *grads], want, strict=True):
        assert got.dtype in (torch.float32, dtype)
        errors.append(((got.detach().double() - wanted).abs().max() / wanted.abs().max().clamp(min=1)).item())
    return errors, [t.tolist() for t in (*found, x.grad)], (forward, ops.count("c10d::allreduce_"))


def gathered(tensor):
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor)
    return pieces


def cases(as_dtensor):
    for dtype in ROUNDING:
        for case in ("plain", "apart", "masked"):
            yield dtype, case, as_dtensor, 3 if case == "plain" else None


def all_of_them(as_dtensor):
    return {case: worst(*case) for case in cases(as_dtensor)}


@pytest.mark.parametrize(("world", "as_dtensor"), [(2, False), (2, True), (4, True)])
def test_is_the_head_of_one_process(ranks, world, as_dtensor):
    """22 words over 4 ranks are 6, 6, 6 and 4. Log-probabilities and entropies: sums of 22 exponentials of logits up to 300; gradients
    are made of a dz that was rounded once, and round once more. All ranks have the same bits."""
    of_ranks = ranks.run(all_of_them, as_dtensor, world=world)
    for case in of_ranks[0]:
        (*results, dx, dw, db), bits, collectives = of_ranks[0][case]
        dtype, kind = case[:2]
        scale = 300 if kind == "apart" else 8
        assert max(results) <= 32 * 2.0**-24 * scale, case
        assert max(dx, dw, db) <= 3 * ROUNDING[dtype] + 64 * 2.0**-24 * scale, (case, dx, dw, db)
        assert collectives == (2, 1)
        assert all(found[case][1] == bits for found in of_ranks)


@on_ranks(2)
def test_refusals_and_words_out_of_range():
    x, weight, target = torch.zeros(2, 4), torch.zeros(3, 4), torch.tensor([0, 5])
    for arguments, options, error, message in (
        ((x.double(), weight.double(), target), {}, TypeError, "input has dtype float64"),
        ((x, weight, target.int()), {}, TypeError, "target has dtype int32"),
        ((x, weight[:, :3], target), {}, ValueError, r"input has shape \[2, 4\] and linear_weight \[3, 3\]"),
        ((x, weight, target), {"temperature": 0.0}, ValueError, "temperature is 0.0"),
        ((x, weight, target), {"chunk_size": 0}, ValueError, "chunk_size is 0"),
        ((x, weight, target), {"linear_bias": torch.zeros(6)}, ValueError, r"linear_bias has shape \[6\]"),
        (
            (x, distribute_tensor(weight, everyone(), [Replicate()]), target),
            {},
            ValueError,
            r"accepted: one Shard\(0\)",
        ),
    ):
        with pytest.raises(error, match=f"vocab_parallel_log_probs: .*{message}"):
            vocab_parallel_log_probs(*arguments, **options)
    x.requires_grad_()
    found = vocab_parallel_log_probs(x, weight, torch.tensor([6, 5]), entropy=True)  # six words: 6 is none of them
    sum(found).sum().backward()
    with torch.no_grad():
        assert torch.equal(
            vocab_parallel_log_probs(x, weight, torch.tensor([6, 5])).nan_to_num(), found[0].nan_to_num()
        )
    assert found[0].requires_grad
    with ak.batch_invariant():
        assert vocab_parallel_log_probs(x, weight, target).shape == (2,)
    log_probs, entropy = found
    for values in (log_probs.isnan(), entropy.isnan(), x.grad.isnan().all(1)):
        assert values.tolist() == [True, False]


WRAPPED = {
    "DDP": DistributedDataParallel,
    "DDP looks for unused": lambda m: DistributedDataParallel(m, find_unused_parameters=True),
    "fully_shard": lambda m: fully_shard(m, mesh=everyone()),
    "resharded": lambda m: fully_shard(m, mesh=everyone(), reshard_after_forward=True),
    "16-bit outputs": lambda m: fully_shard(
        m, mesh=everyone(), mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    ),
}


class Tuples(Model):
    """FSDP looks into tuples."""

    def forward(self, input_ids, labels=None, **kwargs):
        output = super().forward(input_ids, labels, **kwargs)
        return (output["logits"],) if labels is None else output


@pytest.mark.parametrize("entropy", [False, True])
@on_ranks(2)
def test_a_batch_under_ddp_and_fully_shard(entropy):
    """Ranks have half of a batch each. The wrappers' hooks begin the backward where a gradient reaches an output."""
    sys.modules["transformers.loss.loss_utils"] = types.SimpleNamespace(ForCausalLMLoss=causal_loss)
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (4, 7))
    own, errors = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2), {}
    for name, wrap in WRAPPED.items():
        theirs, ours = Tuples(bias=True), Tuples(bias=True)
        ours.load_state_dict(theirs.state_dict())
        log_p = theirs(ids)[0][:, :-1].log_softmax(-1)
        want = log_p.gather(-1, ids[:, 1:, None])[..., 0] - entropy * (log_p.exp() * log_p).sum(-1)
        want.sum().backward()
        model = wrap(ak.convert(ours, fuse_loss=True))
        got = ak.nn.token_log_probs(model, ids[own], entropy=entropy)
        got = sum(got) if entropy else got
        (2 * got).sum().backward()  # ranks take the mean
        pairs = [
            (got, want[own]),
            *((p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)),
        ]
        errors[name] = max((whole(a) - b).abs().max().item() for a, b in pairs)
    fixed = DistributedDataParallel(ak.convert(Model(), fuse_loss=True), static_graph=True)
    with pytest.raises(
        ValueError, match="static_graph=True, which would not reduce the first gradients; accepted: Fal"
    ):
        ak.nn.token_log_probs(fixed, ids)
    apart = ak.convert(Model(), fuse_loss=True)
    fully_shard(apart.lm_head, mesh=everyone())
    with pytest.raises(ValueError, match=r"lm_head of Model is a FSDPLinear .*; accepted: .* the model around it"):
        ak.nn.token_log_probs(apart, ids)
    assert max(errors.values()) <= 1e-5, errors

"""Linear layers whose result is split: their backward reads the gradients of the pieces in place, with the bits of a concatenation;
any other use of the result gets an ordinary tensor."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_kernels as ak
from amp_kernels.nn.split import NAME, Whole
from amp_kernels.ops._shadows import refresh_shadow
from amp_kernels.testing.generators import normal

from .split_blocks import KINDS, WIDTH, Attention, B, D, Gate, T, assert_same, bf16, pair, trained

pytestmark = pytest.mark.usefixtures("hopper")


@pytest.mark.parametrize("amp", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_read_in_place(kind, amp, read):
    plain, ours = (m if amp else m.bfloat16() for m in pair(kind()))
    want = trained(plain, amp)
    assert read() == 0
    for backwards in (0, 1, 1):
        assert_same(trained(ours, amp), want)
        assert read() == backwards
    with torch.autocast("cpu", bf16, enabled=amp):
        torch.testing.assert_close(*(m.qkv.bias.grad for m in (ours, plain)), rtol=2**-7, atol=2**-7)


def test_no_copy_is_made():
    _, ours = pair(Attention())
    for _ in range(2):
        trained(ours)
    seen = []

    class Ops(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.numel() == B * T * 3 * WIDTH:
                seen.append(function.name())
            return out

    with Ops():
        trained(ours)
    assert not {"aten::cat", "aten::copy_", "aten::clone", "aten::stack", "aten::slice_backward"} & set(seen)


class Uses(Attention):
    """Something else with the result: ``before`` and ``after`` it is split."""

    def before(self, qkv):
        pass

    def after(self, qkv):
        return 0

    def heads(self, x):
        qkv = self.qkv(x)
        self.before(qkv)
        q, k, v = qkv.split(WIDTH, -1)
        extra = self.after(qkv)
        return q + extra, k, v


def test_a_use_of_the_whole_first_keeps_the_layer_as_it_is(read, monkeypatch):
    monkeypatch.setattr(Uses, "before", lambda self, qkv: qkv.mean())
    plain, ours = pair(Uses())
    for _ in range(3):
        assert_same(trained(ours), trained(plain))
        assert read() == 0
    assert not vars(ours.qkv)[NAME].used


def test_a_use_of_the_whole_after_the_split_adds_its_gradient(read, monkeypatch):
    monkeypatch.setattr(Uses, "after", lambda self, qkv: qkv.view(B, T, 3, WIDTH).sum(2) + qkv[..., 1 : WIDTH + 1])
    plain, ours = pair(Uses())
    for _ in range(3):
        found, want = trained(ours), trained(plain)
        assert torch.equal(found[0], want[0])
        for one, other in zip(found, want, strict=True):  # three gradients of 16 bits meet in another order
            torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)
        assert read() == 0


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        assert isinstance(x, torch.Tensor)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_a_function_gets_the_whole(monkeypatch):
    monkeypatch.setattr(Uses, "after", lambda self, qkv: Double.apply(qkv)[..., :WIDTH])
    plain, ours = pair(Uses())
    for _ in range(3):
        for one, other in zip(trained(ours), trained(plain), strict=True):
            torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_writes_are_seen_or_refused(monkeypatch):
    monkeypatch.setattr(Uses, "before", lambda self, qkv: qkv.mul_(2))
    plain, ours = pair(Uses())
    for _ in range(2):
        assert_same(trained(ours), trained(plain))
    monkeypatch.setattr(Uses, "before", lambda self, qkv: None)
    for late in (
        lambda self, qkv: qkv.mul_(2).sum(),
        lambda self, qkv: qkv.__setitem__(0, 1.0),
        lambda self, qkv: qkv.register_hook(print),
        lambda self, qkv: qkv.retain_grad(),
        lambda self, qkv: qkv[0].zero_().sum(),
        lambda self, qkv: qkv.detach()[0, 0].zero_().sum(),
        lambda self, qkv: qkv.view(B, T, 3, -1).select(0, 1).add_(1).sum(),
    ):
        monkeypatch.setattr(Uses, "after", lambda self, qkv: 0)
        _, ours = pair(Uses())
        for _ in range(2):
            trained(ours)
        monkeypatch.setattr(Uses, "after", late)
        with pytest.raises(RuntimeError, match="result was split, and then written to or given a hook"):
            trained(ours)


def test_a_view_after_the_split_may_be_read_and_given_a_hook(monkeypatch):
    hooked = []

    def after(self, qkv):
        first = qkv[0]
        first.register_hook(lambda grad: hooked.append(grad.clone()))
        return first[:, WIDTH : 2 * WIDTH] * first.mean()

    monkeypatch.setattr(Uses, "after", after)
    plain, ours = pair(Uses())
    for _ in range(3):
        for one, other in zip(trained(ours), trained(plain), strict=True):
            torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(*hooked[-2:], rtol=2**-6, atol=2**-6)


class Scaled(Attention):
    """Writes to its queries."""

    reads = False

    def heads(self, x):
        qkv = self.qkv(x)
        q = qkv[..., :WIDTH]
        q *= 0.5
        heads = q, qkv[..., WIDTH : 2 * WIDTH], qkv[..., 2 * WIDTH :]
        return (q + qkv.mean(), *heads[1:]) if self.reads else heads


def test_a_piece_may_be_written_to(read):
    plain, ours = pair(Scaled())
    for backwards in (0, 1, 1):
        assert_same(trained(ours), trained(plain))
        assert read() == backwards
    ours.reads = True  # what was written to is read where autograd does not see it
    with pytest.raises(RuntimeError, match="result was split, and then written to"):
        trained(ours)


class Late(Attention):
    """Writes to its queries between taking a view of the whole and reading it."""

    reads = False

    def heads(self, x):
        qkv = self.qkv(x)
        q, k, v = (qkv[..., i * WIDTH : (i + 1) * WIDTH] for i in range(3))
        if not self.reads:
            return q, k, v
        view = qkv[0]
        q *= 0.5
        return q + view.mean(), k, v


def test_a_view_is_not_read_after_a_write_to_a_piece():
    _, ours = pair(Late())
    for _ in range(2):
        trained(ours)
    ours.reads = True
    with pytest.raises(RuntimeError, match="result was split, and then written to"):
        trained(ours)


@pytest.mark.parametrize(
    "other",
    [
        lambda qkv: qkv.split([WIDTH // 2, WIDTH, WIDTH + WIDTH // 2], -1)[1],
        lambda qkv: qkv[..., :WIDTH:2].repeat(1, 1, 2),
        lambda qkv: qkv[:, :, WIDTH : 2 * WIDTH][:, torch.tensor([4, 3, 2, 1, 0])],
        lambda qkv: qkv[:, torch.tensor([4, 3, 2, 1, 0]), WIDTH : 2 * WIDTH],
        lambda qkv: qkv.view(B, T, 3, D, -1)[:, :, 1].transpose(2, 3).flatten(2),
        lambda qkv: qkv.view(B, T, -1, 3, D)[..., 0, :].flatten(2),
        lambda qkv: qkv.view(B, T, 3, -1).mT[..., 1],
        lambda qkv: torch.stack(qkv.view(B, T, 3, -1).unbind(1), 1)[:, :, 1],
        lambda qkv: qkv.split(WIDTH, 1)[0][..., WIDTH : 2 * WIDTH],
    ],
)
def test_another_split_gets_the_same_node(other, monkeypatch):
    plain, ours = pair(Attention())
    for _ in range(2):
        trained(ours)
    monkeypatch.setattr(Attention, "heads", lambda self, x: 3 * [other(self.qkv(x))])
    for _ in range(2):
        assert_same(trained(ours), trained(plain))


@pytest.mark.parametrize("sizes", [(64, 32, 96), (64,) * 4, (192,)])
def test_sizes_that_kernels_do_not_read(sizes, read, monkeypatch):
    monkeypatch.setattr(Attention, "heads", lambda self, x: 3 * [self.qkv(x).split(sizes, -1)[0].narrow(-1, 0, D)])
    monkeypatch.setattr(Attention, "forward", lambda self, x: sum(self.heads(x)))
    monkeypatch.setattr(Attention, "columns", sum(sizes))
    plain, ours = pair(Attention())
    for _ in range(2):
        assert_same(trained(ours)[:2], trained(plain)[:2])
        assert read() == 0
    assert not vars(ours.qkv)[NAME].used


def test_layers_that_nobody_splits(read):
    block = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, 4 * WIDTH))
    block.append(nn.Linear(4 * WIDTH, 4 * WIDTH))
    plain, ours = pair(block)
    assert [NAME in vars(m) for m in ours] == [True, False, True, False]
    for _ in range(2):
        assert_same(trained(ours), trained(plain))
    assert not any(vars(m)[NAME].used for m in ours if NAME in vars(m))
    assert read() == 0


def test_attributes_hide_none_of_a_tensor_s():
    _, ours = pair(Attention().bfloat16())
    whole = ours.qkv(normal(B, T, WIDTH, dtype=bf16).requires_grad_())
    own = {name for name in (*vars(whole), *vars(Whole)) if not name.startswith("__")}
    assert not own & set(dir(torch.Tensor))


def result_type(block, x=None):
    x = normal(B, T, WIDTH, dtype=bf16).requires_grad_() if x is None else x
    return type(block.qkv(x))


def test_where_a_result_is_an_ordinary_tensor():
    block = pair(Attention())[1].bfloat16()
    assert result_type(block) is Whole
    ak.convert(block, fuse_residuals=True)  # on again, since that result was not split
    with torch.no_grad():
        assert result_type(block) is torch.Tensor
    with ak.batch_invariant():
        assert result_type(block) is torch.Tensor
    with ak.backend("cpu"):
        assert result_type(block) is torch.Tensor
    handle = block.qkv.register_forward_hook(lambda module, args, output: None)
    assert result_type(block) is torch.Tensor
    handle.remove()
    block.qkv.activation = "relu"
    assert result_type(block) is torch.Tensor
    block.qkv.activation = None
    assert torch.func.grad(lambda x: block.qkv(x)[0].float().sum())(normal(T, WIDTH, dtype=bf16)).shape == (T, WIDTH)
    wide = copy.deepcopy(block).float()
    assert result_type(wide, normal(B, T, WIDTH).requires_grad_()) is torch.Tensor
    with pytest.raises(TypeError, match="linear: x is float32"):
        block.qkv(normal(B, T, WIDTH))
    with pytest.raises(ValueError, match="linear: x has shape"):
        block.qkv(normal(B, T, WIDTH + 1, dtype=bf16))
    for p in block.parameters():
        p.requires_grad_(False)
    assert result_type(block, normal(B, T, WIDTH, dtype=bf16)) is torch.Tensor
    assert result_type(block) is Whole


def test_skip_revert_copies_and_a_second_call(read):
    _, ours = pair(Attention())
    for _ in range(2):
        trained(ours)
    read()
    for other in (
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
        ak.convert(copy.deepcopy(ours), fuse_residuals=True),
    ):
        assert_same(trained(other), trained(ours))
        assert read() == 2
    assert set(ours.state_dict()) == set(Attention().state_dict())
    for other in (Attention(), ak.convert(Attention())):
        assert NAME not in vars(ak.convert(other, fuse_residuals=True, skip=["qkv"]).qkv)
    assert vars(ak.revert(ours).qkv).keys() == vars(Attention().qkv).keys()


def test_two_calls_in_one_step(read):
    class Twice(Attention):
        def forward(self, x):
            return super().forward(super().forward(x))

    plain, ours = pair(Twice())
    for backwards in (1, 2):  # the second call of the first step knows the sizes
        assert_same(trained(ours), trained(plain))
        assert read() == backwards


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("amp", [True, False])
def test_checkpoint(reentrant, amp, read):
    class Checkpointed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    plain, ours = (m if amp else m.bfloat16() for m in pair(Checkpointed(Attention())))
    for _ in range(3):
        assert_same(trained(ours, amp), trained(plain, amp))
    assert read() > 0


def test_compile(read):
    plain, ours = pair(Attention())
    for _ in range(2):
        trained(ours)
    torch._dynamo.reset()
    read()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_same(trained(compiled), trained(torch.compile(plain, backend="aot_eager", fullgraph=True)))
    assert read() == 0


def test_a_compiled_function_of_the_result(monkeypatch):
    compiled = torch.compile(lambda t: t.float() * 2, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(Uses, "after", lambda self, qkv: compiled(qkv)[..., :WIDTH])
    plain, ours = pair(Uses())
    for _ in range(3):
        for one, other in zip(trained(ours), trained(plain), strict=True):
            torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_main_grad(read):
    plain, ours = pair(Attention())
    handles = [ak.nn.accumulate_fp32(model) for model in (plain, ours)]
    for _ in range(3):
        assert_same(trained(ours)[:2], trained(plain)[:2])
        assert torch.equal(ours.qkv.weight.main_grad, plain.qkv.weight.main_grad)
    assert read() == 2
    for handle in handles:
        handle.remove()


def test_shadows():
    found = []
    for model in pair(Attention()):
        shadow = model.qkv.weight.detach().to(bf16)
        refresh_shadow(model.qkv.weight, shadow)
        shadow.mul_(2)  # so that it shows which one is read
        found.append([trained(model) for _ in range(3)][-1])
    assert_same(*found)


def test_derivatives_of_derivatives():
    plain, ours = (m.bfloat16() for m in pair(Gate()))
    found = []
    for model in (plain, ours):
        for _ in range(2):
            x = normal(B, T, WIDTH, dtype=bf16).requires_grad_()
            (grad,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
            last = torch.autograd.grad(grad.float().square().sum(), [x, model.qkv.weight])
        found.append(last)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)

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
from amp_kernels.ops import _linear
from amp_kernels.ops._shadows import refresh_shadow
from amp_kernels.testing.generators import normal

bf16 = torch.bfloat16
B, T, D, WIDTH = 2, 5, 16, 64


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", "9.0")
    with ak.backend("emulate"):
        yield


class Conv1D(nn.Module):
    """Of transformers, with a transposed weight."""

    def __init__(self, rows, columns):
        super().__init__()
        self.nf, self.weight, self.bias = (
            columns,
            nn.Parameter(normal(rows, columns, scale=0.2)),
            nn.Parameter(normal(columns)),
        )

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


class Attention(nn.Module):
    columns = 3 * WIDTH

    def __init__(self, layer=nn.Linear):
        super().__init__()
        self.qkv, self.out = layer(WIDTH, self.columns), layer(WIDTH, WIDTH)

    def heads(self, x):
        return self.qkv(x).split(WIDTH, dim=2)

    def forward(self, x):
        q, k, v = (t if t.ndim == 4 else t.view(B, T, -1, D).transpose(1, 2) for t in self.heads(x))
        repeated = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, *repeated)
        return self.out(y.transpose(1, 2).reshape(B, T, WIDTH))


class Chunks(Attention):
    def heads(self, x):
        return torch.chunk(self.qkv(x), 3, -1)


class Sizes(Attention):
    def heads(self, x):
        return torch.split(self.qkv(x), [WIDTH] * 3, dim=-1)


class Slices(Attention):
    """Phi-3's: with fewer heads of keys and values in general."""

    def heads(self, x):
        qkv = self.qkv(x)
        assert qkv.shape[:-1] == x.shape[:-1]
        return qkv[..., :WIDTH], qkv[..., WIDTH : 2 * WIDTH], qkv[:, :, -WIDTH:]


class Views(Attention):
    """timm's."""

    def heads(self, x):
        return self.qkv(x).reshape(B, T, 3, -1, D).permute(2, 0, 3, 1, 4).unbind(0)


class Unpacked(Attention):
    def heads(self, x):
        q, k, v = self.qkv(x).view((B, T, 3, WIDTH // D, D)).transpose(1, 3).permute((2, 0, 1, 3, 4))
        return q, k, v


class Numbered(Attention):
    def heads(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, WIDTH // D, D))
        assert len(qkv) == B
        return [qkv[:, :, i].transpose(1, 2) for i in (0, 1, -1)]


class Rows(Attention):
    """Qwen2-VL's: of tokens without a batch."""

    def heads(self, x):
        qkv = self.qkv(x.flatten(0, 1)).reshape(B * T, 3, WIDTH // D, -1).permute(1, 0, 2, 3)
        return [t.view(B, T, -1, D).transpose(1, 2) for t in (qkv[0], qkv[1], qkv[2])]


class Gate(Attention):
    """Phi-3's MLP."""

    columns = 2 * WIDTH

    def forward(self, x):
        gate, up = self.qkv(x).chunk(2, dim=-1)
        return self.out(nn.functional.silu(gate) * up)


KINDS = [Attention, Chunks, Sizes, Slices, Views, Unpacked, Numbered, Rows, Gate, lambda: Attention(Conv1D)]


def pair(block):
    """Converted without and with the option."""
    torch.manual_seed(0)
    return ak.convert(copy.deepcopy(block)), ak.convert(copy.deepcopy(block), fuse_residuals=True)


def trained(block, amp=True, x=None):
    """The result and the gradients of a step."""
    x = normal(B, T, WIDTH, seed=3) if x is None else x
    x = (x if amp else x.bfloat16()).detach().requires_grad_()
    block.zero_grad()
    with torch.autocast("cpu", bf16, enabled=amp):
        y = block(x)
    (y.float() * normal(*y.shape, seed=5)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in block.parameters() if p.ndim == 2)]


def assert_same(one, other):
    assert all(torch.equal(*each) for each in zip(one, other, strict=True))


@pytest.fixture
def read(monkeypatch):
    """Number of backwards since the last call that read gradients in place."""
    calls, own = [], _linear._gradients_of_pieces
    monkeypatch.setattr(_linear, "_gradients_of_pieces", lambda *args: calls.append(args) or own(*args))

    def count():
        found = len(calls)
        calls.clear()
        return found

    return count


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
    ):
        monkeypatch.setattr(Uses, "after", lambda self, qkv: 0)
        _, ours = pair(Uses())
        for _ in range(2):
            trained(ours)
        monkeypatch.setattr(Uses, "after", late)
        with pytest.raises(RuntimeError, match="result was split, and then written to or given a hook"):
            trained(ours)


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

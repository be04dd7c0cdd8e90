"""A linear layer and its activation run as one where a container holds both, and only there."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from amp_kernels.nn import MLP, Linear, convert, fused, revert

nn = torch.nn
ACTIVATIONS = [nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU()]


@pytest.fixture
def called(op_calls):
    """The package's ops that ran, by name and activation, since it was asked last."""

    def names():
        found = [(name, kwargs.get("activation", "none")) for name, calls in op_calls.items() for _, kwargs in calls]
        op_calls.clear()
        return sorted(found)

    return names


def run(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_a_sequential(act, called):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), act, nn.Dropout(0.0), nn.Linear(16, 8), act)
    ours = convert(copy.deepcopy(model))
    kinds = [type(m) for m in ours]
    x = torch.randn(4, 8)
    assert torch.equal(ours(x), model(x)), "fp32 is torch's own"
    called()
    y = run(ours, x)
    (name,) = {activation for op, activation in called() if op == "gemm"} - {"none"}
    assert {"ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}[type(act).__name__] in name
    torch.testing.assert_close(y.float(), model(x), rtol=0.05, atol=0.05)
    y.float().square().sum().backward()
    model(x).square().sum().backward()
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05 * q.grad.abs().max().item())
    assert [type(m) for m in convert(ours)] == kinds
    assert [type(m) for m in revert(ours)] == [type(m) for m in model]
    assert type(ours) is nn.Sequential
    assert vars(ours).keys() == vars(model).keys()


def gemms(called, model):
    called()
    run(model, torch.randn(2, 4))
    return [activation for op, activation in called() if op == "gemm"]


def pair(act=None):
    return convert(nn.Sequential(nn.Linear(4, 4), act or nn.ReLU()))


def test_hooks_are_called_with_what_they_saw_before(called):
    for which in (0, 1):
        model = pair()
        seen = []
        handle = model[which].register_forward_hook(lambda _, x, y, seen=seen: seen.append((x, y)))
        assert gemms(called, model) == ["none"]
        (((x,), y),) = seen
        assert torch.equal(y, x.relu()) if which else y.lt(0).any()
        handle.remove()
        assert gemms(called, model) == ["relu"]
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert gemms(called, model) == ["none"]
    finally:
        handle.remove()


def test_each_module_on_its_own_is_what_it_was():
    model = pair(nn.SiLU())
    x = torch.randn(2, 4)
    assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
    assert torch.equal(model[:1](x), model[0](x))
    assert torch.equal(model[1](x), nn.functional.silu(x))


def _replaced_forward(module):
    module.forward = torch.sigmoid
    return module


@pytest.mark.parametrize(
    "change",
    [
        lambda m: parametrizations.weight_norm(m[0]),
        lambda m: prune.l1_unstructured(m[0], "weight", 2),
        lambda m: _replaced_forward(m[1]),
        lambda m: m.__setitem__(1, nn.Tanh()),
        lambda m: setattr(m[0], "activation", "gelu"),
    ],
)
def test_layers_changed_later_are_called_as_they_are(change, called):
    model = pair()
    change(model)
    assert "relu" not in gemms(called, model)
    x = torch.randn(2, 4)
    assert torch.equal(model(x), model[1](model[0](x)))


def test_skip_and_what_is_not_converted(called):
    for skip in ("0", "1", [nn.ReLU]):
        model = convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), skip=skip)
        assert type(model) is nn.Sequential
        assert "relu" not in gemms(called, model)
    assert type(convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), skip=[nn.Sequential])) is nn.Sequential
    for act in (nn.Tanh(), nn.LeakyReLU(), nn.PReLU(), nn.GLU(), nn.RReLU(), nn.ReLU6(), nn.Hardswish()):
        assert type(convert(nn.Sequential(nn.Linear(4, 4), act))) is nn.Sequential


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_sequential_with_a_forward_of_its_own_is_left_alone():
    model = convert(Doubled(nn.Linear(4, 4), nn.ReLU()))
    assert type(model) is Doubled
    assert type(model[0]) is Linear


def test_a_dropout_that_drops_stays(called):
    model = convert(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4)))
    torch.manual_seed(0)
    first, second = run(model, torch.ones(1, 4)), run(model, torch.ones(1, 4))
    assert not torch.equal(first, second)
    model.eval()
    called()
    y = run(model, torch.ones(1, 4))
    assert torch.equal(run(model, torch.ones(1, 4)), y)
    y.sum().backward()
    assert "gemm_dact" in dict(called()), "both layers are one"


class Block(nn.Module):
    """GPT-2's feed-forward block."""

    def __init__(self, p=0.0):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(8, 12), nn.Linear(12, 8)
        self.act, self.dropout = nn.GELU(approximate="tanh"), nn.Dropout(p)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class T5Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.wi, self.wo = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
        self.dropout, self.act = nn.Dropout(p), nn.ReLU()

    def forward(self, x):
        x = self.dropout(self.act(self.wi(x)))
        return self.wo(x.to(self.wo.weight.dtype))


class Gated(nn.Module):
    """Llama's."""

    def __init__(self, p=0.0):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class GatedOtherwise(Gated):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class DropsEarly(Block):
    def forward(self, x):
        return self.c_proj(self.dropout(self.act(self.c_fc(x))))


class Scaled(Block):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [Block, T5Block, Gated])
def test_feed_forward_blocks(kind, called):
    torch.manual_seed(0)
    block = kind()
    with torch.autocast("cpu", torch.bfloat16):
        ours = convert(copy.deepcopy(block))
    assert isinstance(ours, kind)
    assert type(ours) is not kind
    x = torch.randn(3, 8)
    assert torch.equal(ours(x), block(x))
    called()
    y = run(ours, x)
    assert [a for op, a in called() if op == "gemm" and a != "none"] == [
        {Block: "gelu_tanh", T5Block: "relu", Gated: "silu"}[kind]
    ]
    torch.testing.assert_close(y.float(), block(x), rtol=0.05, atol=0.02)
    assert type(revert(ours)) is kind


def test_recomputed_activations(called, caplog):
    torch.manual_seed(0)
    plain, x = nn.Sequential(Block(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), MLP(8, 12)), torch.randn(3, 8)
    ours, other = convert(copy.deepcopy(plain)), convert(copy.deepcopy(plain), recompute_mlp=True)
    hidden = []
    for model in (ours, copy.deepcopy(other)):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.shape) or t, lambda t: t):
            model.result = run(model, x)
        hidden.append(sizes.count((3, 12)))
        model.result.sum().backward()
    assert hidden == [6, 3]
    assert torch.equal(ours.result, run(other, x))
    assert fused.RECOMPUTE not in vars(revert(other)[0])
    convert(nn.Sequential(Gated()), recompute_mlp=True)
    assert "recompute_mlp=True changes nothing" in caplog.text


def test_compiled():
    model = convert(nn.Sequential(nn.Linear(8, 8), nn.SiLU(), Block(), Gated()))
    x = torch.randn(3, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(compiled, x), run(model, x))


@pytest.mark.parametrize("kind", [Block, T5Block])
def test_a_block_drops_where_it_did(kind):
    block = kind(0.5)
    ours = convert(copy.deepcopy(block))
    x = torch.randn(3, 8)
    for _ in range(2):
        torch.manual_seed(1)
        expected = block(x)
        torch.manual_seed(1)
        assert torch.equal(ours(x), expected)
        block.eval(), ours.eval()


class Noisy(Block):
    def forward(self, x):
        return super().forward(x) + torch.rand(())


def test_random_numbers_and_warnings_are_the_programs_own(recwarn):
    """RReLU draws in training, Softmax without a dimension warns, a block may do what it likes."""
    models = [nn.Sequential(nn.Linear(4, 4), kind()) for kind in (nn.RReLU, nn.Softmax, nn.LogSoftmax)] + [Noisy()]
    for model in models:
        before = torch.get_rng_state()
        convert(model)
        assert torch.equal(torch.get_rng_state(), before)
    assert not recwarn.list


@pytest.mark.parametrize("kind", [GatedOtherwise, DropsEarly, Scaled])
def test_a_block_that_computes_something_else_is_left_alone(kind):
    assert type(convert(kind())) is kind


class MayEndEarly(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.fc1, self.activation_fn = nn.Linear(8, 8), nn.GELU()
        self.fc2 = nn.Linear(8, 8) if last else None

    def forward(self, x):
        x = self.activation_fn(self.fc1(x))
        return x if self.fc2 is None else self.fc2(x)


def test_a_block_without_one_of_its_layers():
    x = torch.randn(3, 8)
    block = MayEndEarly(last=False)
    ours = convert(copy.deepcopy(block))
    assert (type(ours), type(ours.fc1)) == (MayEndEarly, Linear)
    assert torch.equal(ours(x), block(x))
    block = MayEndEarly(last=True)
    ours = convert(copy.deepcopy(block))
    assert type(ours) is not MayEndEarly
    block.fc2 = ours.fc2 = None  # taken away later
    assert torch.equal(ours(x), block(x))
    hole = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    hole.add_module("2", None)
    assert type(convert(hole)[0]) is Linear


def test_a_block_of_two_dtypes_casts_as_it_did():
    block = T5Block().bfloat16()
    block.wo.float()
    ours = convert(copy.deepcopy(block))
    assert type(ours) is not T5Block
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    assert ours(x).dtype == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert ours(x).dtype == torch.float16


def test_tied_layers_in_a_block_get_the_sum_of_their_gradients():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    ours = convert(copy.deepcopy(model))
    assert ours[0] is ours[2]
    x = torch.randn(3, 4)
    run(ours, x).float().sum().backward()
    model(x).sum().backward()
    torch.testing.assert_close(ours[0].weight.grad, model[0].weight.grad, rtol=0.05, atol=0.05)


def test_names_of_modules_do_not_matter():
    model = convert(nn.Sequential(OrderedDict(activation=nn.Linear(4, 4), z_loss=nn.ReLU())))
    assert model.forward.__func__ is fused.sequential
    assert type(revert(model)) is nn.Sequential


def test_nested_inputs_are_not_fused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=torch.jagged)
    torch.testing.assert_close([*convert(copy.deepcopy(model))(x).unbind()], [*model(x).unbind()], rtol=0, atol=0)

"""Additions that norms make in blocks of any style: torch's layers, timm's, and some written by hand."""

import copy
import logging

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import amp_kernels as ak

from .blocks import GPT, WIDTH, Attention, Stack, check_same, inputs, is_fused, pair, results

nn = torch.nn


class Scaled(nn.Module):
    """timm's LayerScale and DropPath, as modules."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.full((WIDTH,), factor))

    def forward(self, x):
        return x * self.factor


class Timm(GPT):
    def __init__(self):
        super().__init__()
        self.ls1, self.drop_path1, self.ls2, self.drop_path2 = Scaled(0.5), nn.Identity(), Scaled(0.25), nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop_path1(self.ls1(self.attn(self.ln_1(x))[0]))
        return x + self.drop_path2(self.ls2(self.mlp(self.ln_2(x))))


class Plain(GPT):
    """Scaled by a parameter, dropped out by a function, masked on request, additions by methods."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x, mask=None):
        branch = self.gamma * self.attn(self.ln_1(x))[0]
        if mask is not None:
            branch = branch.masked_fill(mask, 0)
        x = x.add(F.dropout(branch, 0.25, self.training))
        return torch.add(F.relu(self.mlp(self.ln_2(self.between(x)))), x)

    def between(self, x):
        return x


class ByHand(Plain):
    """The second norm is not of the sum itself."""

    def between(self, x):
        return x + 0.0


class Parallel(GPT):
    """Phi's."""

    def forward(self, x):
        y = self.ln_1(x)
        return self.attn(y)[0] + self.mlp(y) + x


class Looping(GPT):
    """One norm for all but the last of the same additions."""

    def forward(self, x):
        for _ in range(3):
            x = x + self.mlp(self.ln_1(x))
        return x.tanh()


class Shared(GPT):
    """One dropout for all, and an addition on request."""

    def __init__(self):
        super().__init__()
        self.ln_3, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x, context=None):
        if context is not None:
            x = x + self.dropout(self.mlp(self.ln_3(x) + context))
        x = x + self.dropout(self.attn(self.ln_1(x))[0])
        return x + self.dropout(self.mlp(self.ln_2(x)))


class Scripted(GPT):
    def __init__(self):
        super().__init__()
        self.mlp = torch.jit.script(self.mlp)


class AddNorm(nn.Module):
    """Adds what it gets."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, y):
        return self.norm(x + y)


class PostNorm(GPT):
    def __init__(self):
        super().__init__()
        self.add_1, self.add_2 = AddNorm(), AddNorm()

    def forward(self, x):
        x = self.add_1(x, y=self.attn(x)[0])
        return self.add_2(x, self.mlp(x))


class PreNorm(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.norm, self.function = nn.LayerNorm(WIDTH), function

    def forward(self, x):
        return self.function(self.norm(x))


class Nested(nn.Module):
    """Pairs in a list, each submodule with its own norm."""

    def __init__(self):
        super().__init__()
        pairs = ((Attention(1), nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, WIDTH))) for _ in range(2))
        self.layers = nn.ModuleList(nn.ModuleList(map(PreNorm, pair)) for pair in pairs)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for attention, mlp in self.layers:
            x = attention(x) + x
            x = mlp(x) + x
        return self.norm(x)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.layers = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH) for i in range(3)})

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers.values(), strict=True):
            x = x + layer(norm(x))
        return x


def encoder(norm_first):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, norm_first=norm_first, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


class Decoder(nn.Module):
    def __init__(self, norm_first):
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, norm_first=norm_first, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(WIDTH))

    def forward(self, x):
        return self.decoder(x, x.flip(1))


NORMS = {
    Timm: (),
    ByHand: ("ln_1", "+", "ln_2"),
    Plain: (),
    Parallel: ("ln_1", "+"),
    Looping: 3 * ("ln_1",),
    Shared: ("ln_1", "ln_2"),
    Scripted: (),
    AddNorm: (),
    PreNorm: (),
    Nested: (),
    Lists: (),
}
for kind, norms in NORMS.items():
    ak.nn.register_block(kind, *norms)


#: Models, and the number of additions in a forward that norms make.
MODELS = {
    "timm": (lambda: Stack(Timm, 2, nn.LayerNorm(WIDTH)), 4),
    "by hand": (lambda: Stack(Plain, 2, nn.LayerNorm(WIDTH)), 4),
    "between two": (lambda: Stack(ByHand, 2, nn.LayerNorm(WIDTH)), 2),
    "parallel": (lambda: Stack(Parallel, 2, nn.LayerNorm(WIDTH)), 2),
    "shared": (lambda: Stack(Shared, 2, nn.LayerNorm(WIDTH)), 4),
    "scripted": (lambda: Stack(Scripted, 2, nn.LayerNorm(WIDTH)), 4),
    "post-norm": (lambda: Stack(PostNorm, 2), 4),
    "looping": (Looping, 2),
    "nested": (Nested, 4),
    "lists": (Lists, 2),
    "encoder, norms first": (lambda: encoder(True), 4),
    "encoder": (lambda: encoder(False), 4),
    "decoder, norms first": (lambda: Decoder(True), 6),
    "decoder": (lambda: Decoder(False), 6),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_additions_of_any_style(name, training, fused):
    make, additions = MODELS[name]
    torch.manual_seed(0)
    plain, ours = pair(make().train(training))
    x = inputs(GPT)
    fused()
    for _ in range(2):
        got = results(ours, x)
        assert fused() == additions
    want = results(plain, x)
    check_same(got, want, rtol=2**-6, atol=0.05)
    with torch.no_grad():
        assert torch.equal(ours.eval()(*x), plain.eval()(*x))
    assert ours.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize(
    ("kind", "options", "additions"),
    [(Plain, {"mask": torch.arange(WIDTH) < 3}, 1), (Shared, {"context": torch.ones(())}, 2)],
)
def test_paths_on_request(kind, options, additions, fused):
    plain, ours = pair(kind())
    x = inputs(GPT)
    for _ in range(2):
        fused()
        got = results(ours, x, False, **options)
        assert fused() == additions
        torch.testing.assert_close([*got], [*results(plain, x, False, **options)])


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")], ids=["no_grad", "inference", "meta"]
)
def test_the_conversion_depends_on_no_context(context):
    model = GPT()
    with context():
        ak.convert(model, fuse_residuals=True)
    assert is_fused(model)


def test_a_compiled_function_in_a_block():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    doubled = torch.compile(lambda x, y: x * 2 + torch.relu(x) + (x + y), backend=counter)

    class Compiled(GPT):
        def forward(self, x):
            x = x + doubled(self.attn(self.ln_1(x))[0], x)
            return x + self.mlp(self.ln_2(x))

    ak.nn.register_block(Compiled)
    plain, ours = pair(Stack(Compiled, 2))
    assert is_fused(ours.blocks[0])
    x = inputs(GPT)
    torch.testing.assert_close([*results(ours, x, False)], [*results(plain, x, False)])
    for _ in range(3):
        results(ours, x, False)
    assert counter.frame_count < 8  # by dtype and class of tensor, and not by call: 5


class Switched(GPT):
    swap = False

    def forward(self, x):
        one, other = (self.ln_2, self.ln_1) if self.swap else (self.ln_1, self.ln_2)
        x = x + self.mlp(one(x))
        if self.swap:
            x = torch.tanh(x)
        return x + self.mlp(other(x))


ak.nn.register_block(Switched)


def test_another_order_than_planned_gets_torch_s_additions(fused):
    plain, ours = pair(Switched())
    x = inputs(GPT)
    assert torch.equal(ours(*x), plain(*x))
    plain.swap = ours.swap = True
    for expected in (1, 0):  # the first time a norm is computed, and nobody fetches it
        fused()
        torch.testing.assert_close([*results(ours, x)], [*results(plain, x)], rtol=0, atol=0)
        assert fused() == expected


class Partly(GPT):
    """Checkpoints the part after the sum."""

    reentrant = False

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))[0]
        if self.training:
            return x + checkpoint(lambda t: self.mlp(self.ln_2(t)), x, use_reentrant=self.reentrant)
        return x + self.mlp(self.ln_2(x))


ak.nn.register_block(Partly)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_within_a_block_computes_its_norm_twice(reentrant):
    plain, ours = pair(Stack(Partly, 2, nn.LayerNorm(WIDTH)).eval())
    assert is_fused(ours.blocks[0])
    Partly.reentrant = reentrant
    x = inputs(GPT)
    for model in (plain, ours):
        model.train()
    for _ in range(2):
        torch.testing.assert_close([*results(ours, x, False)], [*results(plain, x, False)])


def test_blocks_of_unknown_classes_are_named(caplog):
    class Unusual(GPT):
        pass

    model = nn.Sequential(GPT(), GPT(), Unusual())
    with caplog.at_level(logging.DEBUG, logger="amp_kernels"):
        ak.convert(copy.deepcopy(model), fuse_residuals=True)
    assert "convert: 2 (Unusual) keeps its additions: its class is not known" in caplog.messages
    assert f"convert: 0 is now {GPT.__module__.partition('.')[0]}" not in caplog.text
    assert "convert: 0 is now amp_kernels.nn.residual.GPT" in caplog.messages

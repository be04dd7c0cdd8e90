"""batch_invariant: the gradients of all parameters have the same bits over any split of the tokens."""

import itertools

import pytest
import torch

import amp_kernels as ak

from ..helpers import generators
from ..helpers.backends import use
from . import raw

FEATURES, HIDDEN, WORDS = 24, 40, 50


class Model(torch.nn.Module):
    """Every kind of parameter: embedding, both norms, a layer, an MLP, a head with a loss."""

    def __init__(self, dtype, activation="gelu", chunk=None):
        super().__init__()
        torch.manual_seed(0)
        options = {"dtype": dtype}
        self.words = ak.nn.Embedding(WORDS, FEATURES, padding_idx=3, **options)
        self.norm = ak.nn.RMSNorm(FEATURES, **options)
        self.layer = ak.nn.Linear(FEATURES, FEATURES, activation="silu", **options)
        self.centred = ak.nn.LayerNorm(FEATURES, **options)
        self.mlp = ak.nn.MLP(FEATURES, HIDDEN, activation=activation, **options)
        self.head = ak.nn.Linear(FEATURES, WORDS, **options)
        self.chunk = chunk

    def forward(self, tokens):
        x = self.words(tokens)
        x = x + self.layer(self.norm(x))
        y, x = self.centred(self.mlp(x), residual=x)
        return ak.linear_cross_entropy(
            x + y,
            self.head.weight,
            7 * tokens % WORDS,
            linear_bias=self.head.bias,
            reduction="sum",
            chunk_size=self.chunk,
        )


def gradients(model, tokens, sizes, autocast=None):
    """Gradients of the mean over all tokens, accumulated over parts of ``sizes`` tokens; and the addresses of the sums."""
    for part in tokens.split(sizes):
        with ak.batch_invariant(), torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = model(part)
        (loss.float() / 2**8).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def assert_same(got, expected):
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not different


def tokens(count, seed=0):
    return torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(seed))


SPLITS = [[64, 149], [128, 85], [192, 21], [64, 64, 64, 21], [128, 64, 21]]


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_micro_batches_are_one_pass(dtype, activation):
    model, ids = Model(dtype, activation), tokens(213)
    with ak.nn.accumulate_fp32(model):
        whole = gradients(model, ids, [213])
        assert all(grad.dtype == torch.float32 and grad.abs().sum() > 0 for grad in whole.values())
        for sizes in SPLITS:
            model.zero_grad()
            assert_same(gradients(model, ids, sizes), whole)
    model.zero_grad()
    rounded = gradients(model, ids, [213])  # without main_grad
    assert_same(rounded, {name: grad.to(dtype) for name, grad in whole.items()})


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_under_autocast(autocast):
    model, ids = Model(torch.float32), tokens(150, seed=1)
    with ak.nn.accumulate_fp32(model):
        whole = gradients(model, ids, [150], autocast)
        model.zero_grad()
        assert_same(gradients(model, ids, [64, 86], autocast), whole)
    model.zero_grad()
    assert_same(gradients(model, ids, [150], autocast), whole)


def test_chunks_of_the_loss_do_not_show():
    ids, expected = tokens(213), None
    for chunk in (None, 64, 128, 192, 213):
        model = Model(torch.bfloat16, chunk=chunk)
        with ak.nn.accumulate_fp32(model):
            got = gradients(model, ids, [213])
        expected = expected or got
        assert_same(got, expected)


def test_threads_do_not_show(same_bits_for):
    model, ids = Model(torch.bfloat16), tokens(213)

    def run():
        model.zero_grad()
        return gradients(model, ids, [213])

    with ak.nn.accumulate_fp32(model):
        same_bits_for((1, 2, 3), run)


def test_gradients_of_a_norm_are_close_to_float64():
    """Of rows whose means differ and that are longer than what the CPU takes at a time."""
    rows, columns = 130, 1100
    x = generators.normal(rows, columns, dtype=torch.float32) + torch.linspace(-2, 3, rows)[:, None]
    dy = generators.normal(rows, columns, dtype=torch.float32, seed=1)
    weight, bias = torch.ones(columns, requires_grad=True), torch.zeros(columns, requires_grad=True)
    with ak.batch_invariant():
        ak.layer_norm(x, (columns,), weight, bias).backward(dy)
    normalized = torch.nn.functional.layer_norm(x.double(), (columns,))
    torch.testing.assert_close(weight.grad.double(), (dy * normalized).sum(0), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(bias.grad.double(), dy.double().sum(0), rtol=1e-5, atol=1e-4)


def test_a_fresh_start_does_not_read_main_grad():
    model, ids = Model(torch.bfloat16), tokens(100)
    with ak.nn.accumulate_fp32(model):
        first = gradients(model, ids, [100])
        model.zero_grad()
        for param in model.parameters():
            param.main_grad.fill_(torch.nan)
        assert_same(gradients(model, ids, [100]), first)
        model.zero_grad(set_to_none=False)
        assert_same(gradients(model, ids, [100]), first)


def test_every_gradient_lies_in_main_grad_and_goes_with_the_handle():
    model = Model(torch.bfloat16)
    with ak.nn.accumulate_fp32(model):
        gradients(model, tokens(70), [70])
        assert all(param.grad.data_ptr() == param.main_grad.data_ptr() for param in model.parameters())
    assert not any(hasattr(param, "main_grad") or param._backward_hooks for param in model.parameters())
    assert {param.grad.dtype for param in model.parameters()} == {torch.bfloat16}


def test_outside_of_the_block_biases_stay_autograds():
    model = Model(torch.bfloat16)
    with ak.nn.accumulate_fp32(model):
        model(tokens(70)).backward()
        assert not any(hasattr(p, "main_grad") for p in (model.layer.bias, model.norm.weight, model.centred.bias))
        assert model.layer.bias.grad.dtype == torch.float32


def test_a_bias_with_a_hook_of_its_own_is_left_to_autograd():
    model, seen = Model(torch.bfloat16), []
    model.layer.bias.register_hook(seen.append)
    with ak.nn.accumulate_fp32(model):
        gradients(model, tokens(70), [64, 6])
    assert len(seen) == 2


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_products_start_from_what_they_add_to(backend):
    """dW of 200 tokens in parts, over the layouts in which a gradient and an input may lie."""
    for m, n, by_rows in itertools.product((1, 40), (8, 33, 64), (True, False)):
        dz, x = (generators.normal(200, size, dtype=torch.bfloat16, seed=size) for size in (m, n))
        if not by_rows:
            dz, x = dz.t().contiguous().t(), x.t().contiguous().t()
        start = generators.normal(m, n, dtype=torch.float32, seed=2)
        with use(backend):
            whole = start.clone()
            raw.gemm_accumulate_(whole, dz.t(), x, batch_invariant=True)
            for sizes in ([64, 136], [128, 72], [64, 64, 64, 8]):
                got = start.clone()
                for a, b in zip(dz.split(sizes), x.split(sizes), strict=True):
                    raw.gemm_accumulate_(got, a.t(), b, batch_invariant=True)
                assert torch.equal(got, whole), (m, n, by_rows, sizes)
            torch.testing.assert_close(whole.double(), start + dz.double().t() @ x.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_micro_batches_on_the_cuda_kernels(capability, monkeypatch):
    monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", capability)
    monkeypatch.setenv("AMP_KERNELS_EMULATE_TRUNCATE", "1")
    ids = tokens(150)
    with ak.backend("emulate"):
        model = Model(torch.bfloat16)
        with ak.nn.accumulate_fp32(model):
            whole = gradients(model, ids, [150])
            model.zero_grad()
            assert_same(gradients(model, ids, [64, 86]), whole)
        model.zero_grad()
        assert_same(gradients(model, ids, [150]), {name: grad.bfloat16() for name, grad in whole.items()})

"""ak.nn.LayerNorm and RMSNorm are torch's modules with another forward."""

import copy
import pickle

import pytest
import torch

import amp_kernels as ak
from amp_kernels.nn import accumulate_fp32, convert


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("options", [{}, {"eps": 0.1}, {"elementwise_affine": False}])
def test_parameters_state_and_result_are_torchs(name, options):
    stock, ours = getattr(torch.nn, name)((4, 8), **options), getattr(ak.nn, name)((4, 8), **options)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in stock.state_dict().items()}
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(3, 4, 8)
    torch.testing.assert_close(ours(x), stock(x))
    y, total = ours(x, residual=x)
    assert torch.equal(total, 2 * x)
    torch.testing.assert_close(y, stock(2 * x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(ours))(x), ours(x))
    torch.testing.assert_close(copy.deepcopy(ours)(x), ours(x))


def test_layer_norm_without_bias():
    ours = ak.nn.LayerNorm(8, bias=False)
    assert list(ours.state_dict()) == ["weight"]
    ours(torch.randn(2, 8)).sum().backward()
    assert ours.weight.grad is not None


class GemmaNorm(torch.nn.RMSNorm):
    """Adds one to its weight."""

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def test_convert():
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(8), torch.nn.RMSNorm(8), torch.nn.LayerNorm(8, elementwise_affine=False), GemmaNorm(8)
    )
    model[0].register_forward_hook(lambda *_: calls.append(1))
    calls, weight, x = [], model[0].weight, torch.randn(3, 8)
    expected = model(x)
    convert(convert(model))
    assert [type(m) for m in model] == [ak.nn.LayerNorm, ak.nn.RMSNorm, ak.nn.LayerNorm, GemmaNorm]
    assert model[0].weight is weight
    torch.testing.assert_close(model(x), expected)
    assert calls == [1, 1]


def test_under_autocast_a_layer_gets_its_16_bits_without_an_fp32_copy():
    model = convert(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)))
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(3, 8)).sum().backward()
    assert seen == [(torch.float32, torch.bfloat16)]


def test_gradients_of_16_bit_weights_can_be_fp32():
    """The sums over 4,096 rows themselves, not rounded to bf16 and not stuck at 256."""
    model = ak.nn.LayerNorm(4).bfloat16()
    with accumulate_fp32(model):
        model(torch.randn(4099, 4).bfloat16()).sum().backward()
        assert model.bias.grad.dtype == torch.float32
        assert (model.bias.grad == 4099).all()

"""to_half: which parameters and buffers become 16 bits wide, and that such a model trains."""

import pytest
import torch

import amp_kernels as ak

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.GroupNorm(2, 4),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 8),
        torch.nn.LayerNorm(8),
        torch.nn.Linear(8, 2),
    )


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_everything_but_the_norms(dtype):
    model = ak.convert(network())
    model[6].weight.requires_grad_(False)
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    weights = [module.weight for module in model if hasattr(module, "weight")]
    assert ak.nn.to_half(model, dtype) is model
    assert [w.dtype for w in weights] == [dtype, f32, dtype, dtype, f32, dtype], (
        "conv, batch, group, linear, layer, linear"
    )
    assert model[1].running_var.dtype == f32
    assert model[1].num_batches_tracked.dtype == model.count.dtype == torch.int64
    assert not model[6].weight.requires_grad
    assert {p.dtype for p in ak.nn.to_half(model, dtype, keep_norms=False).parameters()} == {dtype}
    assert model[1].running_var.dtype == dtype


class LlamaRMSNorm(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(columns)), 1e-6

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_other_norms_become_16_bits_wide_and_their_statistics_do_not(dtype):
    """The squares of 300 overflow in FP16."""
    model = ak.convert(
        torch.nn.ModuleList([torch.nn.GroupNorm(4, 4), torch.nn.InstanceNorm1d(4, affine=True), LlamaRMSNorm(8)])
    )
    ak.nn.to_half(model, dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    x = torch.tensor([300.0, 0.0]).repeat(2, 4, 4).to(dtype)
    for norm in model[:2]:
        torch.testing.assert_close(
            norm(x), torch.tensor([1.0, -1.0], dtype=dtype).repeat(2, 4, 4), rtol=2**-7, atol=0.0
        )


def test_tied_weights_stay_tied_and_such_a_model_trains():
    model = ak.convert(network())
    model.append(torch.nn.Linear(2, 8, bias=False))
    model.append(torch.nn.Linear(8, 2, bias=False))
    shared = torch.nn.Parameter(torch.randn(2, 8))
    model[8].weight = shared
    model[4].register_parameter("tied", shared)
    ak.nn.to_half(model, bf16)
    assert model[8].weight is model[4].tied is shared
    optimizer = ak.optim.AdamW(model.parameters(), lr=1e-2, master_weights="split")
    x = torch.randn(16, 3, 6, 6, dtype=bf16)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        out = model(x)
        assert out.dtype == bf16
        loss = (out.float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("model", "dtype", "text"),
    [
        (3, f16, "model has type int; accepted: a torch.nn.Module"),
        (network(), f32, "dtype is torch.float32; accepted: float16, bf"),
    ],
)
def test_bad_input(model, dtype, text):
    with pytest.raises(TypeError, match=f"to_half: {text}"):
        ak.nn.to_half(model, dtype)

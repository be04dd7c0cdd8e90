"""A printed model says which modules compute with this package's functions, in place of which class, and with which option."""

import pytest
import torch

import amp_kernels as ak


class Conv1D(torch.nn.Module):
    """With a ``__repr__`` of its own, as that of transformers."""

    __module__, __qualname__ = "transformers.pytorch_utils", "Conv1D"

    def __init__(self):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.zeros(3))

    def __repr__(self):
        return "Conv1D(nf=3, nx=2)"


class LlamaRMSNorm(torch.nn.Module):
    __module__ = "transformers.models.llama.modeling_llama"

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, (4,), self.weight, self.variance_epsilon)

    def extra_repr(self):
        return f"(4,), eps={self.variance_epsilon}"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.norm(x + self.layer(x))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (torch.nn.Linear(2, 3), "in_features=2, out_features=3, bias=True, amp_kernels.linear in place of torch.nn.Linear"),
        (torch.nn.LayerNorm(4, bias=False), "amp_kernels.layer_norm in place of torch.nn.LayerNorm"),
        (torch.nn.RMSNorm(4), "amp_kernels.rms_norm in place of torch.nn.RMSNorm"),
        (torch.nn.Embedding(3, 4), "Embedding(3, 4, amp_kernels.embedding in place of torch.nn.Embedding)"),
        (torch.nn.CrossEntropyLoss(), "CrossEntropyLoss(amp_kernels.cross_entropy in place of torch.nn.CrossEntropyLoss)"),
        (Conv1D(), "Conv1D(nf=3, nx=2, amp_kernels.linear in place of transformers.Conv1D)"),
        (LlamaRMSNorm(), "LlamaRMSNorm((4,), eps=1e-06, amp_kernels.rms_norm in place of transformers.LlamaRMSNorm)"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_converted_module_tells_its_function_and_former_class(module, line):
    before = repr(module)
    assert line in repr(ak.convert(module))
    assert repr(ak.revert(module)) == before


def test_containers_activations_and_options_are_shown():
    ak.nn.register_block(Block)
    model = ak.convert(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.GELU("tanh"), Block()), fuse_residuals=True)
    text = repr(model)
    assert "  amp_kernels.mlp or amp_kernels.linear in place of torch.nn.Sequential\n" in text
    assert "(1): GELU(approximate='tanh', gelu(approximate='tanh') in place of torch.nn.GELU)" in text
    assert f"    amp_kernels.convert(fuse_residuals=True) in place of {__name__.partition('.')[0]}.Block\n" in text
    untouched = ak.convert(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh()), skip=["0"])
    assert "amp_kernels" not in repr(untouched)
    assert "z_loss=0.1, inplace=True, amp_kernels" in repr(ak.nn.CrossEntropyLoss(z_loss=0.1, inplace=True))

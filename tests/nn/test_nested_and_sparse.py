"""Nested and sparse inputs: what torch's modules do with them, the converted ones do."""

import copy

import pytest
import torch

import amp_kernels as ak

MODULES = [torch.nn.Linear(8, 6), torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)]


def outcome(model, x, autocast):
    """Result and gradient of the weight, or the error."""
    model.zero_grad()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        parts = y.unbind() if y.is_nested else [y]
        sum(part.float().square().sum() for part in parts).backward()
    except (RuntimeError, NotImplementedError) as error:
        return type(error)
    return [*(part.detach() for part in parts), model.weight.grad]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided, torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_converted_modules_give_what_torchs_give(module, layout, autocast):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 8, generator=generator) for n in (3, 5)]
    if layout in (torch.jagged, torch.strided):
        x = torch.nested.nested_tensor(rows, layout=layout)
    else:
        x = rows[0].relu().to_sparse(layout=layout)
    expected, found = outcome(module, x, autocast), outcome(ak.convert(copy.deepcopy(module)), x, autocast)
    if isinstance(expected, type):
        assert found is expected, "torch cannot do it either"
    else:
        assert all(map(torch.equal, found, expected))


class Own(torch.Tensor):
    """Stands for a quantised weight: its own linear, and no other operation that reads it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            with torch._C.DisableTorchFunctionSubclass():
                x, weight, *bias = args
                return function(x.float(), 2 * weight.as_subclass(torch.Tensor).float(), *bias).to(x.dtype)
        assert function not in (torch.Tensor.to, torch.Tensor.t)
        return super().__torch_function__(function, types, args, kwargs or {})


def result(function, *args):
    """The result, or the type of the error."""
    try:
        return function(*args)
    except (RuntimeError, NotImplementedError) as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo, Own])
def test_weights_that_only_torchs_linear_reads(form, autocast):
    """Given to a layer after it was converted, and to the functions."""
    x, bias, weight = torch.randn(5, 4), torch.randn(4), torch.randn(4, 4).relu()
    weight = weight.as_subclass(form) if form is Own else weight.to_sparse(layout=form)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    ours = ak.convert(copy.deepcopy(model))
    for each in (model, ours):
        each[0].weight = each[2].weight = torch.nn.Parameter(weight, requires_grad=False)
    torchs = torch.nn.functional.linear
    pairs = [
        (model, ours, x),
        (torchs, ak.linear, x, weight),
        (torchs, ak.linear, x, weight, bias),
        (torchs, lambda *args: torch.cat(ak.linear(*args, split=[1, 3]), 1), x, weight),
        (lambda *args: torchs(*args).relu(), lambda *args: ak.linear(*args, activation="relu"), x, weight),
    ]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for theirs, own, *args in pairs:
            expected, found = result(theirs, *args), result(own, *args)
            assert found is expected if isinstance(expected, type) else torch.equal(found, expected)


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_an_activation_is_applied_all_the_same(activation):
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)
    linear = ak.nn.Linear(8, 6, activation=activation)
    for part, row in zip(linear(x).unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(part, linear(row))
    assert ak.gelu(x).is_nested

"""ak.nn.functional: torch's names take torch's arguments."""

import inspect
import re
import warnings

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak

# As torch 2.13 documents it.
LINEAR_CROSS_ENTROPY = "input linear_weight target linear_bias weight reduction ignore_index label_smoothing options"


def names_in_torch(name):
    """Names of the signature, or of the docstring if the function is written in C."""
    function = getattr(F, name, None)
    if function is None and name == "linear_cross_entropy":  # before torch 2.13
        return LINEAR_CROSS_ENTROPY.split()
    try:
        return [*inspect.signature(function).parameters]
    except ValueError:
        arguments = function.__doc__.strip().splitlines()[0].partition("(")[2]
        return re.findall(r"(\w+)(?:\s*=[^,)]*)?[,)]", arguments)


@pytest.mark.parametrize("name", ak.nn.functional.__all__)
def test_the_names_of_arguments_are_torchs(name):
    ours, torchs = [*inspect.signature(getattr(ak.nn.functional, name)).parameters], names_in_torch(name)
    assert torchs[0] == "input"
    assert ours[: len(torchs)] == torchs
    if name == "linear_cross_entropy":
        assert ours == [*LINEAR_CROSS_ENTROPY.split(), "more"]


def test_torchs_arguments_give_torchs_results():
    x, w, y = torch.randn(4, 6), torch.rand(6), torch.tensor([0, 5, 2, 2])
    for name, args, options in [
        ("cross_entropy", (x, y, w, None, 2, None, "sum", 0.1), {}),
        ("cross_entropy", (x, y), {"size_average": False}),
        ("cross_entropy", (), {"input": x, "target": y, "reduce": False}),
        ("layer_norm", (), {"input": x, "normalized_shape": (6,), "weight": w, "bias": w, "eps": 0.1}),
        ("rms_norm", (), {"input": x, "normalized_shape": (6,), "weight": w, "eps": 0.1}),
        ("linear", (), {"input": x, "weight": x, "bias": w[:4]}),
        ("gelu", (x,), {"approximate": "tanh"}),
        ("silu", (torch.tensor(0.5),), {}),
    ]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arguments that torch has given up
            got = getattr(ak.nn.functional, name)(*args, **options)
            torch.testing.assert_close(got, getattr(F, name)(*args, **options))
    inplace = x.clone()
    assert ak.nn.functional.silu(inplace, inplace=True) is inplace
    assert torch.equal(inplace, F.silu(x))
    assert ak.nn.functional.linear(x, -x, activation="relu").min() == 0
    assert ak.nn.functional.cross_entropy(x, y, z_loss=1.0) > ak.nn.functional.cross_entropy(x, y)


def test_linear_cross_entropy_passes_every_argument_on():
    x, w, y = torch.randn(6, 8), torch.randn(5, 8), torch.tensor([0, 4, 2, 2, 1, 0])
    bias, classes = torch.randn(5), torch.rand(5) + 0.5
    options = {"weight": classes, "reduction": "sum", "ignore_index": 2, "label_smoothing": 0.1}
    got = ak.nn.functional.linear_cross_entropy(x, w, y, linear_bias=bias, options=object(), **options)
    torch.testing.assert_close(got, F.cross_entropy(F.linear(x, w, bias), y, **options))

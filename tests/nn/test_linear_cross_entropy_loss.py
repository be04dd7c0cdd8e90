"""ak.nn.LinearCrossEntropyLoss: the arguments, state_dict and results of torch 2.13's module."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak

TORCHS = getattr(torch.nn, "LinearCrossEntropyLoss", None)  # from torch 2.13 on
ARGUMENTS = ["in_features", "num_classes", "out_features", "bias", "device", "dtype"]
ARGUMENTS += ["reduction", "weight", "ignore_index", "label_smoothing", "options"]
CASES = [
    {},
    {"bias": True, "reduction": "sum"},
    {"reduction": "none", "ignore_index": 2},
    {"weight": torch.rand(5), "label_smoothing": 0.1, "bias": True},
]


def problem(out_features, probabilities):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator)
    logits = torch.randn(6, 5, *out_features, generator=generator)
    return x, logits.softmax(1) if probabilities else logits.argmax(1)


def test_the_signature_is_torchs():
    for function in (ak.nn.LinearCrossEntropyLoss, *filter(None, [TORCHS])):
        assert list(inspect.signature(function).parameters)[: len(ARGUMENTS)] == ARGUMENTS


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("out_features", [(), (3,), (2, 3)])
@pytest.mark.parametrize("options", CASES)
def test_several_predictions_for_each_row(options, out_features, probabilities):
    if probabilities and "ignore_index" in options:
        options = {key: value for key, value in options.items() if key != "ignore_index"}
    layer = ak.nn.LinearCrossEntropyLoss(4, 5, out_features=out_features, **options)
    x, target = problem(out_features, probabilities)
    logits = F.linear(x, layer.linear.weight, layer.linear.bias).unflatten(1, (5, *out_features))
    expected = F.cross_entropy(logits, target, **{key: value for key, value in options.items() if key != "bias"})
    found = layer(x, target)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.sum(), list(layer.parameters()))
    torch.testing.assert_close(torch.autograd.grad(found.sum(), list(layer.parameters())), wanted)


@pytest.mark.parametrize(
    ("shape", "bias", "said"),
    [
        ((4,), None, r"input has shape \[4\]"),
        ((2, 3, 4), None, r"input has shape \[2, 3, 4\]"),
        ((6, 4), 15, r"linear_bias \[15\]"),
    ],
)
def test_shapes_of_several_predictions(shape, bias, said):
    bias = bias if bias is None else torch.zeros(bias)
    with pytest.raises(
        ValueError, match=rf"{said}.*accepted: \[N, in_features\], \[classes, \*dimensions, in_features\]"
    ):
        ak.nn.functional.linear_cross_entropy(
            torch.zeros(shape), torch.zeros(5, 3, 4), torch.zeros(6, 3).long(), linear_bias=bias
        )


def test_chunks_are_for_one_prediction():
    with pytest.raises(ValueError, match=r"chunk_size is 2; accepted with out_features=\(3,\): None"):
        ak.nn.LinearCrossEntropyLoss(4, 5, out_features=(3,), chunk_size=2)


if TORCHS is not None:

    @pytest.mark.parametrize("out_features", [(), (2, 3)])
    @pytest.mark.parametrize("options", CASES)
    def test_convert_changes_no_result(options, out_features):
        theirs = TORCHS(4, 5, out_features=out_features, **options)
        ours = ak.convert(copy.deepcopy(theirs))
        assert type(ours) is ak.nn.LinearCrossEntropyLoss
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        x, target = problem(out_features, False)
        torch.testing.assert_close(ours(x, target), theirs(x, target))
        assert isinstance(ours, TORCHS)
        assert type(ak.revert(ours)) is TORCHS

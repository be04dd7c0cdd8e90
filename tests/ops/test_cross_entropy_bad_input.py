"""Errors of cross_entropy name the argument; classes out of range are an error on the CPU and NaN elsewhere."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels.ops.cross_entropy import cross_entropy


def test_classes_out_of_range():
    logits, target = torch.zeros(3, 5, requires_grad=True), torch.tensor([0, 1, 2])
    for bad in (5, -1, 2**40):
        target[1] = bad
        for call in (cross_entropy, ak.cross_entropy):  # the second by a node in C++, where there is one
            with pytest.raises(
                ValueError, match=rf"^cross_entropy: target\[1\] is {bad}; accepted: 0 to 4, and ignore_"
            ):
                call(logits, target)
        for backend in ("reference", "emulate"):  # as on a GPU, which is not waited for
            with ak.backend(backend):
                loss = cross_entropy(logits, target, reduction="none")
                assert loss.isnan().tolist() == [False, True, False]
                loss.sum().backward()
            assert logits.grad.isnan().all(1).tolist() == [False, True, False]
            logits.grad = None


def test_a_class_out_of_range_by_its_place_in_the_target():
    """Not in the rows that a kernel, or a chunk of linear_cross_entropy, has."""
    target = torch.zeros(2, 3, dtype=torch.int64)
    target[0, 1], target[1, 2] = -100, 5
    message = r"target\[1, 2\] is 5; accepted: 0 to 4, and ignore_index, -100"
    with pytest.raises(ValueError, match="^cross_entropy: " + message):
        ak.cross_entropy(torch.zeros(2, 5, 3), target)
    with pytest.raises(ValueError, match="^linear_cross_entropy: " + message):
        ak.linear_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(5, 4), target, chunk_size=1)
    with pytest.raises(ValueError, match=r"^cross_entropy: target is 5; accepted"):
        ak.cross_entropy(torch.zeros(5), torch.tensor(5))
    ak.cross_entropy(torch.zeros(1, 300), torch.tensor([255], dtype=torch.uint8))


X, Y = torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((X.int(), Y), {}, TypeError, "logits has dtype int32"),
        ((X, Y.int()), {}, TypeError, "target has dtype int32; accepted: int64, uint8"),
        ((torch.tensor(0.0), Y), {}, ValueError, "logits has no dimension"),
        ((X, Y[:3]), {}, ValueError, r"target has shape \[3\]; accepted: \[4\]"),
        ((X, X[:, :4]), {}, ValueError, r"target has dtype float32, that of probabilities, and shape \[4, 4\]; accepted: \[4, 5\]"),
        ((X, X), {"ignore_index": 0}, ValueError, "ignore_index is 0, but the target holds probabilities"),
        ((X[:, :0], Y), {}, ValueError, "target names classes, and logits of shape"),
        ((X, Y, torch.ones(4)), {}, ValueError, r"weight has shape \[4\]; accepted: \[5\]"),
        ((X, Y, torch.ones(5).half()), {}, TypeError, "weight has dtype float16; accepted: float32"),
        ((X, Y), {"reduction": "avg"}, ValueError, "reduction is 'avg'; accepted: 'mean', 'sum', 'none'"),
        ((X, Y), {"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5; accepted: a number from 0 to 1"),
        ((X, Y), {"z_loss": -1.0}, ValueError, "z_loss is -1.0"),
        ((X[None], Y[None, :1].expand(1, 5)), {"inplace": True}, ValueError, "inplace=True, but logits of shape"),
        ((X.t().contiguous().t(), Y), {"inplace": True}, ValueError, "inplace=True, but logits of shape"),
        ((X.double(), Y), {"inplace": True}, ValueError, "inplace=True, but logits of .*float64"),
        ((X[:1].expand(4, 5), Y), {"inplace": True}, ValueError, "elements share"),
        ((X, Y.to("meta")), {}, ValueError, "target is on meta, but logits is on cpu"),
    ],
)  # fmt: skip
def test_bad_input(args, options, error, message):
    with pytest.raises(error, match=message):
        cross_entropy(*args, **options)


@pytest.mark.parametrize("namespace", ["amp_kernels", "amp_kernels_emulated"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: X.double()}, "logits must have dtype float16, bfloat16, float32; got float64"),
        ({0: X.t().contiguous().t()}, "logits must be .* with adjacent classes"),
        ({1: Y[:3]}, "target must have one class a row"),
        ({1: X[:, :4]}, "target, of probabilities, must have the shape"),
        ({1: X.double()}, "target must have dtype"),
        ({2: torch.ones(4)}, "weight must have shape"),
        ({2: torch.ones(10)[::2]}, "weight must be contiguous"),
        ({3: None}, "factor and grad must be given together"),
        ({3: torch.ones(3)}, "factor must have shape"),
        ({4: torch.ones(3)}, "loss must have shape"),
        ({4: torch.ones(4).double()}, "loss must have dtype float32"),
        ({5: X.double()}, "grad must have dtype float16, bfloat16, float32; got float64"),
        ({0: X.half(), 5: X.bfloat16()}, "grad must have dtype float16; got bfloat16"),
        ({5: torch.zeros(4, 10)[:, ::2]}, "grad must have the shape of logits"),
    ],
)
def test_the_kernels_check_what_reaches_them(namespace, change, message):
    args = [X, Y, torch.ones(5), torch.ones(4), torch.zeros(4), torch.zeros(4, 5)]
    for position, value in change.items():
        args[position] = value
    with pytest.raises(RuntimeError, match=rf"^cross_entropy_rows_: {message}"):
        getattr(torch.ops, namespace).cross_entropy_rows_(*args)

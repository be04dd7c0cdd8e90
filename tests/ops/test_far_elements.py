"""Elements beyond 2^31 of what the CPU kernels read and write, where a place that is counted in 32 bits is one before the tensor. Memory
that nobody touches takes none; what a kernel must walk through to get there is tried with ``--exhaustive``. The CUDA kernels' share is
tests/emulator/test_far_elements.cpp, Triton's tests/triton/interpreted_far_elements.py."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels.ops.linear_cross_entropy import linear_cross_entropy

from ..helpers.generators import normal

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
COLUMNS = 48
FAR = 2**31 + 8
ROWS = FAR // COLUMNS + 2  # of which the last begins past FAR


@pytest.fixture(autouse=True)
def on_the_cpu():
    with ak.backend("cpu"), torch.no_grad():
        yield


def apart(t: torch.Tensor) -> torch.Tensor:
    """The matrix, with rows FAR elements from each other."""
    rows, columns = t.shape
    far = torch.empty(FAR * (rows - 1) + columns, dtype=t.dtype).as_strided((rows, columns), (FAR, 1))
    return far.copy_(t)


def test_rows_of_a_loss():
    logits = normal(2, COLUMNS, dtype=bf16)
    target = normal(2, COLUMNS, dtype=f16, seed=1).softmax(1)
    factor = torch.ones(2)
    results = []
    for place in (torch.clone, apart):
        loss, grad = torch.empty(2), place(torch.empty_like(logits))
        REGISTRY["cross_entropy_rows_"](place(logits), place(target), None, factor, loss, grad)
        results.append([loss, grad.clone()])
    assert all(map(torch.equal, *results))


def test_rows_of_head_and_loss():
    x, weight, target = normal(2, COLUMNS, dtype=bf16), normal(11, COLUMNS, dtype=bf16, seed=1), torch.tensor([3, 10])
    want = linear_cross_entropy(x, weight, target, reduction="none")
    assert torch.equal(linear_cross_entropy(apart(x), weight, target, reduction="none"), want)


def test_a_row_of_an_embedding():
    table, grad = torch.empty(ROWS, COLUMNS), torch.randint(-3, 4, (3, COLUMNS)).half()
    table[-1] = 1
    REGISTRY["embedding_accumulate_"](table, grad, torch.full((3,), ROWS - 1), torch.arange(3))
    assert torch.equal(table[-1], 1 + grad.float().sum(0))


def last_row(dtype: torch.dtype = bf16, columns: int = COLUMNS) -> torch.Tensor:
    """Rows of which the last holds values and the others zeros, if memory is new."""
    t = torch.empty(ROWS, columns, dtype=dtype)
    t[-1] = normal(columns, dtype=dtype)
    return t


def activation(name: str):
    return lambda x: REGISTRY["activation_forward"](x, activation=name)


def gradient(name: str):
    return lambda grad, x: REGISTRY["activation_backward"](grad, x, activation=name)[0]


def cast(x):
    to = torch.empty_like(x, dtype=f16)
    REGISTRY["cast_"]([to], [x])
    return to


def norm_gradient(grad, x):
    statistics = torch.ones(len(x)), torch.zeros(len(x))
    return REGISTRY["norm_backward"](grad, x, *statistics)[0]


#: Functions of matrices, and how many.
WALKS = {
    "norm_forward": (1, lambda x: REGISTRY["norm_forward"](x, eps=1e-5, centred=True, out_dtype=f16)[0]),
    "norm_backward": (2, norm_gradient),
    "activation_forward": (1, activation("relu")),
    "activation_backward": (2, gradient("relu")),
    "swiglu": (1, activation("swiglu")),
    "cast_": (1, cast),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("matrices", "call"), WALKS.values(), ids=WALKS)
def test_the_last_row_is_that_row(matrices, call):
    """The matrices take 4 GiB each, and as much for the result."""
    far = [last_row() for _ in range(matrices)]
    got = call(*far)[-1:].clone()
    assert torch.equal(got, call(*(t[-1:].clone() for t in far)))

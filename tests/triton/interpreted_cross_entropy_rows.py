"""The Triton kernel of cross_entropy_rows_ in the interpreter, against the reference and on rows that begin anywhere; run
by test_interpreted.py."""

import math

import pytest
import torch

import amp_kernels as ak
from amp_kernels._raw.cross_entropy_rows import op
from amp_kernels._triton import cross_entropy_rows as module

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TOLERANCE = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18}


def both(logits, target, weight, factor, grad, **options):
    """The kernel's loss and gradient, and the reference's."""
    results = []
    for run in (module.cross_entropy_rows_, ak.backend("reference")(op)):
        loss, out = torch.full((logits.shape[0],), math.nan), None if grad is None else grad()
        run(logits, target, weight, factor, loss, out, **options)
        results.append((loss, out))
    return results


@pytest.fixture
def small_blocks(monkeypatch):
    """Rows of several blocks without rows of thousands."""
    monkeypatch.setattr(module, "BLOCK", 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 7, 127, 128, 129, 255, 256, 257, 391])
@pytest.mark.parametrize("offset", [0, 1, 3, 7])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}])
def test_rows_that_begin_anywhere(small_blocks, dtype, classes, offset, options):
    generator = torch.Generator().manual_seed(classes)
    rows, stride = 3, classes + offset % 3
    memory = torch.full((rows * stride + 8,), math.nan, dtype=dtype)
    logits = memory[offset:].as_strided((rows, classes), (stride, 1), offset)
    logits.copy_(4 * torch.randn(rows, classes, generator=generator))
    target = torch.tensor([0, -100, classes - 1])
    red = torch.full((rows * stride + 24,), 7.0, dtype=dtype)
    grads = []

    def grad():
        grads.append(red.clone())
        return grads[-1][8 + offset // 2 :].as_strided((rows, classes), (stride, 1), 8 + offset // 2)

    (loss, out), (want, want_out) = both(logits, target, torch.rand(classes) + 0.5, torch.randn(3), grad, **options)
    torch.testing.assert_close(loss, want, rtol=2.0**-18, atol=2.0**-18)
    torch.testing.assert_close(out, want_out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for other in grads:  # nothing was written beside the rows
        other.as_strided((rows, classes), (stride, 1), 8 + offset // 2).fill_(7.0)
        assert torch.equal(other, red)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_ignored_or_unknown(small_blocks, bad):
    logits = torch.randn(4, 200)
    logits[:3] = bad
    target = torch.tensor([-100, 200, -1, 5])
    (loss, out), (want, want_out) = both(logits, target, None, torch.ones(4), lambda: torch.empty(4, 200))
    assert loss.isnan().tolist() == [False, True, True, False]
    torch.testing.assert_close(loss, want, equal_nan=True)
    torch.testing.assert_close(out, want_out, equal_nan=True)


@pytest.mark.parametrize("at", [slice(0, 130), slice(128, 256), slice(0, 300)])
def test_masked_logits(small_blocks, at):
    logits = torch.randn(2, 300)
    logits[0, at] = -math.inf
    (loss, out), (want, want_out) = both(
        logits, torch.tensor([257, 1]), None, torch.ones(2), lambda: torch.empty(2, 300)
    )
    torch.testing.assert_close(loss, want, equal_nan=True)
    torch.testing.assert_close(out, want_out, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 128, 129, 391])
def test_what_fp32_logits_have_more(small_blocks, dtype, classes):
    """Statistics, and from them a gradient in another type, at any address; a class that is nobody's has no column."""
    generator = torch.Generator().manual_seed(classes)
    logits = 4 * torch.randn(4 * classes + 3, generator=generator)[3:].view(4, classes)
    logits[1, : classes // 2] = logits[2, : classes - 1] = -math.inf
    target, temperature = torch.tensor([0, -100, classes - 1, classes // 2]), torch.linspace(0.5, 2, 4)
    results = []
    for run in (module.cross_entropy_rows_, ak.backend("reference")(op)):
        loss = torch.full((4,), math.nan)
        statistics = torch.full((3, 4), math.nan)
        grad = torch.full((4, classes), math.nan, dtype=dtype)
        run(logits, target, None, None, loss, None, temperature=temperature, statistics=statistics)
        of_two = torch.full((2, 4), math.nan)
        run(logits, target, None, None, loss.clone(), None, temperature=temperature, statistics=of_two)
        assert torch.equal(of_two, statistics[:2])
        more = {"temperature": temperature, "known": statistics, "entropy_factor": torch.linspace(-1, 1, 4)}
        run(logits, torch.tensor([0, -100, classes + 7, -3]), None, torch.ones(4), None, grad, **more)
        results.append((loss, statistics, grad.float()))
    for got, want, tolerance in zip(*results, (2.0**-18, 2.0**-18, TOLERANCE[dtype]), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_in_place_and_without_a_gradient(small_blocks):
    logits, target = torch.randn(3, 300), torch.tensor([4, -100, 299])
    (loss, out), _ = both(logits, target, None, torch.ones(3), lambda: torch.empty(3, 300))
    (alone, _), _ = both(logits, target, None, None, None)
    assert torch.equal(loss, alone)
    module.cross_entropy_rows_(logits, target, None, torch.ones(3), alone, logits)
    assert torch.equal(logits, out)


def test_the_public_function():
    logits, target = torch.randn(5, 9, requires_grad=True), torch.randint(9, (5,))
    with ak.backend("triton"):
        loss = ak.cross_entropy(logits, target, label_smoothing=0.1)
        loss.backward()
    want = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(logits.grad, torch.autograd.grad(want, logits)[0])


def test_the_kernel_checks_its_arguments():
    x, y, row = torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    for args, message in [
        ((x.double(), y, None, None, row, None), "logits has dtype float64"),
        ((x, y[:3], None, None, row, None), "target has shape"),
        ((x, y, torch.ones(4), None, row, None), "weight has shape"),
        ((x, y, None, row, row, x.t().contiguous().t()), "grad has strides"),
        ((x, y, None, row, row, None), "factor and grad go together"),
    ]:
        with pytest.raises((TypeError, ValueError), match=f"cross_entropy_rows_: {message}"):
            op._without_cpp_kernel(*args)

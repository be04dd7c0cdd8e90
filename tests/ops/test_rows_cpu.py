"""Functions of rows: a row has the bits that it has alone, on the CPU and the emulator, and on the CPU those of every width of vectors."""

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak
from amp_kernels._dispatch import cpu_isa, load
from amp_kernels._raw.column_sums import column_sums

from ..helpers.bits import assert_same_bits

pytestmark = pytest.mark.skipif("cpu" in load.absent(), reason="no CPU kernels")

WIDTHS = ("portable", "avx2", "avx512")
FUNCTIONS = {
    "layer_norm": lambda x, weight, bias, target: ak.layer_norm(x, weight.shape, weight, bias),
    "layer_norm of a sum": lambda x, weight, bias, target: ak.layer_norm(
        x, weight.shape, weight, bias, residual=x.detach().float()
    )[0],
    "rms_norm": lambda x, weight, bias, target: ak.rms_norm(x, weight.shape, weight),
    "cross_entropy": lambda x, weight, bias, target: ak.cross_entropy(x, target, reduction="none"),
    "a smoothed loss of weighted classes": lambda x, weight, bias, target: ak.cross_entropy(
        x, target, weight.detach().abs().float(), reduction="none", label_smoothing=0.1, z_loss=0.01
    ),
}
ROWS = 70  # more than a block of the shortest ones


def results(name, x, weight, bias, target):
    """The function and its gradients by every operand that has one."""
    operands = [t.detach().requires_grad_() for t in (x, weight, bias)]
    out = FUNCTIONS[name](*operands, target)
    slopes = torch.linspace(-1, 2, out.numel() // out.shape[0]).to(out.dtype).expand(out.shape[0], -1)
    grads = torch.autograd.grad(out, operands, slopes.reshape(out.shape), allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


def operands_of(generator, columns, dtype):
    x = (4 * torch.randn(ROWS, columns, generator=generator)).to(dtype)
    x[3, columns // 2] = 1e-40  # a subnormal number, NaN and infinity, each in its row
    x[5, columns - 1], x[7, 0], x[9, 0] = float("nan"), float("-inf"), float("inf")
    x[11], x[13] = 3.0, torch.linspace(-300, 0, columns)  # exponentials that are subnormal
    target = torch.randint(columns, (ROWS,), generator=generator)
    target[[0, 1, 20, 69]] = -100
    weight, bias = torch.randn(2, columns, generator=generator).to(dtype)
    return x, weight, bias, target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 63, 64, 100, 257, 1024, 1025, 2111])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_width_gives_the_same_bits(generator, name, columns, dtype):
    operands = operands_of(generator, columns, dtype)
    widths = [w for w in WIDTHS if w in cpu_isa.available()]
    if len(widths) < 2:
        pytest.skip("one width")
    found = {}
    for width in widths:
        with cpu_isa.cpu_isa(width):
            found[width] = results(name, *operands)
    first, *others = found.values()
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert_same_bits(a, b)


def check_rows_alone(name, generator, columns, rows):
    x, weight, bias, target = operands_of(generator, columns, torch.float32)  # no rounding hides a bit
    together = results(name, x, weight, bias, target)
    for row in rows:
        alone = results(name, x[row : row + 1], weight, bias, target[row : row + 1])
        for a, b in zip(together[:2], alone[:2], strict=True):
            assert_same_bits(a[row : row + 1], b)


@pytest.mark.parametrize("columns", [1, 10, 17, 64, 100, 257, 768, 1041])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_bits_that_it_has_alone(every_cpu_isa, generator, name, columns):
    check_rows_alone(name, generator, columns, range(ROWS))


@pytest.mark.parametrize("columns", [264, 1032])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_bits_that_it_has_alone_on_the_emulator(generator, name, columns):
    with ak.backend("emulate"):
        check_rows_alone(name, generator, columns, (2, 31))


@pytest.mark.parametrize(
    ("rows", "columns"), [(300, 700), (9, 40_000)], ids=["many rows", "columns of several threads"]
)
def test_gradients_of_weights_do_not_depend_on_the_number_of_threads(generator, same_bits_for, rows, columns):
    x, grad = torch.randn(2, rows, columns, generator=generator)
    weight, bias = torch.randn(2, columns, generator=generator)
    operands = [t.requires_grad_() for t in (x, weight, bias)]

    def gradients():
        return torch.autograd.grad(ak.layer_norm(x, weight.shape, weight, bias), operands, grad)

    torch.testing.assert_close(
        same_bits_for((1, 2, 3), gradients)[2], grad.double().sum(0).float(), rtol=1e-5, atol=1e-4
    )


LONG = 256 * 256 * 144  # of torch's own test of layer_norm
#: Functions whose results or gradients have sums of so many numbers of one sign, along a row or over rows.
LONG_SUMS = {
    "layer_norm": lambda m, x, weight: m.layer_norm(x, x.shape),
    "rms_norm": lambda m, x, weight: m.rms_norm(x, x.shape, eps=1e-3),
    "cross_entropy": lambda m, x, weight: m.cross_entropy(x[None], torch.tensor([5]), label_smoothing=0.1),
    "weight of a norm": lambda m, x, weight: m.rms_norm(x.view(-1, 2), (2,), weight, 1e-3),
    "embedding": lambda m, x, weight: (
        x.view(-1, 2) * m.embedding(torch.zeros(LONG // 2, dtype=torch.long), weight[None])
    ),
    "bias": lambda m, x, weight: x.view(-1, 2) + weight if m is F else Biased.apply(x.view(-1, 2), weight),
}


class Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, grad):
        return grad, column_sums(grad)


@pytest.mark.parametrize("name", LONG_SUMS)
def test_the_error_of_a_sum_does_not_grow_with_its_length(generator, name):
    x, slope = torch.rand(2, LONG, generator=generator)
    found = []
    for module, dtype in ((ak, torch.float32), (F, torch.float64)):
        operands = [x.to(dtype).requires_grad_(), torch.ones(2, dtype=dtype, requires_grad=True)]
        y = LONG_SUMS[name](module, *operands)
        grad = slope[: y.numel()].to(dtype).view_as(y)
        grads = torch.autograd.grad(y, operands, grad, allow_unused=True)
        found.append([t.detach().double() for t in (y, *grads) if t is not None])
    for mine, want in zip(*found, strict=True):
        assert (mine - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_nor_on_the_emulator(name):
    """A thread adds 513 squares, which in fp32 alone are off by 5e-6."""
    x = torch.full((2**18 + 3,), 1.2).sqrt()
    if name == "layer_norm":
        x[::2] *= -1
    with ak.backend("emulate"):
        y = LONG_SUMS[name](ak, x, None)
    assert (y - LONG_SUMS[name](F, x.double(), None)).abs().max() < 4e-7

"""The gradient of a bias: fp32 sums of columns within the bound of any order of summation, on the CPU the same bits for any number of
threads, on every set of instructions but ``portable``, which leaves them to torch, and in one pass with a derivative."""

import itertools

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch import cpu_isa, nodes
from amp_kernels._raw.column_sums import column_sums
from amp_kernels.ops import _linear

from ..helpers.backends import use
from ..helpers.bounds import assert_within
from ..helpers.poison import embed, poisoned_allocations
from ..helpers.processes import python
from . import raw
from .raw import activation_backward

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: Around the four rows that are added at a time, strips of 4, 5 and 16 rows, vectors of 16 and tiles of 1024 columns.
ROWS = (1, 3, 4, 5, 66, 259, 1023)
COLUMNS = (1, 15, 17, 33, 70, 1041)


@pytest.fixture(params=[*(f"cpu/{isa}" for isa in cpu_isa.available()), "emulate"])
def kernel(request):
    with use(request.param):
        yield


def matrix(rows, columns, generator, dtype):
    """Numbers of many sizes, so that a sum depends on its order."""
    x = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(-8, 8, (rows, 1), generator=generator)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_sums_are_within_the_bound(kernel, generator, dtype):
    for (rows, columns), transposed in zip(
        itertools.product(ROWS, COLUMNS), itertools.cycle([False, True]), strict=False
    ):
        x = matrix(rows, columns, generator, dtype)
        with poisoned_allocations():
            sums = column_sums(embed(x, offset=3, transposed=transposed, pad=1)[0])
        assert sums.dtype == FP32
        assert_within(sums, x.double().sum(0), rows * 2.0**-24 * x.double().abs().sum(0), f"{rows} x {columns}")
    assert torch.equal(column_sums(x[:0]), torch.zeros(columns))
    assert column_sums(x[:, :0]).shape == (0,)
    row = x[:1].round()  # in fp32 the sum of three equal numbers of 24 bits is rounded
    assert torch.equal(column_sums(row.expand(8, -1)), 8 * row[0].float())


def test_infinity_and_nan_stay_in_their_column(kernel, generator):
    x = matrix(70, 40, generator, BF16)
    x[3, 1], x[69, 2], x[5, 3], x[6, 3] = torch.nan, torch.inf, torch.inf, -torch.inf
    sums = column_sums(x)
    assert sums[1].isnan()
    assert sums[2] == torch.inf
    assert sums[3].isnan()
    assert sums[[0, *range(4, 40)]].isfinite().all()


def test_bits_do_not_depend_on_the_threads_or_the_instructions(generator, threads):
    x = matrix(1000, 300, generator, FP32)
    results = []
    for isa, count in itertools.product(set(cpu_isa.available()) - {"portable"}, (1, 2, 5)):
        threads(count)
        with cpu_isa.cpu_isa(isa):
            results.append(column_sums(x))
    assert all(torch.equal(sums, results[0]) for sums in results)


def test_portable_and_other_backends_have_the_bits_of_torch(generator, threads):
    threads(1)
    x = matrix(1000, 300, generator, BF16)
    expected = x.sum(0, dtype=FP32)
    with cpu_isa.cpu_isa("portable"):
        assert torch.equal(column_sums(x), expected)
    with use("reference"):
        assert torch.equal(column_sums(x), expected)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "swiglu"])
def test_one_pass_gives_the_bits_of_two(every_cpu_isa, generator, threads, implementation, activation):
    """The gradients of a bias that autograd gives, of long rows and of many, and of an expanded gradient; and those of
    weight and input, which the same pass makes."""
    threads(2)
    for rows, features, dtype in ((1000, 700, FP16), (130, 24, BF16), (70, 2100, BF16)):
        x = matrix(rows, 8, generator, dtype).requires_grad_()
        weight = torch.randn(features, 8, generator=generator).to(dtype).requires_grad_()
        bias = torch.randn(features, generator=generator).requires_grad_()
        for grad in (torch.randn(rows, features, generator=generator).to(dtype), torch.ones((), dtype=dtype)):
            out = ak.linear(x, weight, bias, activation=activation)
            grad = grad[:, : out.shape[1]] if grad.ndim else grad.expand(out.shape)
            ours = torch.autograd.grad(out, [x, weight, bias], grad)
            with torch.no_grad():
                z = raw.gemm(x, weight.t(), bias)
                dz = grad if activation == "none" else activation_backward(grad, z, activation=activation)
                expected = dz @ weight, dz.t() @ x, column_sums(dz)
            assert torch.equal(ours[2], expected[2])
            for one, other in zip(ours[:2], expected[:2], strict=True):
                torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * other.abs().max().item())


def test_a_derivative_brings_the_sums_of_its_rows(generator, monkeypatch):
    """In one op, eager and compiled."""
    monkeypatch.setattr(_linear, "column_sums", None)
    x = matrix(60, 8, generator, BF16)
    weight = torch.randn(40, 8, generator=generator).bfloat16()
    bias = torch.randn(40, generator=generator).requires_grad_()
    with nodes.refused():
        ak.linear(x, weight, bias, activation="silu").sum().backward()
        torch.compile(ak.linear, fullgraph=True, backend="aot_eager")(
            x, weight, bias, activation="silu"
        ).sum().backward()


WITHOUT_LIBRARIES = """
import torch

def refuse(path):
    raise OSError(path)

torch.ops.load_library = refuse
import amp_kernels as ak

assert "cpu" in ak._dispatch.load.absent()
x, weight = torch.randn(6, 8).bfloat16(), torch.randn(4, 8).bfloat16()
bias = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
ak.linear(x, weight, bias).sum().backward()
assert bias.grad.tolist() == [6.0] * 4
"""


def test_an_install_without_the_library_sums_by_torch():
    python("-c", WITHOUT_LIBRARIES)

"""override_matmul: torch's products on the package's GEMM, forward and backward, and nothing else."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak

from ..helpers import generators
from ..helpers.bounds import assert_within, reference_and_bound

normal = functools.partial(generators.normal, dtype=torch.bfloat16)


@pytest.fixture
def gemms(op_calls):
    return op_calls["gemm"]


PRODUCTS = {
    "mm": lambda a, b, c: (torch.mm(a[0], b[0]), a[0], b[0], None, 1, 0),
    "bmm": lambda a, b, c: (torch.bmm(a, b), a, b, None, 1, 0),
    "addmm": lambda a, b, c: (torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=-2), a[0], b[0], c[0], -2, 0.5),
    "baddbmm": lambda a, b, c: (torch.baddbmm(c, a, b, beta=2), a, b, c, 1, 2),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_product(name, dtype, gemms):
    a, b, c = normal(3, 6, 40, dtype=dtype), normal(3, 40, 5, dtype=dtype), normal(3, 6, 5, dtype=dtype)
    with ak.override_matmul(cpu=True) as override:
        out, a, b, c, alpha, beta = PRODUCTS[name](a, b, c)
    assert dict(override.calls) == {name: 1}
    assert len(gemms) == 1
    assert_within(out, *reference_and_bound(a, b, alpha=alpha, beta=beta, c=c, out_dtype=dtype))


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda a, b, c: a @ b, 1),
        (lambda a, b, c: torch.einsum("bik,bkj->bij", a, b), 1),
        (lambda a, b, c: F.linear(a, b[0].t(), c[0, 0]), 1),
        (lambda a, b, c: F.linear(a[0], b[0].t()), 1),
        (lambda a, b, c: torch.addmm(c[0, 0], a[0], b[0], beta=0), 1),
        (lambda a, b, c: F.relu(a), 0),
        (lambda a, b, c: a.float() @ b.float(), 0),
        (lambda a, b, c: a.double() @ b.double(), 0),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_calls_that_end_in_a_product_and_others(function, count, mode, gemms):
    with mode():
        operands = normal(3, 6, 40), normal(3, 40, 5), normal(3, 6, 5)
        expected = function(*operands)
        with ak.override_matmul(cpu=True):
            out = function(*operands)
    assert len(gemms) == count
    torch.testing.assert_close(out, expected, rtol=0 if count == 0 else 2**-7, atol=0 if count == 0 else 2**-6)


def test_cpu_tensors_only_when_asked(gemms):
    a, b = normal(6, 40), normal(40, 5)
    with ak.override_matmul() as override:
        assert torch.equal(a @ b, torch.mm(a, b))
    assert not gemms
    assert not override.calls


def test_the_backward_within_the_block_is_covered(gemms):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    x = normal(5, 8, dtype=torch.float32, grad=True)
    grads = []
    for covered in (False, True):
        model.zero_grad()
        x.grad = None
        with ak.override_matmul(cpu=covered), torch.autocast("cpu", torch.bfloat16):
            model(x).float().pow(2).sum().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
        assert len(gemms) == (6 if covered else 0)
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)


def test_a_bias_goes_in_before_the_rounding(gemms):
    a = torch.tensor([[1.0, 2.0**-5]]).bfloat16()
    with ak.override_matmul(cpu=True):
        assert F.linear(a, a, torch.tensor([-1.0]).bfloat16()).item() == 2.0**-10


def test_beta_zero_does_not_read_the_input():
    nan = torch.full((6, 5), math.nan).bfloat16()
    with ak.override_matmul(cpu=True):
        assert torch.addmm(nan, normal(6, 40), normal(40, 5), beta=0).isfinite().all()
        assert torch.addmm(nan[0], normal(6, 40), normal(40, 5), beta=0).isfinite().all()


def test_blocks_nest_and_end_with_an_exception(gemms):
    a, b = normal(6, 40), normal(40, 5)
    with ak.override_matmul(cpu=True) as outer:
        with ak.override_matmul(cpu=True) as inner:
            torch.mm(a, b)
        with pytest.raises(RuntimeError, match="must have shapes"):
            torch.mm(a, a)
        torch.mm(a, b)
    assert (outer.calls["mm"], inner.calls["mm"]) == (2, 1)
    del gemms[:]
    with pytest.raises(KeyError), ak.override_matmul(cpu=True):
        raise KeyError
    torch.mm(a, b)
    assert not gemms


def test_it_passes_batch_invariance_on(gemms):
    with ak.override_matmul(cpu=True), ak.batch_invariant():
        torch.mm(normal(6, 40), normal(40, 5))
    assert gemms[0][1]["batch_invariant"]

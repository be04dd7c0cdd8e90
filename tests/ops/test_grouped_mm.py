"""grouped_mm: the four forms, their gradients of any order, autocast, the rest of torch's machinery, and the errors."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import amp_kernels as ak
from amp_kernels._checks.activations import ACTIVATIONS
from amp_kernels.ops import _grouped
from amp_kernels.ops import grouped_mm as module
from amp_kernels.ops._shadows import refresh_shadow

from ..helpers.bounds import assert_within, reference_and_bound
from ..helpers.generators import HALF_DTYPES, normal
from ..helpers.poison import poisoned_allocations
from .groups import ends, ranges
from .tensors import gradient_penalty, leaves, relative, within

OFFS = ends(4, 4, 13, 20)  # of 24
SMALL = ends(2, 2, 5)  # of 6


def by_loops(a, b, offs, bias=None, activation="none"):
    """The product of each group in torch's differentiable operations."""
    if a.ndim == b.ndim == 3:
        return ACTIVATIONS[activation](a @ b + (0 if bias is None else bias if bias.ndim == 1 else bias[:, None]))
    if a.ndim == 3:
        return by_loops(b.t(), a.mT, offs).t()
    if b.ndim == 2:
        return torch.stack([a[:, terms] @ b[terms] for terms in ranges(offs)])
    parts = [a[rows] @ b[g] for g, rows in enumerate(ranges(offs))]
    if bias is not None:
        parts = [z + (bias if bias.ndim == 1 else bias[g]) for g, z in enumerate(parts)]
    out = ACTIVATIONS[activation](torch.cat(parts))
    return torch.cat([out, out.new_zeros(a.shape[0] - len(out), out.shape[1])])


@dataclass(frozen=True)
class Case:
    """``shapes``: letters of sizes, of which t is what the groups divide. ``behind``: for each tensor the dimension that they divide."""

    shapes: str
    behind: tuple[int | None, ...]
    activation: str = "none"

    def tensors(self, offs, dtype=torch.float32, scale=0.5, grad=True):
        sizes = {"t": 24 if len(offs) == 4 else 6, "g": len(offs), "m": 6, "k": 5, "n": 8}
        shapes = [[sizes[letter] for letter in word] for word in self.shapes.split()]
        return [normal(*shape, dtype=dtype, seed=i, scale=scale, grad=grad) for i, shape in enumerate(shapes)]

    def ours(self, offs, **options) -> Callable:
        offs = None if "t" not in self.shapes else offs
        return lambda a, b, bias=None: ak.grouped_mm(a, b, offs=offs, bias=bias, activation=self.activation, **options)

    def stock(self, offs) -> Callable:
        return lambda a, b, bias=None: by_loops(a, b, offs, bias, self.activation)


CASES = {
    **{f"rows {name}": Case("tk gkn gn", (0, None, None), name) for name in ACTIVATIONS},
    "rows, a bias for all": Case("tk gkn n", (0, None, None), "silu"),
    "rows, no bias": Case("tk gkn", (0, None)),
    "sums": Case("mt tn", (1, 0)),
    "columns": Case("gmk kt", (None, 1)),
    "batch": Case("gmk gkn", (None, None)),
    "batch swiglu": Case("gmk gkn gn", (None, None, None), "swiglu"),
    "batch, a bias for all": Case("gmk gkn n", (None, None, None), "gelu"),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
AUTOCAST = pytest.mark.parametrize("autocast", [None, *HALF_DTYPES])


@EACH
def test_gradcheck_in_float64(case):
    tensors = case.tensors(SMALL, torch.float64)
    assert gradcheck(case.ours(SMALL), tensors)
    assert gradgradcheck(case.ours(SMALL), tensors)


@EACH
@AUTOCAST
def test_results_and_gradients(case, autocast):
    """Against float64; NaN past the last end, in operands and in the gradient that arrives, on poisoned memory."""
    tensors = case.tensors(OFFS, torch.float32 if autocast else torch.bfloat16)
    exact = leaves(tensors, torch.float64)
    expected = case.stock(OFFS)(*exact)
    given = leaves(tensors, tensors[0].dtype)
    with torch.no_grad():
        for tensor, dim in zip(given, case.behind, strict=True):
            if dim is not None:
                tensor.narrow(dim, 20, 4).fill_(math.nan)
    with poisoned_allocations(), within(autocast):
        out = case.ours(OFFS)(*given)
    assert out.dtype == (autocast or torch.bfloat16)
    assert out.is_contiguous()
    assert relative(out, expected) < 1e-2
    grad = normal(*out.shape, seed=9)
    expected.backward(grad.double())
    dim = {"tk": 0, "gm": 1, "mt": None}[case.shapes[:2]] if "t" in case.shapes else None
    if dim is not None:
        assert not out.narrow(dim, 20, 4).any()
        grad.narrow(dim, 20, 4).fill_(math.nan)
    with poisoned_allocations():
        out.backward(grad.to(out.dtype))
    for tensor, one, behind in zip(given, exact, case.behind, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        assert relative(tensor.grad, one.grad) < 2e-2
        if behind is not None:
            assert not tensor.grad.narrow(behind, 20, 4).any()
        elif tensor.shape[0] == 4 and "t" in case.shapes:  # of each group, of which number 1 is empty
            assert not tensor.grad[1].any()


@EACH
@AUTOCAST
def test_double_backward(case, autocast):
    tensors = case.tensors(OFFS)

    def ours(*tensors):
        with within(autocast):
            return case.ours(OFFS)(*tensors)

    expected = gradient_penalty(case.stock(OFFS), leaves(tensors, torch.float64))
    actual = gradient_penalty(ours, leaves(tensors, torch.float32 if autocast else torch.float16))
    for one, other in zip(actual, expected, strict=True):
        assert relative(one, other) < (8e-2 if autocast == torch.bfloat16 else 5e-3)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_types_are_torchs_own(case, dtype, monkeypatch):
    """Also where the host does not know the groups, and then NaN stays where it is, too."""
    tensors = case.tensors(OFFS, dtype)
    expected = case.stock(OFFS)(*tensors)
    assert torch.equal(case.ours(OFFS)(*tensors), expected)
    with within(torch.bfloat16 if dtype == torch.float64 else None):  # not eligible for autocast
        assert torch.equal(case.ours(OFFS)(*tensors), expected)
    expected = torch.autograd.grad(expected.square().sum(), tensors)
    monkeypatch.setattr(_grouped, "values_are_known", lambda offs: False)
    given = leaves(tensors, dtype)
    with torch.no_grad():
        for tensor, dim in zip(given, case.behind, strict=True):
            if dim is not None:
                tensor.narrow(dim, 20, 4).fill_(math.nan)
    torch.testing.assert_close([*torch.autograd.grad(case.ours(OFFS)(*given).square().sum(), given)], [*expected])


@pytest.mark.parametrize("name", ["rows silu", "rows swiglu", "sums", "columns", "batch"])
@AUTOCAST
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(name, autocast, dynamic):
    case = CASES[name]

    def step(offs, *tensors):
        with within(autocast):
            return case.ours(offs)(*tensors)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for offs in (OFFS, ends(0, 24, 24, 24)):  # one program for all ends
        results = []
        for function in (step, compiled):
            copies = case.tensors(OFFS, torch.float32 if autocast else torch.bfloat16)
            out = function(offs, *copies)
            out.float().square().sum().backward()
            results.append([out, *(t.grad for t in copies)])
        assert all(map(torch.equal, *results))


def test_compiles_without_terms():
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: ak.grouped_mm(a, b, offs=OFFS), fullgraph=True, backend="aot_eager")
    a, b = torch.ones(24, 0, dtype=torch.bfloat16, requires_grad=True), torch.ones(4, 0, 6, dtype=torch.bfloat16)
    out = compiled(a, b)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert a.grad.shape == (24, 0)


def test_flops_are_those_of_all_rows():
    with FlopCounterMode(display=False) as counter:
        x, weight = normal(24, 8, dtype=torch.bfloat16, grad=True), normal(4, 8, 6, dtype=torch.bfloat16, grad=True)
        ak.grouped_mm(x, weight, offs=OFFS).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 24 * 8 * 6


@EACH
@AUTOCAST
def test_eager_calls_do_what_the_dispatcher_does(case, autocast, monkeypatch):
    through, overload = [], module.op.overload
    monkeypatch.setattr(module.op, "overload", lambda *a, **k: through.append(1) or overload(*a, **k))
    results = []
    for eager in (True, False):
        monkeypatch.setattr(module.autocast, "eager", lambda *tensors, eager=eager: eager)
        copies = case.tensors(OFFS, torch.float32 if autocast else torch.bfloat16)
        with within(autocast):
            out = case.ours(OFFS)(*copies)
        assert bool(through) != eager
        out.float().square().sum().backward()
        results.append([out, *(t.grad for t in copies)])
    assert all(map(torch.equal, *results))


def test_float32_weights_under_autocast_get_the_float32_sums():
    x, weight = normal(24, 40, grad=True), normal(4, 40, 8, seed=1, grad=True)
    bias = normal(4, 8, seed=2, grad=True)
    with within(torch.bfloat16):
        out = ak.grouped_mm(x, weight, offs=OFFS, bias=bias)
    grad = normal(24, 8, seed=3, dtype=torch.bfloat16)
    out.backward(grad)
    x16, weight16 = x.detach().bfloat16(), weight.detach().bfloat16()
    for g, rows in enumerate(ranges(OFFS)):
        assert_within(weight.grad[g], *reference_and_bound(x16[rows].t(), grad[rows], out_dtype=torch.float32))
        assert_within(x.grad[rows], *reference_and_bound(grad[rows], weight16[g].t(), out_dtype=torch.float32))
        ones = torch.ones(1, rows.stop - rows.start, dtype=torch.bfloat16)
        assert_within(bias.grad[g : g + 1], *reference_and_bound(ones, grad[rows], out_dtype=torch.float32))


def test_float32_operands_of_sums_get_the_float32_sums():
    a, b = normal(6, 24, grad=True), normal(24, 40, seed=1, grad=True)
    with within(torch.bfloat16):
        out = ak.grouped_mm(a, b, offs=OFFS)
    grad = normal(4, 6, 40, seed=3, dtype=torch.bfloat16)
    out.backward(grad)
    a16, b16 = a.detach().bfloat16(), b.detach().bfloat16()
    for g, terms in enumerate(ranges(OFFS)):
        assert_within(a.grad[:, terms], *reference_and_bound(grad[g], b16[terms].t(), out_dtype=torch.float32))
        assert_within(b.grad[terms], *reference_and_bound(a16[:, terms].t(), grad[g], out_dtype=torch.float32))


@pytest.mark.parametrize("grad", [True, False])
def test_autocast_reads_the_shadow(grad):
    x, weight = normal(24, 8), normal(4, 8, 6, seed=1, grad=grad)
    shadow = torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=False)
    refresh_shadow(weight, shadow)
    shadow.mul_(2)  # recognisable: no copy
    with within(torch.bfloat16):
        out = ak.grouped_mm(x, weight, offs=OFFS)
        through = torch.ops.amp_kernels.grouped_mm(x, weight, OFFS)
    assert torch.equal(out, ak.grouped_mm(x.bfloat16(), shadow, offs=OFFS))
    assert torch.equal(out, through)


def test_a_recorded_backward_reaches_the_weight_behind_its_shadow():
    x, weight = normal(24, 8, grad=True), normal(4, 8, 6, seed=1, grad=True)

    def mixed_derivative():
        with within(torch.float16):
            out = ak.grouped_mm(x, weight, offs=OFFS)
        (dx,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), weight)[0]

    expected = mixed_derivative()
    shadow = torch.empty_like(weight, dtype=torch.float16, requires_grad=False)
    refresh_shadow(weight, shadow)
    assert torch.equal(mixed_derivative(), expected)
    assert expected[0].any()


def test_out_dtype():
    a, b = torch.ones(3, 70_000, dtype=torch.float16), torch.ones(1, 70_000, 2, dtype=torch.float16, requires_grad=True)
    out = ak.grouped_mm(a, b, offs=ends(2), out_dtype=torch.float32)
    assert out.tolist() == [[70_000, 70_000]] * 2 + [[0, 0]]
    out.sum().backward()  # a gradient of stride 0
    assert (b.grad == 2).all()
    assert ak.grouped_mm(a.t()[:3], a, offs=ends(1, 3), out_dtype=torch.bfloat16).dtype == torch.bfloat16
    b = torch.ones(3, 2, dtype=torch.float16, requires_grad=True)
    ak.grouped_mm(a.t()[:5], b, offs=ends(1, 2), out_dtype=torch.float32).sum().backward()
    assert b.grad.tolist() == [[5, 5], [5, 5], [0, 0]]


@pytest.mark.parametrize("name", ["rows gelu", "sums", "columns", "batch"])
def test_func_transforms(name):
    case = CASES[name]
    tensors = case.tensors(SMALL, torch.float32, grad=False)
    tangents = tuple(normal(*t.shape, seed=8) for t in tensors)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        primals, directions = (tuple(t.to(dtype) for t in group) for group in (tensors, tangents))
        (out, tangent) = torch.func.jvp(case.ours(SMALL), primals, directions)
        expected = torch.func.jvp(case.stock(SMALL), tuple(tensors), tangents)
        torch.testing.assert_close((out.float(), tangent.float()), expected, rtol=tolerance, atol=2 * tolerance)
        many = torch.stack([primals[0], -primals[0]])
        mapped = torch.vmap(lambda a, rest=primals[1:]: case.ours(SMALL)(a, *rest))(many)
        torch.testing.assert_close(
            mapped[1].float(), case.stock(SMALL)(-tensors[0], *tensors[1:]), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [(0, 0, 0), (), (5, 5, 5)])
def test_a_rank_without_tokens_runs_forward_and_backward(dtype, counts):
    for rows in (0, 5) if counts != (5, 5, 5) else (5,):
        x, weight = normal(rows, 4, dtype=dtype, grad=True), normal(len(counts), 4, 6, dtype=dtype, grad=True)
        out = ak.grouped_mm(x, weight, offs=ends(*counts), activation="gelu")
        out.square().sum().backward()
        assert x.grad.shape == x.shape
        assert weight.grad.shape == weight.shape
        if counts != (5, 5, 5):
            assert not any(t.any() for t in (out, x.grad, weight.grad))
        else:
            assert weight.grad[0].any()
            assert not weight.grad[1:].any()


def test_ends_that_change_before_the_backward_are_an_error():
    offs = OFFS.clone()
    out = ak.grouped_mm(
        normal(24, 4, grad=True, dtype=torch.bfloat16), normal(4, 4, 6, dtype=torch.bfloat16), offs=offs
    )
    offs.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_batch_invariant_groups_have_the_bits_of_matmul():
    """The result and both gradients; the backward follows its forward."""
    x = normal(24, 40, dtype=torch.bfloat16, grad=True)
    weight = normal(4, 40, 16, dtype=torch.bfloat16, seed=1, grad=True)
    grad = normal(24, 16, seed=2, dtype=torch.bfloat16)
    with ak.batch_invariant():
        out = ak.grouped_mm(x, weight, offs=OFFS)
    out.backward(grad)
    for g, rows in enumerate(ranges(OFFS)):
        one, matrix = x.detach()[rows].requires_grad_(), weight.detach()[g].requires_grad_()
        with ak.batch_invariant():
            alone = ak.matmul(one, matrix)
        alone.backward(grad[rows])
        assert torch.equal(alone, out[rows])
        assert torch.equal(one.grad, x.grad[rows])
        assert torch.equal(matrix.grad, weight.grad[g])


@pytest.mark.parametrize("enabled", [True, False])
def test_every_product_is_told_of_batch_invariant(op_calls, enabled):
    """The backward follows its forward."""
    for shapes in (((24, 8), (4, 8, 6)), ((6, 24), (24, 8))):
        op_calls.clear()
        with ak.batch_invariant(enabled):
            out = ak.grouped_mm(*(normal(*s, dtype=torch.bfloat16, grad=True) for s in shapes), offs=OFFS)
        out.sum().backward()
        assert [kwargs.get("batch_invariant", False) for _, kwargs in op_calls["grouped_gemm"]] == [enabled] * 3


def test_on_the_meta_device():
    x, weight = torch.empty(24, 8, dtype=torch.bfloat16, device="meta"), torch.empty(4, 8, 6, device="meta").bfloat16()
    offs = torch.empty(4, dtype=torch.int32, device="meta")
    assert ak.grouped_mm(x, weight.requires_grad_(), offs=offs, activation="swiglu").shape == (24, 3)
    assert ak.grouped_mm(x.float(), weight.float(), offs=offs).shape == (24, 6)


def test_no_grad_calls_keep_no_preactivation(op_calls):
    x, weight = normal(24, 8, dtype=torch.bfloat16), normal(4, 8, 6, dtype=torch.bfloat16, grad=True)
    for grad in (True, False):
        op_calls.clear()
        with torch.set_grad_enabled(grad):
            ak.grouped_mm(x, weight, offs=OFFS, activation="silu")
        ((_, kwargs),) = op_calls["grouped_gemm"]
        assert kwargs.get("preact", False) == grad

"""Rows of tokens to their groups and back: ``route``, the raw ops, and ``grouped_mm`` with gather, scatter and weights."""

import itertools
import random

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import amp_kernels as ak
from amp_kernels._checks.activations import ACTIVATIONS
from amp_kernels._raw import routing as raw
from amp_kernels.nn import accumulate_fp32

from ..helpers.generators import HALF_DTYPES, normal
from ..helpers.poison import poisoned_allocations
from .groups import ends, rows_in_float64
from .raw import as_torch_op
from .tensors import gradient_penalty, leaves, relative

CHOSEN = torch.tensor([[3, 0], [0, 3], [3, 4], [0, 5], [5, 3]])  # of 5 groups: 1 and 2 are empty, 5 is nobody's
OFFS, PLACES = ends(3, 3, 3, 7, 8), torch.tensor([[3, 0], [1, 4], [5, 7], [2, 8], [9, 6]], dtype=torch.int32)
WIDTH = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}


def drawn_places(tokens, top_k, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens * top_k, generator=generator).int().view(tokens, top_k)


# ---- route


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_route(dtype):
    offs, places = ak.route(CHOSEN.to(dtype), 5)
    assert torch.equal(offs, OFFS)
    assert torch.equal(places, PLACES)
    assert {offs.dtype, places.dtype} == {torch.int32}


@pytest.mark.parametrize("groups", [2**15 - 1, 2**15, 40_000])
def test_the_last_of_many_groups(groups):
    offs, places = ak.route(torch.tensor([[groups - 1, 3], [groups, 2**40]]), groups)
    assert torch.equal(places, torch.tensor([[1, 0], [2, 3]], dtype=torch.int32))
    assert offs[[2, 3, -2, -1]].tolist() == [0, 1, 1, 2]


def test_routes_of_random_choices():
    """Within a group in the order of the tokens; choices of no group past the last end."""
    draw = random.Random(0)
    for _ in range(60):
        groups, tokens, top_k = draw.randint(0, 6), draw.randint(0, 9), draw.randint(0, 4)
        chosen = [[draw.randint(-2, groups + 2) for _ in range(top_k)] for _ in range(tokens)]
        offs, places = ak.route(torch.tensor(chosen, dtype=torch.int64).view(tokens, top_k), groups)
        flat = list(itertools.chain(*chosen))
        outside = [g if 0 <= g < groups else groups for g in flat]
        order = sorted(range(len(flat)), key=lambda i: outside[i])
        assert [order.index(i) for i in range(len(flat))] == places.flatten().tolist()
        assert offs.tolist() == [sum(g <= end for g in outside) for end in range(groups)]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((CHOSEN.float(), 5), TypeError, "chosen has dtype float32; accepted: int64, int32"),
        ((CHOSEN[0], 5), ValueError, r"chosen has shape \[2\]; accepted: \[T, k\]"),
        ((CHOSEN, -1), ValueError, "num_groups is -1; accepted: a whole number from 0"),
        (([[1]], 2), TypeError, "chosen has type list"),
    ],
)
def test_bad_choices(arguments, error, text):
    with pytest.raises(error, match=f"^route: {text}"):
        ak.route(*arguments)


# ---- the raw ops, on every backend


@pytest.mark.parametrize(("tokens", "top_k", "columns"), [(1, 1, 1), (9, 2, 40), (5, 8, 37), (3, 5, 1032), (4, 9, 256)])
def test_results_are_exact(device, tokens, top_k, columns):
    """One rounding for each product and each sum, in the order of the choices, and one at the end."""
    places = drawn_places(tokens, top_k, columns).to(device)
    x, y = (normal(n, columns, device=device, seed=n) for n in (tokens, tokens * top_k))
    weights = normal(tokens, top_k, device=device, seed=3)
    for dtype, factors in itertools.product((*HALF_DTYPES, torch.float32), (None, weights)):
        given, rows = x.to(dtype), y.to(dtype)
        with poisoned_allocations():
            out, dots = raw.spread_op(given, places, factors)
            wide = raw.spread_op(x, places, factors, out_dtype=dtype)[0]
            total = raw.combine_op(rows, places, factors)
            wide_total = raw.combine_op(rows, places, factors, out_dtype=torch.float32)
        assert dots is None or not dots.numel()
        assert torch.equal(out, raw.spread(given.float(), places, factors).to(dtype))
        assert torch.equal(wide, raw.spread(x, places, factors).to(dtype))
        expected = torch.zeros(tokens, columns, device=device)
        for j in range(top_k):
            chosen = rows[places[:, j].long()].float()
            expected += chosen if factors is None else factors[:, j, None] * chosen
        assert torch.equal(total, expected.to(dtype))
        assert torch.equal(wide_total, expected)


@pytest.mark.parametrize("columns", [0, 1, 40, 37, 1100, 4096])
def test_gradients_of_weights(device, columns):
    """Sums of products of 11 bits or fewer, which are exact in fp32: an error of (columns - 1) additions."""
    places = drawn_places(6, 3, columns).to(device)
    x = normal(6, columns, device=device)
    y = normal(18, columns, device=device, seed=1)
    weights = normal(6, 3, device=device)
    for dtype in (*HALF_DTYPES, torch.float32):
        for given in (x.to(dtype), x):
            rows = y.to(dtype)
            with poisoned_allocations():
                out, dots = raw.spread_op(given, places, weights, rows)
            assert torch.equal(out, raw.spread_op(given, places, weights, out_dtype=dtype)[0])
            products = given.double().unsqueeze(1) * rows.double()[places.long()]
            bound = (columns + 1) * 2.0**-24 * products.abs().sum(2)
            assert ((dots.double() - products.sum(2)).abs() <= bound).all()


def test_strides_and_addresses(device):
    """A matrix in another layout, and one whose rows begin at odd places, have the bits of any other."""
    places = drawn_places(5, 2, 0).to(device)
    x, y = normal(5, 24, device=device).half(), normal(10, 24, device=device, seed=1).half()
    weights = normal(5, 2, device=device, seed=2)

    def odd(t):
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)

    want = *raw.spread_op(x, places, weights, y), raw.combine_op(y, places, weights)
    for change in (lambda t: t.t().contiguous().t(), odd):
        x2, y2, weights2 = change(x), change(y), change(weights)
        found = *raw.spread_op(x2, places, weights2, y2), raw.combine_op(y2, change(places), weights2)
        assert all(map(torch.equal, found, want))


def test_a_token_has_the_bits_of_itself_alone(device):
    x = normal(7, 300, device=device)
    y = normal(21, 300, device=device, seed=1)
    places = drawn_places(7, 3, 1).to(device)
    weights, alone = normal(7, 3, device=device), torch.arange(3, device=device, dtype=torch.int32).view(1, 3)
    _, dots = raw.spread_op(x, places, weights, y)
    total = raw.combine_op(y, places, weights)
    for t in range(7):
        own = y[places[t].long()]
        assert torch.equal(raw.combine_op(own, alone, weights[t : t + 1])[0], total[t])
        assert torch.equal(raw.spread_op(x[t : t + 1], alone, weights[t : t + 1], own)[1][0], dots[t])


X, Y = torch.ones(5, 8), torch.ones(10, 8)
WRONG = [
    (raw.spread_op, (X.double(), PLACES), "x .*dtype"),
    (raw.spread_op, (X, PLACES.long()), "places .*dtype"),
    (raw.spread_op, (X, PLACES[0]), "places .*shape"),
    (raw.spread_op, (X[:4], PLACES), "x .*shape"),
    (raw.spread_op, (X, PLACES, torch.ones(5)), "weights .*shape"),
    (raw.spread_op, (X, PLACES, torch.ones(5, 2).half()), "weights .*dtype"),
    (raw.spread_op, (X, PLACES, None, Y[:, :4]), "y .*shape"),
    (raw.spread_op, (X.half(), PLACES, None, Y), "accepted: equal dtypes, or float32 with a 16-bit one"),
    (raw.combine_op, (Y[:5], PLACES), "y .*shape"),
    (raw.combine_op, (Y.long(), PLACES), "y .*dtype"),
]


@pytest.mark.parametrize(("op", "arguments", "text"), WRONG, ids=[f"{op.name} {text}" for op, _, text in WRONG])
def test_raw_ops_name_what_is_wrong(device, op, arguments, text):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=rf"{op.name}: .*{text}"):
        as_torch_op(op)(*(t if t is None else t.to(device) for t in arguments))


def test_results_of_a_dtype_that_no_kernel_makes(device):
    with pytest.raises((TypeError, RuntimeError), match=r"combine_rows: .*accepted: equal dtypes, or float32"):
        as_torch_op(raw.combine_op)(Y.half().to(device), PLACES.to(device), out_dtype=torch.bfloat16)


def test_places_that_the_cpu_refuses():
    for places in (PLACES - 1, PLACES + 1, PLACES.clamp(min=1)):
        with (
            ak.backend("cpu"),
            pytest.raises(RuntimeError, match=r"places\[\d, \d\] is .*accepted: each number of \[0, 10\)"),
        ):
            raw.spread_op(torch.ones(5, 8), places)


def test_places_out_of_range_are_passed_over():
    """On the emulator, which stops a kernel that touches anything else."""
    places = torch.tensor([[0, 4], [-1, 2], [2**31 - 1, 1]], dtype=torch.int32)
    x, y = torch.ones(3, 8), torch.arange(6.0).view(6, 1).expand(6, 8).contiguous()
    with ak.backend("emulate"):
        assert raw.combine_op(y, places)[:, 0].tolist() == [4, 2, 1]
        out, dots = raw.spread_op(x, places, None, y)
    assert dots.tolist() == [[0, 32], [0, 16], [0, 8]]
    assert all(out[i].eq(1).all() for i in (0, 1, 2, 4))


# ---- grouped_mm


def in_float64(a, b, bias, weights, offs, places, activation):
    """gather, a product per group, scatter: in torch's differentiable operations."""
    token = torch.empty(places.numel(), dtype=torch.int64)
    token[places.flatten().long()] = torch.arange(places.shape[0]).repeat_interleave(places.shape[1])
    parts = []
    for g, (begin, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        parts.append(ACTIVATIONS[activation](a[token[begin:end]] @ b[g] + bias[g]))
    rows = torch.cat([*parts, parts[0].new_zeros(places.numel() - offs[-1].item(), parts[0].shape[1])])
    return (rows[places.long()] * weights.unsqueeze(2)).sum(1)


def routed(a, b, bias, weights, activation="none", **options):
    return ak.grouped_mm(
        a, b, offs=OFFS, bias=bias, activation=activation, gather=PLACES, scatter=PLACES, weights=weights, **options
    )


def operands(dtype=torch.float32, n=8, grad=True):
    shapes = (5, 6), (5, 6, n), (5, n), (5, 2)
    return [normal(*shape, dtype=dtype, seed=i, scale=0.5, grad=grad) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("activation", ["none", "silu", "swiglu"])
@pytest.mark.parametrize("autocast", [None, *HALF_DTYPES, torch.float32])
def test_results_and_gradients(activation, autocast):
    dtype = autocast if autocast in (None, torch.float32) else torch.float32
    tensors = operands(dtype or torch.bfloat16)
    exact, given = leaves(tensors, torch.float64), leaves(tensors, tensors[0].dtype)
    expected = in_float64(*exact, OFFS, PLACES, activation)
    half = autocast in HALF_DTYPES
    with poisoned_allocations(), torch.autocast("cpu", autocast if half else torch.bfloat16, enabled=half):
        out = routed(*given, activation)
    assert out.shape == expected.shape
    assert out.dtype == (autocast or torch.bfloat16)
    tolerance = 1e-5 if autocast is torch.float32 else 2e-2
    assert relative(out, expected) < tolerance
    grad = normal(*out.shape, seed=9)
    expected.backward(grad.double())
    with poisoned_allocations():
        out.backward(grad.to(out.dtype))
    for tensor, one in zip(given, exact, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        assert relative(tensor.grad, one.grad) < tolerance
    assert not given[1].grad[1:3].any()  # nobody went to groups 1 and 2
    assert not given[3].grad[3, 1].any()  # group 5 is nobody's
    assert not given[3].grad[4, 0].any()


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_gradcheck_in_float64(activation):
    assert gradcheck(lambda *t: routed(*t, activation), operands(torch.float64))
    assert gradgradcheck(lambda *t: routed(*t, activation), operands(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_double_backward(dtype):
    tensors = operands()

    expected = gradient_penalty(lambda *t: in_float64(*t, OFFS, PLACES, "silu"), leaves(tensors, torch.float64))
    actual = gradient_penalty(lambda *t: routed(*t, "silu"), leaves(tensors, dtype))
    for one, other in zip(actual, expected, strict=True):
        assert relative(one, other) < (2e-2 if dtype == torch.float16 else 1e-4)


def test_gather_alone_and_scatter_alone():
    a, b, _, weights = operands(torch.bfloat16, grad=False)
    rows = ak.grouped_mm(a, b, offs=OFFS, gather=PLACES)
    assert torch.equal(rows, ak.grouped_mm(raw.spread(a, PLACES), b, offs=OFFS))
    for factors in (None, weights):
        total = ak.grouped_mm(raw.spread(a, PLACES), b, offs=OFFS, scatter=PLACES, weights=factors)
        wide = None if factors is None else factors.float()
        assert torch.equal(total, raw.combine(rows.float(), PLACES, wide).bfloat16())
    assert relative(rows, rows_in_float64(raw.spread(a, PLACES), b, OFFS)) < 1e-2


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_sum_is_rounded_once_to_out_dtype(out_dtype):
    a, b, bias, weights = operands(torch.bfloat16)
    rows = ak.grouped_mm(a, b, offs=OFFS, bias=bias, gather=PLACES).detach()
    out = routed(a, b, bias, weights, out_dtype=out_dtype)
    assert torch.equal(out, raw.combine(rows.float(), PLACES, weights.detach().float()).to(out_dtype))
    out.sum().backward()  # a gradient of stride 0
    assert all(t.grad.dtype is torch.bfloat16 for t in (a, b, bias, weights))


def test_no_copy_of_gathered_rows_is_kept():
    a, b = normal(5, 64, dtype=torch.bfloat16, grad=True), normal(5, 64, 8, dtype=torch.bfloat16, seed=1, grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ak.grouped_mm(a, b, offs=OFFS, gather=PLACES)
    assert sum(t.numel() for t in kept if t.dtype == torch.bfloat16) == a.numel() + b.numel()


def test_float32_operands_under_autocast_get_the_float32_sums():
    a, b = normal(5, 64, grad=True), normal(5, 64, 8, seed=1, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = ak.grouped_mm(a, b, offs=OFFS, gather=PLACES)
    grad = normal(10, 8, seed=2, dtype=torch.bfloat16)
    out.backward(grad)
    rows = ak.grouped_mm(grad, b.detach().bfloat16().mT, offs=OFFS)
    assert torch.equal(a.grad, raw.combine(rows.float(), PLACES))


@pytest.mark.parametrize("fresh", [True, False])
def test_main_grad(fresh):
    layer = ak.nn.GroupedLinear(5, 6, 8, dtype=torch.bfloat16)
    x = normal(5, 6, dtype=torch.bfloat16)
    layer(x, OFFS, gather=PLACES).sum().backward()
    once, layer.weight.grad = layer.weight.grad.float(), None
    with accumulate_fp32(layer):
        for _ in range(1 if fresh else 2):
            layer(x, OFFS, gather=PLACES).sum().backward()
        assert layer.weight.grad.dtype is torch.float32
        assert relative(layer.weight.grad, (1 if fresh else 2) * once.double()) < 1e-2


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_block_compiles_without_a_graph_break(dynamic):
    up, down = ak.nn.GroupedLinear(5, 6, 16, activation="swiglu"), ak.nn.GroupedLinear(5, 8, 6)

    def block(x, chosen, weights):
        offs, places = ak.route(chosen, 5)
        with torch.autocast("cpu", torch.bfloat16):
            return down(up(x, offs, gather=places), offs, scatter=places, weights=weights)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    results = []
    for function in (block, compiled):
        x, weights = normal(5, 6, grad=True), normal(5, 2, seed=1, grad=True)
        out = function(x, CHOSEN, weights)
        leaf = [x, weights, *up.parameters(), *down.parameters()]
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaf)])
    assert all(map(torch.equal, *results))


def test_func_transforms():
    primals = tuple(operands(grad=False))
    tangents = tuple(normal(*t.shape, seed=8) for t in primals)
    found = torch.func.jvp(routed, primals, tangents)
    expected = torch.func.jvp(lambda *t: in_float64(*t, OFFS, PLACES, "none"), primals, tangents)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    mapped = torch.vmap(lambda a: routed(a, *primals[1:]))(torch.stack([primals[0], -primals[0]]))
    torch.testing.assert_close(mapped[0], expected[0], rtol=1e-5, atol=1e-5)


def test_batch_invariant():
    """A token has the same bits in any company."""
    a, b, bias, weights = operands(torch.bfloat16, grad=False)
    with ak.batch_invariant():
        whole = routed(a, b, bias, weights)
        for t in range(5):
            offs, places = ak.route(CHOSEN[t : t + 1], 5)
            one = ak.grouped_mm(
                a[t : t + 1], b, offs=offs, bias=bias, gather=places, scatter=places, weights=weights[t : t + 1]
            )
            assert torch.equal(one[0], whole[t])


def test_no_tokens():
    offs, places = ak.route(CHOSEN[:0], 5)
    a, b, bias, weights = (t.detach()[: 0 if i in (0, 3) else 5].requires_grad_() for i, t in enumerate(operands()))
    with torch.autocast("cpu", torch.bfloat16):
        out = ak.grouped_mm(a, b, offs=offs, bias=bias, gather=places, scatter=places, weights=weights)
    out.sum().backward()
    assert out.shape == (0, 8)
    assert not any(t.grad.any() for t in (a, b, bias, weights))


A, B = torch.ones(5, 4, dtype=torch.bfloat16), torch.ones(5, 4, 6, dtype=torch.bfloat16)
MISTAKES = [
    ({"gather": PLACES.long()}, TypeError, r"gather has dtype int64; accepted: int32"),
    ({"gather": PLACES[0]}, ValueError, r"gather has shape \[2\]; accepted: \[T, k\]"),
    ({"gather": PLACES[:4]}, ValueError, r"gather has shape \[4, 2\]; accepted: \[5, k\], for the rows of a"),
    ({"gather": PLACES - 1}, ValueError, r"gather\[1, 0\] is 0; accepted: each number of \[0, 10\) once|gather\[0, 1\] is -1"),
    ({"gather": PLACES.clamp(max=8)}, ValueError, r"gather\[3, 1\] is 8; accepted: each number of \[0, 10\) once"),
    ({"scatter": PLACES}, ValueError, r"scatter has shape \[5, 2\]; accepted: a number for each row of the product, 5"),
    ({"gather": PLACES, "scatter": PLACES[:, :1]}, ValueError, r"scatter has shape \[5, 1\]; accepted: .* 10$"),
    ({"weights": torch.ones(5, 2)}, ValueError, r"weights is given and scatter is None"),
    ({"gather": PLACES, "scatter": PLACES, "weights": torch.ones(5)}, ValueError, r"weights has shape \[5\]; accepted: \[5, 2\]"),
    ({"gather": PLACES, "scatter": PLACES, "weights": PLACES}, TypeError, r"weights has dtype int32"),
    ({"gather": PLACES.to("meta")}, ValueError, r"gather is on meta, but a is on cpu"),
    ({"gather": [[0, 1]]}, TypeError, r"gather has type list; accepted: a tensor or None"),
    ({"a": A.t(), "b": A, "gather": PLACES}, ValueError, r"accepted with gather, scatter or weights: \[T, K\] and \[G, K, N\]"),
    ({"gather": PLACES, "offs": ends(3, 3, 3, 7, 11)}, ValueError, r"offs\[4\] is 11; accepted: .* within \[0, 10\]"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "text"), MISTAKES, ids=[text for _, _, text in MISTAKES])
def test_a_mistake_is_named(arguments, error, text):
    given = {"a": A, "b": B, "offs": ends(1, 2, 3, 4, 5)} | arguments
    with pytest.raises(error, match=f"^grouped_mm: .*(?:{text})"):
        ak.grouped_mm(given.pop("a"), given.pop("b"), **given)

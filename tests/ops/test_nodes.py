"""linear and matmul in C++ (csrc/autograd/linear.cpp): bit by bit what the Python functions give, taken where a call is plain and only
there; one 16-bit copy of a weight for a region of autocast; host work that stays below torch's, counted."""

import contextlib
import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import compiled_autograd
from torch.utils.flop_counter import FlopCounterMode

import amp_kernels as ak
from amp_kernels._dispatch import cpu_isa, load, nodes
from amp_kernels.ops._shadows import refresh_shadow

from ..helpers.generators import normal

pytestmark = pytest.mark.skipif("nodes" in load.absent(), reason=f"no _nodes: {load.absent().get('nodes')}")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def autocast(device="cpu"):
    return torch.autocast(device, dtype=BF16)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """On a GPU the policy has spoken for the kernels once a product has run."""
    if request.param == "cuda":
        ak.matmul(torch.ones(1, 8, dtype=BF16, device="cuda"), torch.ones(8, 8, dtype=BF16, device="cuda"))
    return request.param


def in_cpp(out):
    """True if the node of ``out`` is not one of a Python function."""
    return not isinstance(out.grad_fn, torch.autograd.function.BackwardCFunction)


def copies(calls):
    """The 16-bit copies of the weight that ``calls()`` saves for its backward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        calls()
    return [t for t in saved if t.numel() == 50 * 70 and t.dtype == BF16]


def addresses(tensors):
    return {t.data_ptr() for t in tensors}


# ---- the same bits


def problem(x_shape, dtypes, requires):
    x_dtype, weight_dtype, bias_dtype = dtypes
    x = normal(*x_shape, dtype=x_dtype, grad=requires[0])
    weight = normal(50, 70, dtype=weight_dtype, seed=1, grad=requires[1], scale=0.12)
    bias = None if bias_dtype is None else normal(50, dtype=bias_dtype, seed=2, grad=requires[2])
    return x, weight, bias


def results(function, arguments, under_autocast, device):
    """Output, gradients, and gradients of a function of these, with the node that made the output."""
    arguments = [
        t if t is None else t.detach().to(device, copy=True).requires_grad_(t.requires_grad) for t in arguments
    ]
    with autocast(device) if under_autocast else contextlib.nullcontext():
        out = function(*arguments)
    wanted = [t for t in arguments if t is not None and t.requires_grad]
    found = [out.detach()]
    if wanted:
        weights = torch.linspace(-1, 1, out.numel()).to(device).view(out.shape)
        grads = torch.autograd.grad((out.float() ** 2 * weights).sum(), wanted, create_graph=True)
        again = torch.autograd.grad(
            sum(g.float().square().sum() for g in grads), wanted, retain_graph=True, allow_unused=True
        )
        (out.float() * weights).sum().backward()
        found += [*(g.detach() for g in grads), *again, *(t.grad for t in wanted)]
    return found, out


def check_bits(function, arguments, under_autocast, device):
    ours, out = results(function, arguments, under_autocast, device)
    assert in_cpp(out) or not any(t is not None and t.requires_grad for t in arguments)
    with nodes.refused():
        theirs, _ = results(function, arguments, under_autocast, device)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


GRADS = [(True, True, True), (False, True, True), (True, False, False), (False, False, True), (False, False, False)]


@pytest.mark.parametrize("requires", GRADS)
@pytest.mark.parametrize(
    ("dtypes", "under_autocast"),
    [((BF16, BF16, BF16), False), ((FP16, FP16, FP32), False), ((FP32, FP32, FP32), True), ((BF16, FP32, None), True)],
)
def test_linear_gives_the_bits_of_python(device, dtypes, under_autocast, requires):
    for x_shape, activation in itertools.product([(4, 70), (70,), (2, 3, 70)], [None, "gelu", "swiglu"]):
        arguments = problem(x_shape, dtypes, requires)

        def function(*a, activation=activation):
            return ak.linear(*a, activation=activation)

        check_bits(function, arguments, under_autocast, device)


@pytest.mark.parametrize("requires", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("dtypes", "under_autocast"),
    [((BF16, BF16), False), ((FP16, FP16), False), ((FP32, BF16), True), ((FP32, FP32), True)],
)
def test_matmul_gives_the_bits_of_python(device, dtypes, under_autocast, requires):
    for a_shape, transposed in itertools.product([(4, 70), (2, 3, 70)], [False, True]):
        a = normal(*a_shape, dtype=dtypes[0], grad=requires[0])
        b = normal(50, 70, dtype=dtypes[1], seed=1, grad=requires[1])

        def function(a, b, transposed=transposed):
            return ak.matmul(a, b.t() if transposed else b.reshape(70, 50))

        check_bits(function, (a, b), under_autocast, device)


def test_a_shadow_is_read_and_its_weight_gets_the_gradient_of_a_recorded_backward(device):
    x, weight = (normal(n, 70, seed=n).to(device).requires_grad_() for n in (4, 50))
    shadow = torch.empty_like(weight, dtype=BF16)
    refresh_shadow(weight, shadow)
    shadow.mul_(2)  # not what a cast would give

    def run():
        with autocast(device):
            out = ak.linear(x, weight)
        (grad,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
        return out, torch.autograd.grad(grad.square().sum(), weight)[0]

    out, again = run()
    assert in_cpp(out)
    assert torch.allclose(out.float(), 2 * (x @ weight.t()), rtol=0.05, atol=0.2)
    with nodes.refused():
        expected, expected_again = run()
    assert torch.equal(out, expected)
    assert torch.equal(again, expected_again)


# ---- what is plain


@pytest.mark.parametrize(
    "surroundings",
    [
        lambda: ak.backend("reference"),
        lambda: ak.batch_invariant(),
        lambda: FlopCounterMode(display=False),
        lambda: torch.overrides.BaseTorchFunctionMode(),
        lambda: nodes.refused(),
    ],
    ids=["backend", "batch_invariant", "dispatch mode", "function mode", "refused"],
)
def test_other_surroundings_take_python_in_the_forward_and_in_the_backward(device, surroundings):
    weight = normal(50, 70, dtype=BF16).to(device).requires_grad_()
    x = normal(4, 70, dtype=BF16).to(device).requires_grad_()
    with surroundings():
        assert not in_cpp(ak.linear(x, weight))
    plain = ak.linear(x, weight)
    assert in_cpp(plain)
    with surroundings():
        plain.sum().backward()
    assert weight.grad is not None


def test_a_backward_under_another_backend_or_a_counter_is_the_formula(monkeypatch):
    calls = []
    formula = nodes.FORMULAS["linear"]
    x, weight = normal(4, 70, dtype=BF16, grad=True), normal(50, 70, dtype=BF16, grad=True)
    out = ak.linear(x, weight)
    nodes._module.bind("linear", lambda *a: calls.append(a) or formula(*a))
    try:
        out.sum().backward(retain_graph=True)
        assert not calls
        with ak.backend("reference"):
            out.sum().backward(retain_graph=True)
        monkeypatch.setenv("AMP_KERNELS_BACKEND", "reference")
        out.sum().backward(retain_graph=True)
        monkeypatch.delenv("AMP_KERNELS_BACKEND")
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert len(calls) == 3
        assert counter.get_total_flops() == 2 * (2 * 4 * 70 * 50)
    finally:
        nodes._module.bind("linear", formula)


@pytest.mark.parametrize("activation", ["none", "gelu", "swiglu"])
def test_products_of_the_portable_set_have_the_bits_of_python(activation):
    x, weight = normal(9, 70, dtype=BF16, grad=True), normal(50, 70, dtype=BF16, grad=True)
    bias = normal(50, dtype=FP32, grad=True)

    def results():
        out = ak.linear(x, weight, bias, activation=activation)
        return out, *torch.autograd.grad(out, [x, weight, bias], torch.ones_like(out))

    with cpu_isa.cpu_isa("portable"):
        ours = results()
        with nodes.refused():
            expected = results()
    assert in_cpp(ours[0])
    assert not in_cpp(expected[0])
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize(("rows", "features"), [(0, 8), (3, 0)])
def test_products_without_elements(every_cpu_isa, rows, features):
    x, weight = normal(rows, 70, dtype=BF16, grad=True), normal(features, 70, dtype=BF16, grad=True)
    out = ak.linear(x, weight)
    out.sum().backward()
    assert in_cpp(out)
    assert out.shape == (rows, features)
    assert not x.grad.any()
    assert not weight.grad.any()


def test_a_gradient_dtype_of_its_own_is_left_to_python():
    x, weight = normal(4, 70, dtype=BF16), normal(50, 70, dtype=BF16, grad=True)
    weight.grad_dtype = FP32
    out = ak.linear(x, weight)
    out.sum().backward()
    assert not in_cpp(out)
    assert weight.grad.dtype == FP32


def test_a_graph_is_used_once_and_what_it_saved_may_not_change():
    x, weight = normal(4, 70, dtype=BF16, grad=True), normal(50, 70, dtype=BF16, grad=True)
    out = ak.linear(x, weight, activation="gelu")
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    out = ak.linear(x, weight)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_compiled_autograd_traces_the_node(device):
    x, weight = normal(4, 70).to(device), normal(50, 70, seed=1).to(device).requires_grad_()
    grads = []
    for compiler in (lambda graph: graph, None):
        weight.grad = None
        with autocast(device):
            out = ak.linear(x, weight, activation="silu")
        with compiled_autograd._enable(compiler) if compiler else contextlib.nullcontext():
            out.float().square().sum().backward()
        grads.append(weight.grad)
    assert torch.equal(*grads)


# ---- the 16-bit copies of a region


@pytest.fixture
def x_and_weight():
    return normal(4, 70, dtype=FP32, grad=True) * 1, normal(50, 70, dtype=FP32, seed=1, grad=True)


def test_a_weight_is_cast_once_in_a_region(x_and_weight):
    x, weight = x_and_weight
    with autocast():
        used = copies(lambda: [ak.linear(x, weight), F.linear(x, weight), ak.linear(x, weight)])
        with autocast():
            used += copies(lambda: ak.linear(x, weight))
    assert len(used) == 4
    assert len(addresses(used)) == 1
    with autocast():
        assert not addresses(copies(lambda: ak.linear(x, weight))) & addresses(used)


def test_a_weight_written_since_is_cast_again(x_and_weight):
    x, weight = x_and_weight
    with autocast():
        before = ak.linear(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        after = ak.linear(x, weight)
        assert in_cpp(after)
        assert torch.equal(after, 2 * before)
    weight.data.mul_(2)  # which no version counter sees
    with autocast():
        assert torch.equal(ak.linear(x, weight), 4 * before)


def test_the_cache_can_be_switched_off(x_and_weight):
    x, weight = x_and_weight
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        used = copies(lambda: [ak.linear(x, weight), ak.linear(x, weight)])
    assert len(addresses(used)) == 2


def test_a_weight_is_cast_once_without_gradients_too_and_torch_still_gets_them(x_and_weight):
    x, weight = x_and_weight
    with autocast():
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(3):
                ak.linear(x, weight)
        F.linear(x.detach(), weight).sum().backward()
    assert [event.name for event in profile.events()].count("aten::_to_copy") == 3 + 1  # x three times
    assert weight.grad is not None


def test_a_second_derivative_reaches_a_weight_through_its_copy(x_and_weight):
    x, weight = x_and_weight
    with autocast():
        out = ak.linear(x, weight)
    (grad,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert weight.grad.abs().sum() > 0


# ---- host work


def events(step):
    """Number of dispatcher calls and of memory blocks in a step."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    names = [event.name for event in profile.events()]
    return sum("::" in name for name in names), names.count("[memory]")


def python_calls(step):
    """Number of functions, Python's and C's, that a step calls from Python."""
    step()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def training_step(layer):
    x, grad = normal(4, 16, dtype=FP32), normal(4, 16, dtype=BF16)

    def step():
        for parameter in layer.parameters():
            parameter.grad = None
        with autocast():
            out = layer(x)
        out.backward(grad)

    return step


def test_the_host_works_less_than_torchs():
    ours, theirs = training_step(ak.nn.Linear(16, 16)), training_step(torch.nn.Linear(16, 16))
    dispatched, allocated = events(ours)
    torch_dispatched, torch_allocated = events(theirs)
    assert dispatched <= 0.6 * torch_dispatched, (dispatched, torch_dispatched)
    assert allocated <= torch_allocated, (allocated, torch_allocated)
    assert python_calls(ours) <= python_calls(theirs) + 8, (python_calls(ours), python_calls(theirs))

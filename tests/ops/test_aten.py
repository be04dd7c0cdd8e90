"""Products through torch's: exact on small integers, chosen where no kernel is native, and not where sums need a fixed order."""

import itertools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import amp_kernels as ak
from amp_kernels._checks.activations import ACTIVATIONS
from amp_kernels._dispatch import policy
from amp_kernels._raw.gemm import gemm, gemm_accumulate_, gemm_dact
from amp_kernels.testing.generators import LAYOUTS, integers

pytestmark = pytest.mark.own_backend


def operands(batch, layout, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    draw = {"limit": 2, "dtype": dtype, "generator": generator, "layout": layout}
    return integers(*batch, 5, 7, **draw), integers(*batch, 7, 6, **draw)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_small_integers_are_exact(batch, layout, activation):
    a, b = operands(batch, layout)
    product = a.double() @ b.double()
    rows, columns = torch.arange(5.0)[:, None], torch.arange(6.0).bfloat16()
    residual = torch.ones_like(product).float().mT.contiguous().mT
    for bias, beta, alpha in itertools.product((None, rows, columns), (0.0, 2.0), (1.0, -2.0)):
        z = alpha * product + (0 if bias is None else bias.double())
        expected = ACTIVATIONS[activation](z) + (beta if beta else 0)
        given = residual if beta else torch.full_like(residual, torch.nan)
        for preact, out_dtype in itertools.product((False, True), (None, torch.float32)):
            options = {"alpha": alpha, "beta": beta, "activation": activation, "preact": preact}
            with ak.backend("aten"):
                out = gemm(a, b, bias, given, out_dtype=out_dtype, **options)
            out, kept = out if preact else (out, z)
            assert out.is_contiguous()
            assert out.dtype == (out_dtype or a.dtype)
            assert torch.equal(out.double(), expected)
            assert torch.equal(kept.double(), z)


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_derivatives_and_sums_are_exact(batch):
    a, b = operands(batch, "row")
    z = integers(*batch, 5, 6, limit=2, dtype=a.dtype, generator=torch.Generator().manual_seed(1))
    expected = torch.where(z > 0, a.double() @ b.double(), 0)
    with ak.backend("aten"):
        dz, sums = gemm_dact(a, b, z, activation="relu", bias_grad=True)
    assert torch.equal(dz.double(), expected)
    assert torch.equal(sums.double(), expected.flatten(0, -2).sum(0))


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (-2.0, 1.0), (2.0, 0.5), (2.0, 0.0)])
def test_accumulation_is_exact_and_in_place(alpha, beta):
    a, b = operands((), "column")
    c = torch.full((6, 5), 4.0 if beta else torch.nan).t()
    expected = alpha * (a.double() @ b.double()) + 4 * beta
    version = c._version
    with ak.backend("aten"):
        gemm_accumulate_(c, a, b, alpha=alpha, beta=beta)
    assert torch.equal(c.double(), expected)
    assert c._version > version


def test_a_fixed_order_of_sums_keeps_the_packages_kernels(monkeypatch):
    """The choice is asked for them; torch's products are no choice then, on any GPU."""
    asked = []
    monkeypatch.setattr(policy, "_select", lambda *args: asked.append(args[-1]) or "reference")
    a, b = operands((), "row")
    gemm(a, b)
    gemm(a, b, batch_invariant=True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    gemm(a, b)
    assert asked == [False, True, True]


@pytest.mark.parametrize("backend", ["aten", "cpu"])
def test_a_compiled_program_holds_torchs_product(backend):
    """Chosen by the policy: else the op would run the one kernel that the dispatcher holds for the device."""
    called = set()

    def compiler(graph, _):
        called.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    layer = ak.nn.Linear(16, 32, activation="gelu").bfloat16()
    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    torch.compiler.reset()
    with ak.backend(backend):
        program = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
        program(x).sum().backward()
        compiled = x.grad.clone()
        x.grad = None
        layer(x).sum().backward()
    assert {"aten.addmm.default", "aten.mm.default"} <= called or backend == "cpu"
    assert ("amp_kernels.gemm.default" in called) == (backend == "cpu")
    assert torch.equal(x.grad, compiled)

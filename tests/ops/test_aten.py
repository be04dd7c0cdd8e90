"""Products through torch's: exact on small integers, chosen where no kernel is native, and not where sums need a fixed order."""

import itertools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import amp_kernels as ak
from amp_kernels._checks.activations import ACTIVATIONS
from amp_kernels._dispatch import policy
from amp_kernels._raw.grouped_gemm import grouped_gemm_op
from amp_kernels._raw.syrk import op as syrk_op

from ..helpers.generators import LAYOUTS, integers, operand
from .groups import ends, poison_behind, rows_in_float64, sums_in_float64
from .raw import gemm, gemm_accumulate_, gemm_dact

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


def group_operands(sums=False, dtype=torch.bfloat16):
    """Groups of any size, two empty, NaN past the last end; lines of 16 bytes."""
    draw = {"limit": 2, "dtype": dtype, "generator": torch.Generator().manual_seed(2)}
    offs = ends(0, 3, 3, 10)
    a = integers(*(16, 13) if sums else (13, 16), **draw, layout="column" if sums else "row")
    b = integers(*(13, 8) if sums else (4, 16, 8), **draw)
    return a, b, offs, integers(4, 8, **draw)


@pytest.fixture
def in_one_call(monkeypatch):
    """The calls of torch._grouped_mm; rows that it does not promise to write are NaN."""
    calls, multiply = [], torch._grouped_mm

    def counted(a, b, offs):
        calls.append((a, b))
        out = multiply(a, b, offs=offs)
        if b.ndim == 3:
            out[offs[-1] :] = torch.nan
        else:
            out[offs == torch.cat([offs.new_zeros(1), offs])[:-1]] = torch.nan
        return out

    monkeypatch.setattr(torch, "_grouped_mm", counted)
    return calls


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias_kind", ["none", "one", "each"])
def test_bf16_groups_are_one_call(transposed, bias_kind, in_one_call):
    a, b, offs, bias = group_operands()
    b = b.mT.contiguous().mT if transposed else b
    bias = {"none": None, "one": bias[0].float(), "each": bias}[bias_kind]
    with ak.backend("aten"):
        out, z = grouped_gemm_op(poison_behind(a.clone(), offs, 0), b, offs, bias, activation="relu", preact=True)
        alone, kept = grouped_gemm_op(a, b, offs, bias, preact=True)
    assert torch.equal(out.double(), rows_in_float64(a, b, offs, bias, "relu"))
    assert torch.equal(z.double(), rows_in_float64(a, b, offs, bias))
    assert torch.equal(alone, z)
    assert torch.equal(kept, z)
    assert alone.data_ptr() != kept.data_ptr(), "an op's results may not share memory"
    assert len(in_one_call) == 2


def test_bf16_sums_of_groups_are_one_call(in_one_call):
    a, b, offs, _ = group_operands(sums=True)
    given = poison_behind(a.clone(), offs, 1), poison_behind(b.clone(), offs, 0)
    given = given[0].mT.contiguous().mT, given[1]
    with ak.backend("aten"):
        sums, _ = grouped_gemm_op(*given, offs)
        hostile, _ = grouped_gemm_op(a, b, ends(5, 2, 99, -1))
    assert torch.equal(sums.double(), sums_in_float64(a, b, offs))
    assert torch.equal(hostile.double(), sums_in_float64(a, b, ends(5, 5, 13, 13)))
    assert len(in_one_call) == 2


@pytest.mark.parametrize("sums", [False, True])
def test_what_one_call_does_not_take_is_a_product_for_each_group(sums, in_one_call, monkeypatch):
    """fp16, lines that do not begin at 16 bytes, groups that begin within a line, fp32 results, a fixed order."""
    a, b, offs, _ = group_operands(sums)
    half = group_operands(sums, torch.float16)[:2]
    cases = [(half, {}), ((a, b), {"out_dtype": torch.float32}), ((a, b), {"batch_invariant": True})]
    lines = (a[:15], b) if sums else (a, b[..., :7])
    cases += [(lines, {}), ((a.contiguous() if sums else a.mT.contiguous().mT, b), {})]
    expected = sums_in_float64 if sums else rows_in_float64
    with ak.backend("aten"):
        for given, options in cases:
            out, _ = grouped_gemm_op(*given, offs, **options)
            assert torch.equal(out.double(), expected(*given, offs))
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        grouped_gemm_op(a, b, offs)
    assert not in_one_call


def test_a_symmetric_product_has_the_same_bits_alone_and_in_a_stack():
    a = operand(3, 40, 24, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3))
    with ak.backend("aten"):
        stack = syrk_op(a, a, alpha=0.5, diagonal=2.0)
        assert all(
            torch.equal(syrk_op(one, one, alpha=0.5, diagonal=2.0), each) for one, each in zip(a, stack, strict=True)
        )
    assert torch.equal(stack, stack.mT)


def test_sums_in_a_fixed_order_are_those_of_the_ops_gemm(monkeypatch):
    """Whose backend is asked for again: on a GPU without CUDA kernels that is Triton."""
    asked, select = [], policy._select
    monkeypatch.setattr(policy, "_select", lambda op, *rest: asked.append(op.name) or select(op, *rest))
    a, b, offs, _ = group_operands()
    z = torch.ones(13, 8)
    with ak.backend("aten"):
        dz, _ = gemm_dact(a, b[0], z, activation="relu", batch_invariant=True)
        grouped_gemm_op(a, b, offs, batch_invariant=True)
        gemm_dact(a, b[0], z, activation="relu")
    assert torch.equal(dz.double(), a.double() @ b[0].double())
    products = [name for name in asked if "gemm" in name]
    assert products == ["gemm_dact", "gemm", "grouped_gemm", *["gemm"] * 4, "gemm_dact"]


@pytest.mark.parametrize("sums", [False, True])
def test_a_compiled_program_asks_again_for_the_products_of_groups(sums):
    """Their ends are known when it runs."""
    a, b, offs, _ = group_operands(sums)
    torch.compiler.reset()
    with ak.backend("aten"):
        program = torch.compile(lambda a, b, offs: ak.grouped_mm(a, b, offs=offs), fullgraph=True, backend="aot_eager")
        assert torch.equal(program(a, b, offs), ak.grouped_mm(a, b, offs=offs))


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

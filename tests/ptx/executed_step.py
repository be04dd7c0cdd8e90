"""Every op that is no product, as PTX on its samples: the bits of the emulator and of the CPU backend."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw.check_and_norm import check_and_norm
from amp_kernels._raw.unscale import unscale_

from ..helpers.generators import normal
from .preloaded import machine, set_chip

machine()
STEP = [op for _, op in sorted(REGISTRY.items()) if not op.composite and op.family != "gemm"]
# Sums over a row, over the uses of one, or over a tensor in double: on the CPU in another order.
OWN_ORDER = {"column_sums", "norm_forward", "norm_backward", "cross_entropy_rows_", "embedding_accumulate_"}
OWN_ORDER |= {"rotary_forward", "rotary_backward", "spread_rows", "lamb_half_"}
OWN_ORDER |= {"grouped_gemm", "grouped_gemm_accumulate_", "segmented_gemm", "segmented_gemm_accumulate_"}


def tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def call(op, args, kwargs):
    """The results of a call, or its arguments if it returns nothing."""
    with torch.no_grad():
        result = op(*args, **kwargs)
    return [args, tuple(kwargs.values())] if result is None else [result]


def same_bits(got, want, what):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def compare(op):
    """Pairs of a result as PTX and by the emulator, and where the order of sums is the same, on the CPU; over the op's samples."""
    samples = zip(op.samples("cuda"), op.samples("cpu"), op.samples("cpu"), strict=True)
    for (args, kwargs), (cpu_args, cpu_kwargs), (emulated_args, emulated_kwargs) in samples:
        with ak.backend("cuda"):
            executed = [t.cpu() for t in tensors(call(op, args, kwargs))]
        with ak.backend("emulate"):
            yield from zip(executed, tensors(call(op, emulated_args, emulated_kwargs)), strict=True)
        if op.name not in OWN_ORDER:
            with ak.backend("cpu"):
                yield from zip(executed, tensors(call(op, cpu_args, cpu_kwargs)), strict=True)


@pytest.mark.parametrize("capability", [80, 90, pytest.param(120, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("op", STEP, ids=lambda op: op.name)  # one case in two has every op
def test_same_bits(op, capability, seeds):
    for seed in seeds:
        it = set_chip(capability, 2)  # the emulator's number of SMs, which decides how a list is shared out
        it.seed = seed
        before = len(it.launched)
        for got, want in compare(op):
            same_bits(got, want, f"{op.name}, sm_{capability}, seed {seed}")
        assert len(it.launched) > before, "nothing was executed"


@pytest.mark.parametrize("count", [187, 188])  # the most that a launch of few arguments takes, and one more
def test_short_and_long_lists(count):
    values = [normal(1 + i % 3, seed=i).bfloat16() for i in range(count)]
    it = set_chip(90, 2)
    it.seed = 0
    results = {}
    for backend, device in (("cuda", "cuda"), ("emulate", "cpu")):
        grads = [value.to(device) for value in values]
        with ak.backend(backend):
            norm, found = check_and_norm(grads)
            unscale_(grads, torch.zeros((), device=device), torch.full((), 0.5, device=device))
        results[backend] = [t.cpu() for t in (norm, found, *grads)]
    for got, want in zip(*results.values(), strict=True):
        same_bits(got, want, f"{count} gradients")


@pytest.mark.parametrize(
    ("rows", "classes", "soft"),
    [(70, 72, False), (20, 1000, False), (9, 1000, True), (18, 803, False), (4, 801, True), (3, 2051, False)],
)
def test_rows_of_a_loss_that_are_brought_ahead(rows, classes, soft, seeds):
    """Longer ones than the samples of cross_entropy_rows_: in vectors, by a warp or by four, and at any address by a block."""
    op = REGISTRY["cross_entropy_rows_"]
    generator = torch.Generator().manual_seed(classes)
    logits, factor = torch.randn(rows, classes, generator=generator).bfloat16(), torch.rand(rows, generator=generator)
    target = torch.randint(classes, (rows,), generator=generator)
    if soft:
        target = torch.randn(rows, classes, generator=generator).softmax(1)
    else:
        target[1::3] = -100
    for seed in seeds:
        it, results = set_chip(90, 1), {}  # whose blocks get more than one of 18 rows
        it.seed = seed
        for backend, device in (("cuda", "cuda"), ("emulate", "cpu")):
            outputs = torch.zeros(rows), torch.zeros_like(logits)
            given = [t if t is None else t.to(device, copy=True) for t in (logits, target, None, factor, *outputs)]
            with ak.backend(backend):
                results[backend] = [t.cpu() for t in tensors(call(op, given, {"z_loss": 0.5}))]
        kernel = "cross_entropy_rows_kernel" if classes % 8 else "cross_entropy_rows_ring_kernel"
        assert kernel in it.launched[-1]
        for got, want in zip(*results.values(), strict=True):
            same_bits(got, want, f"{rows} rows of {classes}, seed {seed}")


@pytest.mark.parametrize(
    ("rows", "classes", "dtype"),
    [(18, 1001, torch.bfloat16), (3, 8200, torch.float16), (9, 129, torch.float32)],
    ids=str,
)
def test_log_probs_of_longer_rows(rows, classes, dtype, seeds):
    """Statistics of fp32 logits with a temperature, masked and ignored rows; from them a scaled gradient, of entropies too."""
    op = REGISTRY["cross_entropy_rows_"]
    generator = torch.Generator().manual_seed(classes)
    logits = 4 * torch.randn(rows, classes, generator=generator)
    temperature = torch.rand(rows, generator=generator) + 0.5
    logits[0], logits[2, ::2] = -torch.inf, -torch.inf
    target = torch.randint(classes, (rows,), generator=generator)
    target[1::3] = -100
    factor, bend = (2.0**10 * torch.randn(rows, generator=generator) for _ in range(2))
    for seed in seeds:
        it, results = set_chip(90, 1), {}
        it.seed = seed
        for backend, device in (("cuda", "cuda"), ("emulate", "cpu")):
            x, y, t, g, h = (value.to(device, copy=True) for value in (logits, target, temperature, factor, bend))
            loss, sums = torch.zeros(rows, device=device), torch.zeros(3, rows, device=device)
            grad = torch.zeros(rows, classes, dtype=dtype, device=device)
            with ak.backend(backend):
                op(x, y, None, None, loss, None, temperature=t, statistics=sums)
                op(x, y, None, g, None, grad, temperature=t, known=sums, entropy_factor=h)
            results[backend] = [value.cpu() for value in (loss, sums, grad)]
        assert "cross_entropy_rows_kernel" in it.launched[-1]
        for got, want in zip(*results.values(), strict=True):
            same_bits(got, want, f"{rows} rows of {classes}, seed {seed}")


def test_sums_over_long_rows():
    """Rows of more than 8,192 columns, which a kernel of their own adds up; against float64."""
    it, generator = set_chip(90, 2), torch.Generator().manual_seed(0)
    it.seed = 0
    x, grad = (torch.randn(6, 8200, generator=generator).bfloat16() for _ in range(2))
    weight, bias = torch.randn(2, 8200, generator=generator)

    def gradients(function, given, upstream):
        given = [t.detach().requires_grad_() for t in given]
        function(given[0], (8200,), *given[1:]).backward(upstream)
        return [t.grad.double().cpu() for t in given]

    with ak.backend("cuda"):
        executed = gradients(ak.layer_norm, [x.cuda(), weight.cuda(), bias.cuda()], grad.cuda())
    exact = gradients(torch.nn.functional.layer_norm, [x.double(), weight.double(), bias.double()], grad.double())
    assert any("norm_backward_sums_kernel" in name for name in it.launched)
    for got, want, rtol in zip(executed, exact, (2.0**-8, 1e-5, 1e-5), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=2e-5)


def test_rows_that_only_registers_hold_with_the_next():
    """fp32 rows, of which shared memory has room for one; against float64."""
    it, generator = set_chip(90, 2), torch.Generator().manual_seed(0)
    it.seed = 0
    x, weight = torch.randn(3, 29_064, generator=generator), torch.randn(29_064, generator=generator)
    with ak.backend("cuda"):
        got = ak.layer_norm(x.cuda(), (29_064,), weight.cuda()).cpu()
    assert "RowTeamILi16ELi64E" in it.launched[-1]
    want = torch.nn.functional.layer_norm(x.double(), (29_064,), weight.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("columns", "kernel"), [(264, "ring_kernel"), (30, "kernel")])
def test_a_norm_of_a_sum_is_one_kernel_each_way(columns, kernel, seeds):
    """The bits are those of addition, norm and cast one after the other on the emulator."""
    generator = torch.Generator().manual_seed(columns)
    x, grad = (torch.randn(5, columns, generator=generator).bfloat16() for _ in range(2))
    residual = torch.randn(5, columns, generator=generator)
    forward, backward = (REGISTRY[name] for name in ("norm_forward", "norm_backward"))
    options = {"eps": 1e-5, "centred": True, "out_dtype": torch.bfloat16}
    branch_dtype = {"branch_dtype": torch.bfloat16}
    want_sum = x + residual
    with torch.no_grad(), ak.backend("emulate"):
        want_y, _, mean, rstd = forward(want_sum, **options)
        want_dx = backward(grad, want_sum, rstd, mean, None, residual)[0]
    for seed in seeds:
        it = set_chip(90, 2)
        it.seed = seed
        before = len(it.launched)
        with torch.no_grad(), ak.backend("cuda"):
            added = residual.cuda()
            y, total, mean, rstd = forward(x.cuda(), None, None, added, **options)
            dx, _, branch = backward(grad.cuda(), total, rstd, mean, None, added, **branch_dtype)
        launched = it.launched[before:]
        assert [
            f"norm_{way}_{kernel}" in name for way, name in zip(("forward", "backward"), launched, strict=True)
        ] == [True, True]
        for got, want in zip((y, total, dx, branch), (want_y, want_sum, want_dx, want_dx.bfloat16()), strict=True):
            same_bits(got.cpu(), want, f"rows of {columns}, seed {seed}")


@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_of_rows_that_stay_in_shared_memory(adds):
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 16392, generator=generator).bfloat16(), torch.randn(16392, generator=generator).half()
    residual = torch.randn(2, 16392, generator=generator) if adds else None
    options = {"eps": 1e-5, "centred": True, "out_dtype": torch.bfloat16}
    it, results = set_chip(90, 1), {}
    it.seed = 0
    for backend, device in (("cuda", "cuda"), ("emulate", "cpu")):
        given = [t if t is None else t.to(device) for t in (x, weight, None, residual)]
        with ak.backend(backend):
            results[backend] = [t.cpu() for t in tensors(call(REGISTRY["norm_forward"], given, options))]
    assert "norm_forward_resident_kernel" in it.launched[-1]
    for got, want in zip(*results.values(), strict=True):
        same_bits(got, want, f"long rows, {adds=}")


def test_every_op_of_the_package_is_here_or_a_product():
    assert {op.name for op in STEP} | {
        op.name for op in REGISTRY.values() if op.family == "gemm" or op.composite
    } == set(REGISTRY)
    assert {op.name for op in STEP} >= OWN_ORDER

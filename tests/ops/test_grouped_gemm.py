"""The raw grouped products on every backend: all small partitions exactly, random ones within the bounds of gemm, NaN, hostile ends."""

import math
import random

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch import cpu_isa
from amp_kernels._raw.grouped_gemm import grouped_gemm_accumulate_op, grouped_gemm_op
from amp_kernels.cli.check import available_backends

from ..helpers.backends import use
from ..helpers.bounds import assert_within, reference_and_bound
from ..helpers.generators import HALF_DTYPES, LAYOUTS, OUT_DTYPES, integers, operand
from ..helpers.poison import assert_only_written, embed, poisoned_allocations
from .groups import by_rows, ends, partitions, poison_behind, ranges, rows_in_float64, sums_in_float64
from .raw import as_torch_op

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "swiglu")
ON_CPU = [name for name in available_backends(grouped_gemm_op, "cpu") if name != "triton"]
TARGETS = [("cpu", name) for name in ("reference", *ON_CPU)]
TARGETS += [("cpu", f"cpu/{isa}") for isa in cpu_isa.available() if isa != cpu_isa.chosen()]
if torch.cuda.is_available():
    TARGETS += [
        pytest.param(("cuda", name), marks=pytest.mark.gpu) for name in available_backends(grouped_gemm_op, "cuda")
    ]


@pytest.fixture(params=TARGETS, ids="-".join)
def device(request):
    device, backend = request.param
    with use(backend), poisoned_allocations():
        yield device


def slow(request):
    return "emulate" in request.node.callspec.id


def test_all_small_partitions_exactly(device, request):
    """Small integers, whose sums every dtype holds; NaN past the last end, in both operands."""
    generator = torch.Generator().manual_seed(0)
    for total, found in partitions(*((3, 2) if slow(request) else (6, 4))):
        offs, dtype = ends(*found, device=device), HALF_DTYPES[sum(found) % 2]
        a = integers(total, 5, limit=2, dtype=dtype, generator=generator)
        b = integers(len(found), 5, 8, limit=2, dtype=dtype, generator=generator)
        bias = integers(len(found), 8, limit=3, dtype=dtype, generator=generator)
        out, z = grouped_gemm_op(
            poison_behind(a.clone(), offs, 0).to(device),
            b.to(device),
            offs,
            bias.to(device),
            activation="relu",
            preact=True,
        )
        assert torch.equal(out.double().cpu(), rows_in_float64(a, b, offs, bias, "relu"))
        assert torch.equal(z.double().cpu(), rows_in_float64(a, b, offs, bias))

        left = integers(3, total, limit=2, dtype=dtype, generator=generator)
        right = integers(total, 4, limit=2, dtype=dtype, generator=generator)
        given = poison_behind(left.clone(), offs, 1).to(device), poison_behind(right.clone(), offs, 0).to(device), offs
        expected = sums_in_float64(left, right, offs)
        assert torch.equal(grouped_gemm_op(*given)[0].double().cpu(), expected)
        c = torch.full((len(found), 3, 4), math.nan, device=device)
        grouped_gemm_accumulate_op(c, *given, overwrite=True)
        assert torch.equal(c.double().cpu(), expected)
        grouped_gemm_accumulate_op(c, *given)
        assert torch.equal(c.double().cpu(), 2 * expected)


def random_ends(rng, total, groups):
    """Uneven: some groups empty, some with most of the rows, and often rows past the last end."""
    last = total if rng.random() < 0.5 else rng.randrange(total + 1)
    return ends(*sorted(rng.choice((0, last, rng.randrange(last + 1))) for _ in range(groups - 1)), last)


def test_random_groups_within_the_bounds_of_gemm(device, request):
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(12 if slow(request) else 150):
        dtype, out_dtype = rng.choice(HALF_DTYPES), rng.choice(OUT_DTYPES)
        total, groups = rng.randrange(1, 300), rng.randrange(1, 9)
        k, n = rng.randrange(1, 90), 2 * rng.randrange(1, 60)
        offs, activation = random_ends(rng, total, groups), rng.choice(ACTIVATIONS)
        layout = {"generator": generator, "dtype": dtype, "device": device}
        layouts = [name for name in LAYOUTS if name != "expanded"]
        a = operand(total, k, layout=rng.choice(layouts), **layout)
        b = operand(groups, k, n, layout=rng.choice(layouts), **layout)
        bias = operand(groups, n, **layout | {"dtype": rng.choice((dtype, torch.float32))})
        if "aten" in request.node.callspec.id:  # torch's product is rounded before its epilogue
            bias, activation = torch.zeros_like(bias), "none"
        out, _ = grouped_gemm_op(a, b, offs.to(device), bias, activation=activation, out_dtype=out_dtype)
        for g, rows in enumerate(ranges(offs)):
            expected = reference_and_bound(a[rows], b[g], bias[g], activation=activation, out_dtype=out_dtype)
            assert_within(out[rows], *expected)
        assert not out[offs[-1] :].any()

        left = operand(n, total, layout=rng.choice(layouts), **layout)
        right = operand(total, k, layout=rng.choice(layouts), **layout)
        sums, _ = grouped_gemm_op(left, right, offs.to(device), out_dtype=out_dtype)
        for g, terms in enumerate(ranges(offs)):
            assert_within(sums[g], *reference_and_bound(left[:, terms], right[terms], out_dtype=out_dtype))


def test_nan_stays_in_its_group(device):
    a = torch.ones(9, 6, dtype=torch.bfloat16, device=device)
    b = torch.ones(4, 6, 8, dtype=torch.bfloat16, device=device)
    offs = ends(2, 5, 5, 7, device=device)
    for group in range(4):
        rows = ranges(offs)[group]
        poisoned = a.clone()
        poisoned[rows] = math.nan
        out, _ = grouped_gemm_op(poisoned, b, offs)
        assert torch.equal(out.isnan().all(1), poisoned.isnan().all(1))
        assert torch.equal(out.isnan().any(1), poisoned.isnan().all(1))
        sums, _ = grouped_gemm_op(poisoned.t(), torch.ones_like(poisoned), offs)
        assert sums.isnan().flatten(1).any(1).tolist() == [g == group and rows.start < rows.stop for g in range(4)]
        weights = b.clone()
        weights[group] = math.nan
        out, _ = grouped_gemm_op(a, weights, offs)
        assert torch.equal(out.isnan().any(1), poisoned.isnan().all(1))


def test_the_memory_of_an_empty_group(device):
    """Zeros on a fresh start; while accumulating not touched, which a NaN and a negative zero show."""
    a, b = torch.ones(3, 4, dtype=torch.float16, device=device), torch.ones(4, 5, dtype=torch.float16, device=device)
    offs = ends(0, 2, 2, 4, device=device)
    c = torch.tensor([math.nan, 1.0, -0.0, 2.0], device=device)[:, None, None].repeat(1, 3, 5)
    grouped_gemm_accumulate_op(c, a, b, offs)
    assert c[0].isnan().all()
    assert (c[1] == 3).all()
    assert c[2].signbit().all()
    assert (c[3] == 4).all()
    grouped_gemm_accumulate_op(c, a, b, offs, overwrite=True)
    assert c[:, 0, 0].tolist() == [0, 2, 0, 2]


def test_accumulates_into_any_strides(device, generator):
    a = integers(5, 9, limit=2, dtype=torch.bfloat16, generator=generator).to(device)
    b = integers(9, 7, limit=2, dtype=torch.bfloat16, generator=generator).to(device)
    offs = ends(4, 4, 9, device=device)
    for options in ({}, {"transposed": True}, {"offset": 1, "pad": 5}, {"step": 2}):
        c, memory = embed(torch.ones(3, 5, 7, device=device), **options)
        grouped_gemm_accumulate_op(c, a, b, offs)
        assert torch.equal(c.double().cpu(), 1 + sums_in_float64(a.cpu(), b.cpu(), offs))
        assert_only_written(memory, c)


def test_ends_with_a_stride_and_operands_with_stride_0(device):
    a = torch.ones(1, 1, dtype=torch.float16, device=device).expand(6, 8)
    b = torch.arange(4.0, device=device, dtype=torch.float16)[:, None, None].expand(4, 8, 8)
    offs = ends(1, 9, 1, 9, 4, 9, 6, 9, device=device)[::2]
    assert grouped_gemm_op(a, b, offs)[0][:, 0].tolist() == [0, 16, 16, 16, 24, 24]
    assert grouped_gemm_op(a.t(), a, offs)[0][:, 0, 0].tolist() == [1, 0, 3, 2]


@pytest.mark.parametrize("hostile", [(5, 3, 9), (-4, 2, 6), (2, 100, 4), (2**31 - 1, -(2**31), 6), (9, 9, 9)])
def test_bad_ends_are_an_error_on_the_cpu_and_clamped_elsewhere(hostile, request, device, generator):
    a = integers(6, 5, limit=2, dtype=torch.float16, generator=generator).to(device)
    b = integers(3, 5, 8, limit=2, dtype=torch.float16, generator=generator).to(device)
    clamped, previous = [], 0
    for end in hostile:
        previous = min(max(end, previous), 6)
        clamped.append(previous)
    offs = ends(*hostile, device=device)
    if "cpu-cpu" in request.node.callspec.id:
        for call in (lambda: grouped_gemm_op(a, b, offs), lambda: grouped_gemm_op(a.t(), a, offs)):
            with pytest.raises(
                RuntimeError, match=r"offs\[\d\] is -?\d+; accepted: ends in ascending order within \[0, 6\]"
            ):
                call()
        return
    assert torch.equal(grouped_gemm_op(a, b, offs)[0].double().cpu(), rows_in_float64(a.cpu(), b.cpu(), ends(*clamped)))
    assert torch.equal(
        grouped_gemm_op(a.t(), a, offs)[0].double().cpu(), sums_in_float64(a.t().cpu(), a.cpu(), ends(*clamped))
    )


def test_a_group_has_the_bits_of_gemm_of_its_rows(device, generator):
    """Under batch_invariant; sizes around the units of threads and tiles."""
    a = operand(200, 70, dtype=torch.bfloat16, generator=generator, device=device)
    b = operand(5, 70, 48, dtype=torch.bfloat16, generator=generator, device=device)
    offs = ends(1, 1, 65, 129, 190, device=device)
    out, _ = grouped_gemm_op(a, b, offs, batch_invariant=True)
    with ak.batch_invariant():
        expected = by_rows(lambda a, b, g: ak.matmul(a, b), a, b, offs)
        assert torch.equal(out.double(), expected)
        sums, _ = grouped_gemm_op(a.t(), a, offs, out_dtype=torch.float32, batch_invariant=True)
        for g, terms in enumerate(ranges(offs)):
            assert torch.equal(sums[g], ak.matmul(a.t()[:, terms], a[terms], out_dtype=torch.float32))


@pytest.mark.parametrize("isa", cpu_isa.available())
def test_the_same_bits_for_any_number_of_threads(isa, same_bits_for, generator):
    """A group that two threads took would show in what is accumulated."""
    a = operand(400, 64, dtype=torch.bfloat16, generator=generator)
    b = operand(8, 64, 256, dtype=torch.bfloat16, generator=generator)
    wide = operand(400, 256, dtype=torch.bfloat16, generator=generator)
    for offs in (ends(1, 3, 3, 20, 300, 310, 380, 400), ends(*range(50, 401, 50)), ends(*range(390, 398))):

        def run(offs=offs):
            c = torch.ones(8, 64, 256)
            grouped_gemm_accumulate_op(c, a.t(), wide, offs)
            return [c, grouped_gemm_op(a, b, offs)[0], grouped_gemm_op(a.t(), wide, offs)[0]]

        with use(f"cpu/{isa}"):
            same_bits_for((1, 2, 5), run)


def test_no_groups_no_rows_no_terms(device):
    def zeros(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    none, two = ends(device=device), ends(1, 3, device=device)
    bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    assert torch.equal(grouped_gemm_op(zeros(3, 4), zeros(0, 4, 2), none)[0], zeros(3, 2))
    assert grouped_gemm_op(zeros(0, 4), zeros(2, 4, 2), 0 * two)[0].shape == (0, 2)
    assert grouped_gemm_op(zeros(3, 0), zeros(2, 0, 2), two, bias)[0].tolist() == [[1, 2], [3, 4], [3, 4]]
    assert grouped_gemm_op(zeros(3, 4), zeros(2, 4, 0), two)[0].shape == (3, 0)
    assert grouped_gemm_op(zeros(2, 3), zeros(3, 5), none)[0].shape == (0, 2, 5)
    assert torch.equal(grouped_gemm_op(zeros(2, 0), zeros(0, 5), 0 * two)[0], zeros(2, 2, 5))
    assert grouped_gemm_op(zeros(0, 3), zeros(3, 5), two)[0].shape == (2, 0, 5)


def test_bad_arguments_of_the_op(device):
    """Callers of the op itself, past the checks of the public function."""
    a, b = torch.ones(6, 4, dtype=torch.float16, device=device), torch.ones(2, 4, 5, dtype=torch.float16, device=device)
    offs = ends(2, 6, device=device)
    gemm, accumulate = map(as_torch_op, (grouped_gemm_op, grouped_gemm_accumulate_op))
    for call, text in (
        (lambda: gemm(a, b, offs.long()), "offs"),
        (lambda: gemm(a, b, offs[:1]), "offs"),
        (lambda: gemm(a, b.bfloat16(), offs), "b"),
        (lambda: gemm(a[:, 1:], b, offs), r"\(?\[?6, 3"),
        (lambda: gemm(a, b, offs, torch.ones(3, 5, device=device)), "bias"),
        (lambda: gemm(a, b, offs, torch.ones(6, 1, device=device)), "bias"),
        (lambda: gemm(a, b, offs, activation="swiglu"), "b"),
        (lambda: gemm(a, b, offs, out_dtype=torch.float64), "out_dtype"),
        (lambda: gemm(a.t(), a, offs, torch.ones(4, device=device)), r"(T|G), (K|N)"),
        (lambda: gemm(a.t(), a, offs, preact=True), r"G, K, N"),
        (lambda: accumulate(torch.ones(2, 4, 5, device=device), a.t(), a, offs), "c"),
        (lambda: accumulate(torch.ones(2, 4, 4, device=device).half(), a.t(), a, offs), "c"),
        (lambda: accumulate(torch.ones(6, 5, device=device), a, b, offs), r"T, N"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=rf"grouped_gemm.*{text}"):
            call()

"""embedding: torch's lookup, and a gradient that is the fp32 sum of float64's terms, in one order, rounded once."""

import copy

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak
from amp_kernels._dispatch.policy import requested_backend
from amp_kernels._raw.embedding_accumulate import op

from ..helpers.bounds import TINY, UNIT_ROUNDOFF, assert_within
from ..helpers.poison import poisoned_allocations
from .targets import device_for

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
device = device_for(op)


def problem(rows, columns, entries, dtype, device="cpu", seed=0):
    """A table, indices of which a third are one row, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(device, dtype).requires_grad_()
    indices = torch.randint(rows, (entries,), generator=generator)
    indices[::3] = rows // 2
    grad = torch.randn(entries, columns, generator=generator).to(device, dtype)
    return weight, indices.to(device), grad


def check(weight, indices, grad, **options):
    """The gradient against float64, within the roundings of its fp32 sums and of the result."""
    fresh = weight.detach().requires_grad_()  # of the same memory
    with poisoned_allocations():
        out = ak.embedding(indices, fresh, **options)
        out.backward(grad.view_as(out))
    assert torch.equal(out, F.embedding(indices, weight))
    indices, table, terms = indices.cpu(), weight.detach().double().cpu(), grad.view_as(out).double().cpu()
    # On the CPU: on CUDA none may be empty.
    wide, sizes = table.clone().requires_grad_(), table.clone().requires_grad_()
    F.embedding(indices, wide, **options).backward(terms)
    F.embedding(indices, sizes, **options).backward(terms.abs())
    most = int(indices.flatten().bincount().max()) if indices.numel() else 0
    u, dtype = UNIT_ROUNDOFF[torch.float32], weight.dtype
    bound = (most + 2) * u * sizes.grad + UNIT_ROUNDOFF[dtype] * wide.grad.abs() * 1.01 + TINY[dtype]
    assert fresh.grad.dtype == dtype
    assert_within(fresh.grad.cpu(), wide.grad, bound, "grad")
    return fresh.grad


def test_rows_without_elements():
    weight = torch.empty(7, 0, requires_grad=True)
    out = ak.embedding(torch.arange(5), weight)
    assert torch.autograd.grad(out.sum(), weight)[0].shape == (7, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "entries"), [(7, 8, 1), (11, 24, 100), (40, 33, 300), (3, 264, 37), (5, 1, 50), (4, 6, 0)]
)
def test_gradient_within_the_bound(device, rows, columns, entries, dtype):
    problem_ = problem(rows, columns, entries, dtype, device)
    check(*problem_)
    check(*problem_, padding_idx=rows // 2)
    check(*problem_, padding_idx=-1, scale_grad_by_freq=True)


RUNS = [[1], [16], [17], [5, 11], [15, 2, 47, 1], [100], [3, 30, 16, 16, 5], []]


def odd(t):
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


@pytest.mark.parametrize("columns", [7, 24, 1030])
@pytest.mark.parametrize("runs", RUNS, ids=str)
def test_runs_within_and_across_pieces(device, runs, columns):
    """Exact sums of integers in a drawn order, onto what a table of fewer rows or more holds, at any address."""
    generator = torch.Generator().manual_seed(len(runs) + columns)
    index = torch.arange(1, len(runs) + 1).repeat_interleave(torch.tensor(runs, dtype=torch.int64)).to(device)
    order = torch.randperm(len(index), generator=generator).to(device)
    grad = torch.randint(-1, 2, (len(index), columns), generator=generator).to(device, torch.bfloat16)
    for rows, options in (
        (len(runs) + 2, {}),
        (len(runs) + (requested_backend() == "cpu"), {"padding_idx": 3}),  # the CPU refuses a row that is not there
        (len(runs) + 2, {"padding_idx": 1, "scale_by_frequency": True}),
        (len(runs) + 1, {"in_order": True}),
    ):
        for way in (torch.clone, odd):
            out, want = (torch.full((rows, columns), 3.0, device=device) for _ in range(2))
            out = way(out)
            op(out, way(grad), index, order, **options)
            op.reference(want, grad, index, order, **options)
            torch.testing.assert_close(out, want, rtol=2.0**-22 if "scale_by_frequency" in options else 0, atol=0)


@pytest.mark.parametrize("columns", [24, 7, 264])
def test_entries_in_order_in_one_call_and_in_two(device, columns):
    """Numbers whose sum depends on the order, onto what the table holds."""
    generator = torch.Generator().manual_seed(columns)
    words = torch.arange(7).repeat_interleave(torch.tensor([5, 3, 30, 1, 16, 40, 9]))
    words = words[torch.randperm(len(words), generator=generator)]
    grad = torch.randn(len(words), columns, generator=generator) * 2.0 ** torch.randint(
        9, (len(words), 1), generator=generator
    )
    results = []
    for cut, call in ((0, op.reference), (0, op), (1, op), (30, op)):
        results.append(torch.full((7, columns), 0.1, device=device))
        for part in (slice(0, cut), slice(cut, None)):
            index, order = words[part].sort(stable=True)
            call(results[-1], *(t.to(device) for t in (grad[part], index, order)), padding_idx=1, in_order=True)
    assert all(torch.equal(result, results[0]) for result in results)


def test_four_thousand_small_gradients(device):
    """In bf16 sums stop at 4."""
    weight = torch.zeros(3, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = ak.embedding(torch.ones(4096, dtype=torch.int64, device=device), weight)
    out.backward(torch.full_like(out, 0.01))
    term = torch.tensor(0.01, dtype=torch.bfloat16).double().item()
    assert weight.grad[1, 0].item() == torch.tensor(4096 * term, dtype=torch.bfloat16).item()
    assert not weight.grad[::2].any()


def test_the_bits_are_those_of_the_run_before_and_of_any_number_of_threads(device, same_bits_for):
    weight, indices, grad = problem(*((50, 300, 2000) if device == "cpu" else (9, 40, 700)), torch.float32, device)
    same_bits_for((1, 1, 2, 3), lambda: check(weight, indices, grad))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_shapes_and_index_types(dtype):
    weight, indices, grad = problem(9, 4, 24, torch.bfloat16)
    check(weight, indices.to(dtype).view(2, 3, 4), grad)
    check(weight, indices.to(dtype).view(4, 6).t(), grad)
    assert ak.embedding(indices[0].to(dtype), weight).shape == (4,)


def test_max_norm_scales_the_rows_that_are_used_as_torch_does():
    weight, indices, _ = problem(9, 4, 6, torch.float32)
    ours, theirs = (weight.detach().clone().requires_grad_() for _ in range(2))
    out = ak.embedding(indices, ours, max_norm=0.5, norm_type=1.0)
    assert torch.equal(out, F.embedding(indices, theirs, max_norm=0.5, norm_type=1.0))
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, weight)


def test_sparse_gradients_are_torchs():
    weight, indices, grad = problem(9, 4, 6, torch.float32)
    ak.embedding(indices, weight, sparse=True).backward(grad)
    assert weight.grad.is_sparse


def test_second_derivatives_and_float64():
    weight, indices, _ = problem(5, 3, 7, torch.float64)
    assert torch.autograd.gradcheck(lambda w: ak.embedding(indices, w), weight)
    narrow = weight.detach().float().requires_grad_()
    loss = ak.embedding(indices, narrow).pow(3).sum()
    (first,) = torch.autograd.grad(loss, narrow, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), narrow)
    want = 6 * narrow.detach() * indices.bincount(minlength=5)[:, None]
    torch.testing.assert_close(second, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_main_grad_takes_the_sums_of_all_micro_batches(dtype, transposed):
    module = ak.nn.Embedding(6, 8, padding_idx=5, dtype=dtype)
    if transposed:
        module.weight = torch.nn.Parameter(module.weight.detach().t().contiguous().t())
    indices = torch.tensor([1, 1, 5, 3])
    with ak.nn.accumulate_fp32(module):
        for _ in range(300):
            module(indices).sum().backward()
        assert module.weight.grad.data_ptr() == module.weight.main_grad.data_ptr()
        assert module.weight.grad.dtype == torch.float32
        assert torch.equal(module.weight.grad[:, 0], torch.tensor([0.0, 600, 0, 300, 0, 0]))
        module.weight.grad = None
        module(indices).sum().backward()  # a fresh start
        assert torch.equal(module.weight.grad[:, 0], torch.tensor([0.0, 2, 0, 1, 0, 0]))


def test_main_grad_of_a_tied_table():
    """An embedding and the head over it: the gradients of both uses, in fp32."""
    table, head = ak.nn.Embedding(6, 8, dtype=torch.bfloat16), ak.nn.Linear(8, 6, bias=False, dtype=torch.bfloat16)
    head.weight = table.weight
    indices = torch.tensor([1, 1, 3])
    wide = table.weight.detach().double().requires_grad_()
    (wide[indices] @ wide.t()).sum().backward()
    with ak.nn.accumulate_fp32(torch.nn.ModuleList([table, head])):
        for _ in range(4):
            head(table(indices)).sum().backward()
        # The gradient between the two is rounded to bf16.
        bound = 2.0**-6 * wide.grad.abs().max().expand(6, 8)
        assert_within(table.weight.grad, 4 * wide.grad, bound, "grad")


def test_module_is_torchs():
    theirs = torch.nn.Embedding(9, 4, padding_idx=2, max_norm=1.0)
    ours = ak.nn.Embedding(9, 4, padding_idx=2, max_norm=1.0)
    ours.load_state_dict(theirs.state_dict())
    indices = torch.arange(9)
    assert torch.equal(ours(indices), theirs(indices))
    assert torch.equal(copy.deepcopy(ours).weight, theirs.weight)


@pytest.mark.parametrize(
    ("indices", "weight", "options", "error", "text"),
    [
        (torch.ones(3), torch.ones(4, 2), {}, TypeError, "input has dtype float32"),
        (torch.ones(3).long(), torch.ones(4, 2, 2), {}, ValueError, r"weight has shape \[4, 2, 2\]"),
        (torch.ones(3).long(), torch.ones(4, 2).int(), {}, TypeError, "weight has dtype int32"),
        (torch.ones(3).long(), torch.ones(4, 2), {"padding_idx": 4}, ValueError, "padding_idx is 4; accepted: None, -4"),
        (torch.ones(3, device="meta").long(), torch.ones(4, 2), {}, ValueError,
            "weight is on cpu, but input is on meta"),
    ],
)  # fmt: skip
def test_bad_calls(indices, weight, options, error, text):
    with pytest.raises(error, match=f"embedding: {text}"):
        ak.embedding(indices, weight, **options)


def test_an_index_out_of_range_is_an_error():
    weight = torch.ones(4, 2, requires_grad=True)
    with pytest.raises(IndexError):
        ak.embedding(torch.tensor([4]), weight)


@pytest.mark.parametrize(
    ("sorted", "order", "text"),
    [
        ([0, 4], [0, 1], r"sorted\[1\] is 4; accepted: 0 to 3"),
        ([-1, 2], [0, 1], r"sorted\[0\] is -1"),
        ([2, 1], [0, 1], r"sorted\[1\] is 1 after 2; accepted: ascending"),
        ([0, 1], [0, 2], r"order\[1\] is 2; accepted: 0 to 1"),
        ([0, 1, 2], [0, 1, 2], r"sorted must be contiguous with shape \(2\)"),
    ],
)
def test_the_raw_op_guards_memory(sorted, order, text):
    out, grad = torch.zeros(4, 8), torch.ones(2, 8)
    with pytest.raises(RuntimeError, match=f"embedding_accumulate_: {text}"):
        op.overload(out, grad, torch.tensor(sorted), torch.tensor(order))
    assert not out.any()

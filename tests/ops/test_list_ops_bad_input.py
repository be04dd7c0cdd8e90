"""The public functions over tensor lists: what they refuse, with which words, and that nothing is changed before."""

import contextlib

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw.check_and_norm import check_and_norm
from amp_kernels._raw.unscale import unscale_
from amp_kernels._updates.op import RULES

ONE = torch.ones(())
META = torch.ones(2, device="meta")

LISTS = [
    ([], ValueError, "grads is an empty list"),
    ([torch.ones(2), 3.0], TypeError, r"grads\[1\] has type float"),
    ([torch.ones(2), torch.ones(2, dtype=torch.int32)], TypeError, r"grads\[1\] is torch.int32; accepted: float16"),
    ([torch.ones(2, dtype=torch.complex64)], TypeError, r"grads\[0\] is torch.complex64"),
    ([torch.ones(2).to_sparse()], ValueError, r"grads\[0\] has layout torch.sparse_coo"),
    ([torch.ones(2), META], ValueError, r"grads\[1\] is on meta and grads\[0\] on cpu"),
    ([torch.ones(4, 4)[:, ::2]], ValueError, r"grads\[0\] is float32\[4, 2\] with strides \(4, 2\) on cpu, which leaves gaps"),
    ([torch.ones(3).expand(2, 3)], ValueError, ".*which leaves gaps in memory or overlaps itself"),
]  # fmt: skip


@pytest.mark.parametrize(("grads", "error", "text"), LISTS)
def test_lists(grads, error, text):
    with pytest.raises(error, match=f"check_and_norm: {text}"):
        check_and_norm(grads)
    with pytest.raises(error, match="exponent_histogram: " + text.replace("grads", "tensors")):
        ak.numerics.exponent_histogram(grads)
    found = torch.zeros(())
    with pytest.raises(error, match=f"unscale_: {text}"):
        unscale_(grads, found, ONE)
    assert found.item() == 0


def test_tensors_that_share_memory_are_not_unscaled_twice():
    """In one launch two blocks would do it at once. Touching is not sharing, and empty tensors share nothing."""
    memory, other = torch.ones(20), torch.ones(3)
    found = torch.zeros(())
    for grads in ([memory, other, memory], [memory[:10], other, memory[9:]], [memory[2:5], other, memory]):
        with pytest.raises(ValueError, match=r"unscale_: grads\[0\] .* and grads\[2\] .* share memory"):
            unscale_(grads, found, torch.tensor(0.5))
        assert torch.equal(memory, torch.ones(20))
    unscale_([memory[10:], memory[:0], memory[:10], memory[:0], torch.ones(0)], found, torch.tensor(0.5))
    assert torch.equal(memory, torch.full((20,), 0.5))
    assert check_and_norm([memory, memory])[0].item() == 10.0  # only reads


@pytest.mark.parametrize("norm_type", [1.0, 0.0, 3, -float("inf"), float("nan")])
def test_other_norms_are_refused(norm_type):
    with pytest.raises(ValueError, match=f"check_and_norm: norm_type is {norm_type}; accepted: 2.0 and math.inf"):
        check_and_norm([torch.ones(2)], norm_type=norm_type)
    with pytest.raises((RuntimeError, ValueError), match="norm_type"):
        torch.ops.amp_kernels.check_and_norm([torch.ones(2)], None, norm_type=norm_type)


def test_a_tensor_is_no_list_and_a_generator_is():
    with pytest.raises(TypeError, match=r"check_and_norm: grads has type torch.Tensor; accepted: a list of tensors"):
        check_and_norm(torch.ones(3))
    with pytest.raises(TypeError, match=r"unscale_: grads has type torch.Tensor; accepted: a list of tensors"):
        unscale_(torch.ones(3), torch.zeros(()), ONE)
    with pytest.raises(
        TypeError, match=r"exponent_histogram: tensors has type torch.Tensor; accepted: a list of tensors"
    ):
        ak.numerics.exponent_histogram(torch.ones(3))
    assert check_and_norm(torch.full((2,), 2.0) for _ in range(2))[0].item() == 16.0


@pytest.mark.parametrize(
    ("scalar", "error", "text"),
    [
        (2.0, TypeError, "has type float; accepted: a tensor of one element"),
        (torch.ones(2), TypeError, r"is float32\[2\].*accepted: one element of float32"),
        (torch.ones((), dtype=torch.float64), TypeError, "accepted: one element of float32"),
        (torch.ones((), device="meta"), ValueError, "is on meta and the tensors on cpu"),
    ],
)
def test_scalars(scalar, error, text):
    grads = [torch.ones(2)]
    for call in (
        lambda: check_and_norm(grads, scalar),
        lambda: unscale_(grads, scalar, ONE),
        lambda: unscale_(grads, torch.zeros(()), scalar),
    ):
        with pytest.raises(error, match=text):
            call()
    assert torch.equal(grads[0], torch.ones(2))


def changed(rule, **changes):
    """The arguments of a sample with some replaced."""
    op = RULES[rule].op
    names = [argument.name for argument in op.schema.arguments]
    return dict(zip(names, next(iter(op.samples("cpu")))[0], strict=True)) | changes


# ---- addresses


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["cpu", "reference", "emulate"])
def test_no_public_update_takes_addresses(rule, backend):
    """The rows that the private op of optimizers would follow, in the place of the layout: with lists and without."""
    op, victim, grad = RULES[rule].op, torch.ones(35), torch.ones(35)
    table = torch.tensor([[victim.data_ptr(), grad.data_ptr(), 35, 6, 6, 0, 0, 0, 0, 0, 0, 0, 7, 5]])
    call = changed(rule, layout=table.expand(3, -1).contiguous())
    with pytest.raises((RuntimeError, ValueError), match=r"layout|unpack"):
        ak.backend(backend)(op)(*call.values())
    with contextlib.suppress(RuntimeError, ValueError):  # no parameters: refused, or no step at all
        ak.backend(backend)(op)(*changed(rule, params=[], grads=[], layout=table).values())
    assert torch.equal(victim, torch.ones(35))


def test_no_public_op_has_a_table():
    for name, op in REGISTRY.items():
        assert not name.startswith("_")
        assert not {"table", "address", "addresses"} & {argument.name for argument in op.schema.arguments}

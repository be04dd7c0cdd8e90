"""unscale_ on the CPU: torch's _amp_foreach_non_finite_check_and_unscale_ over mixed dtypes, with the result tested."""

import math

import pytest
import torch

import amp_kernels._raw.unscale as module

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OP = torch.ops.amp_kernels.unscale_.default


def run(grads, inv_scale: float, found: float = 0.0) -> float:
    found_inf = torch.tensor(found)
    OP(grads, found_inf, torch.tensor(inv_scale))
    return found_inf.item()


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 1023, 1025, 16384, 16385, 50_001])
@pytest.mark.parametrize("inv_scale", [2.0**-16, 1.0, 1 / 3])
def test_equals_torchs_op(dtype, n, inv_scale):
    """Bit for bit. One dtype a call, because torch takes no mixed lists; fp64 it multiplies by the fp32 factor, too."""
    ours, theirs = randn(n, dtype=dtype), randn(n, dtype=dtype)
    assert run([ours], inv_scale) == 0.0
    found_inf = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([theirs], found_inf, torch.tensor(inv_scale))
    assert torch.equal(ours, theirs)


def test_mixed_list():
    grads = [torch.full(s, 8.0, dtype=d) for d in FLOATS for s in ((3,), (), (0, 2), (2, 2))]
    assert run(grads, 0.25) == 0.0
    assert all((g == 2.0).all() for g in grads)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_value_at_every_position(dtype, bad):
    n = 16384 + 1024 + 33
    for position in [*range(40), 1023, 1024, 1025, 16383, 16384, 16385, *range(n - 36, n)]:
        grad = torch.ones(n, dtype=dtype)
        grad[position] = bad
        assert run([torch.ones(3), grad, torch.ones(2)], 0.5) == 1.0, position
        assert (grad == 0.5).sum() == n - 1  # the others are unscaled all the same


def test_found_inf_is_never_cleared():
    assert run([torch.ones(5)], 1.0, found=1.0) == 1.0
    assert run([torch.ones(5)], 1.0, found=2.0) == 2.0


def test_results_that_are_not_finite():
    """What torch does not see: it tests the value before the multiplication."""
    assert run([torch.full((3,), 1e30)], 2.0**30) == 1.0
    assert run([torch.full((3,), 300.0, dtype=torch.float16)], 300.0) == 1.0  # 90000 is finite in fp32, inf when stored
    assert run([torch.full((3,), 3e38, dtype=torch.bfloat16)], 2.0) == 1.0
    assert run([torch.zeros(3)], math.inf) == 1.0  # a scale of zero
    assert run([torch.full((3,), 200.0, dtype=torch.float16)], 300.0) == 0.0


SIGNALLING = {
    torch.float16: 0x7C01,
    torch.bfloat16: 0x7F81,
    torch.float32: 0x7F800001,
}  # NaN that any operation changes


def test_without_a_flag():
    """Products all the same; for a factor of 1 no element is written, not even with what it was."""
    for factor in (0.5, 1 / 3, math.inf):
        ours, theirs = randn(3000, dtype=torch.bfloat16), randn(3000, dtype=torch.bfloat16)
        OP([ours], None, torch.tensor(factor))
        run([theirs], factor)
        assert torch.equal(ours, theirs)
    for dtype, bits in SIGNALLING.items():
        grad = torch.tensor([bits], dtype=torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)
        OP([grad], None, torch.ones(()))
        assert grad.view(torch.int32 if dtype == torch.float32 else torch.int16).item() == bits
    with pytest.raises(RuntimeError, match=r"grads\[0\] must cover"):
        OP([torch.ones(4)[::2]], None, torch.ones(()))


def test_memory_order():
    base = randn(3, 4, 5, 6)
    grads = [
        base.to(memory_format=torch.channels_last),
        base.permute(2, 0, 3, 1).clone(memory_format=torch.preserve_format),
    ]
    strides = [g.stride() for g in grads]
    run(grads, 0.5)
    assert [g.stride() for g in grads] == strides
    assert torch.equal(grads[0], base * 0.5)
    assert torch.equal(grads[1], base.permute(2, 0, 3, 1) * 0.5)


@pytest.mark.parametrize(
    ("grads", "found_inf", "inv_scale", "message"),
    [
        ([torch.ones(2), torch.ones(4)[::2]], torch.zeros(()), torch.ones(()), r"unscale_: grads\[1\] must cover"),
        (
            [torch.ones(2), torch.ones(2).int()],
            torch.zeros(()),
            torch.ones(()),
            r"grads\[1\] must have dtype .* got int32",
        ),
        ([torch.ones(2)], torch.zeros(2), torch.ones(()), "found_inf must have one element"),
        ([torch.ones(2)], torch.zeros((), dtype=torch.float64), torch.ones(()), "found_inf must have dtype float32"),
        ([torch.ones(2)], torch.zeros(()), torch.ones(3), "inv_scale must have one element"),
    ],
)
def test_bad_calls_change_nothing(grads, found_inf, inv_scale, message):
    with pytest.raises(RuntimeError, match=message):
        OP(grads, found_inf, inv_scale * 0.5)
    assert all((g == 1).all() for g in grads)
    assert (found_inf == 0).all()


def test_version_counters():
    grad, found_inf = torch.ones(3, requires_grad=True), torch.zeros(())
    loss = (grad * grad).sum()
    versions = grad._version, found_inf._version
    with torch.no_grad():
        OP([grad], found_inf, torch.ones(()))
    assert (grad._version, found_inf._version) == (versions[0] + 1, versions[1] + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_agrees_with_the_python_reference():
    for inv_scale, spoil in ((1 / 7, None), (1e4, None), (0.5, math.nan)):
        results = []
        for call in (OP, module.op.reference):
            grads = [randn(3000, dtype=d, seed=i) * 10 for i, d in enumerate(FLOATS)]
            if spoil is not None:
                grads[1][77] = spoil
            found_inf = torch.zeros(())
            call(grads, found_inf, torch.tensor(inv_scale))
            results.append([*grads, found_inf])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
            assert torch.equal(a.isnan(), b.isnan())

"""unscale_: torch's _amp_foreach_non_finite_check_and_unscale_ over mixed dtypes, with the result tested."""

import math

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY

from ..helpers.generators import normal

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OP = REGISTRY["unscale_"]
pytestmark = pytest.mark.usefixtures("compiled")


def run(grads, inv_scale: float, found: float = 0.0) -> float:
    found_inf = torch.tensor(found)
    OP(grads, found_inf, torch.tensor(inv_scale))
    return found_inf.item()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 1023, 1025, 16384, 16385, 50_001])
@pytest.mark.parametrize("inv_scale", [2.0**-16, 1.0, 1 / 3])
def test_equals_torchs_op(dtype, n, inv_scale):
    """Bit for bit. One dtype a call, because torch takes no mixed lists; fp64 it multiplies by the fp32 factor, too."""
    ours, theirs = normal(n, dtype=dtype), normal(n, dtype=dtype)
    assert run([ours], inv_scale) == 0.0
    found_inf = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([theirs], found_inf, torch.tensor(inv_scale))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_value_at_every_position(compiled, dtype, bad):
    n = 16384 + 1024 + 33 if compiled == "cpu" else 1024 + 33
    for position in {*range(40), 1023, 1024, 1025, 16383, 16384, 16385, *range(n - 36, n)} & set(range(n)):
        grad = torch.ones(n, dtype=dtype)
        grad[position] = bad
        assert run([torch.ones(3), grad, torch.ones(2)], 0.5) == 1.0, position
        assert (grad == 0.5).sum() == n - 1  # the others are unscaled all the same


def test_found_inf_is_never_cleared():
    assert run([torch.ones(5)], 1.0, found=1.0) == 1.0
    assert run([torch.ones(5)], 1.0, found=2.0) == 2.0


def test_results_that_are_not_finite():
    """torch does not see these: it tests the value before the multiplication."""
    assert run([torch.full((3,), 1e30)], 2.0**30) == 1.0
    assert run([torch.full((3,), 300.0, dtype=torch.float16)], 300.0) == 1.0  # 90000 is finite in fp32, inf when stored
    assert run([torch.full((3,), 3e38, dtype=torch.bfloat16)], 2.0) == 1.0
    assert run([torch.zeros(3)], math.inf) == 1.0  # a scale of zero
    assert run([torch.full((3,), 200.0, dtype=torch.float16)], 300.0) == 0.0


# NaN that any operation changes.
SIGNALLING = {torch.float16: 0x7C01, torch.bfloat16: 0x7F81, torch.float32: 0x7F800001}


def test_without_a_flag():
    """Products all the same; for a factor of 1 no element is written, not even with what it was."""
    for factor in (0.5, 1 / 3, math.inf):
        ours, theirs = normal(3000, dtype=torch.bfloat16), normal(3000, dtype=torch.bfloat16)
        OP([ours], None, torch.tensor(factor))
        run([theirs], factor)
        assert torch.equal(ours, theirs)
    for dtype, bits in SIGNALLING.items():
        grad = torch.tensor([bits], dtype=torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)
        OP([grad], None, torch.ones(()))
        assert grad.view(torch.int32 if dtype == torch.float32 else torch.int16).item() == bits
    with pytest.raises(RuntimeError, match=r"grads\[0\] must cover"):
        OP([torch.ones(4)[::2]], None, torch.ones(()))


@pytest.mark.parametrize(
    ("grads", "found_inf", "inv_scale", "message"),
    [
        ([torch.ones(2), torch.ones(4)[::2]], torch.zeros(()), torch.ones(()), r"unscale_: grads\[1\] must cover"),
        ([torch.ones(2), torch.ones(2).int()], torch.zeros(()), torch.ones(()), r"grads\[1\] must have dtype .* got int32"),
        ([torch.ones(2)], torch.zeros(2), torch.ones(()), "found_inf must have one element"),
        ([torch.ones(2)], torch.zeros((), dtype=torch.float64), torch.ones(()), "found_inf must have dtype float32"),
        ([torch.ones(2)], torch.zeros(()), torch.ones(3), "inv_scale must have one element"),
    ],
)  # fmt: skip
def test_bad_calls_change_nothing(grads, found_inf, inv_scale, message):
    with pytest.raises(RuntimeError, match=message):
        OP(grads, found_inf, inv_scale * 0.5)
    assert all((g == 1).all() for g in grads)
    assert (found_inf == 0).all()

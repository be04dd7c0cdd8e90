"""gemm_dact: within the bound of the arithmetic, sums of the unrounded gradient, nothing beside the operands read."""

import math

import pytest
import torch

from amp_kernels._checks.activations import ACTIVATIONS, GATED
from amp_kernels._dispatch.policy import requested_backend

from ..helpers.bounds import assert_within, dact_reference_and_bound
from ..helpers.generators import HALF_DTYPES, OUT_DTYPES, integers, operand
from ..helpers.poison import embed, poisoned_allocations
from .raw import gemm_dact


def preact_of(activation, *shape, generator, device, dtype):
    columns = shape[-1] * (2 if activation in GATED else 1)
    return (2 * torch.randn(*shape[:-1], columns, generator=generator)).to(device, dtype)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_error_is_within_the_bound(device, generator, dtype, out_dtype, activation):
    """150 rows are three blocks of the CPU kernel's sums, 1050 columns two of its tiles."""
    for shape, k, preact_dtype in (((150, 37), 64, dtype), ((2, 9, 1050), 20, torch.float32)):
        a = operand(*shape[:-1], k, dtype=dtype, generator=generator, device=device)
        b = operand(*shape[:-2], k, shape[-1], dtype=dtype, generator=generator, device=device, layout="column")
        preact = preact_of(activation, *shape, generator=generator, device=device, dtype=preact_dtype)
        with poisoned_allocations():
            dz, sums = gemm_dact(a, b, preact, activation=activation, bias_grad=True, out_dtype=out_dtype)
        reference, bound, sums64, sums_bound = dact_reference_and_bound(
            a, b, preact, activation=activation, out_dtype=out_dtype
        )
        assert (dz.dtype, dz.shape, sums.dtype) == (out_dtype, preact.shape, torch.float32)
        assert dz.is_contiguous()
        assert_within(dz, reference, bound, "dz")
        assert_within(sums, sums64, sums_bound, "sums")
        alone, nothing = gemm_dact(a, b, preact, activation=activation, out_dtype=out_dtype)
        assert torch.equal(alone, dz)
        assert nothing is None


def test_the_sums_are_those_of_the_unrounded_gradient(device):
    """Each dz is 1 + 2^-9, in bf16 1; a thousand of them differ by 2."""
    a = torch.tensor([[1.0, 2.0**-9]], device=device, dtype=torch.bfloat16).expand(1024, 2)
    b = torch.ones(2, 3, device=device, dtype=torch.bfloat16)
    dz, sums = gemm_dact(a, b, torch.ones(1024, 3, device=device), activation="relu", bias_grad=True)
    assert (dz == 1).all()
    assert sums.tolist() == [1026.0] * 3


@pytest.mark.parametrize("activation", ["none", "relu", "swiglu"])
def test_integers_are_exact_in_any_layout(device, generator, activation):
    for batch in ((), (3,)):
        a = integers(*batch, 9, 17, limit=3, dtype=torch.bfloat16, generator=generator, device=device)
        b = integers(*batch, 17, 8, limit=3, dtype=torch.bfloat16, generator=generator, device=device)
        grad = a.double() @ b.double()
        # Gates beyond the reach of exp: silu is the identity there or zero, and its derivative 1 or 0.
        shape = (*batch, 9, 16 if activation in GATED else 8)
        z = 512.0 * integers(*shape, limit=1, dtype=torch.bfloat16, generator=generator, device=device)
        gate, up = z[..., :8].double(), z[..., 8:].double()
        if activation == "swiglu":  # silu'(0) is a half
            expected = torch.cat([grad * up * (0.5 + gate.sign() / 2), grad * gate.relu()], dim=-1)
        else:
            expected = grad if activation == "none" else torch.where(z > 0, grad, 0.0)
        for offset, transposed, step in ((0, False, 1), (1, True, 1), (3, False, 2), (5, True, 2)):
            with poisoned_allocations():
                dz, sums = gemm_dact(
                    embed(a, offset=offset, transposed=transposed, step=step)[0],
                    embed(b, offset=8 - offset, transposed=not transposed, pad=1)[0],
                    embed(z, offset=1, transposed=transposed, step=step)[0],
                    activation=activation,
                    bias_grad=True,
                    out_dtype=torch.float32,
                )
            assert torch.equal(dz.double(), expected)
            assert torch.equal(sums.double(), expected.flatten(0, -2).sum(0))


def test_relu_chooses_and_does_not_multiply(device):
    a = torch.full((1, 1), math.inf, device=device, dtype=torch.float16)
    b = torch.ones(1, 3, device=device, dtype=torch.float16)
    preact = torch.tensor([[-1.0, 0.0, 1.0]], device=device)
    assert gemm_dact(a, b, preact, activation="relu")[0].tolist() == [[0.0, 0.0, math.inf]]


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_empty_sizes(device, activation):
    for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        a, b = (torch.ones(s, device=device, dtype=torch.float16) for s in ((m, k), (k, n)))
        preact = torch.ones(m, 2 * n if activation in GATED else n, device=device)
        with poisoned_allocations():
            dz, sums = gemm_dact(a, b, preact, activation=activation, bias_grad=True)
        assert dz.shape == preact.shape
        assert sums.shape == preact.shape[1:]
        assert not dz.any()
        assert not sums.any()


def test_the_bits_do_not_depend_on_the_number_of_threads(device, generator, same_bits_for):
    a = operand(1000, 16, dtype=torch.bfloat16, generator=generator, device=device)
    b = operand(16, 300, dtype=torch.bfloat16, generator=generator, device=device)
    preact = preact_of("gelu", 1000, 300, generator=generator, device=device, dtype=torch.bfloat16)

    def run():
        dz, sums = gemm_dact(a, b, preact, activation="gelu", bias_grad=True, batch_invariant=True)
        # The reference leaves the sum to torch, whose order depends on the threads.
        return [dz] if requested_backend() == "reference" else [dz, sums]

    same_bits_for((1, 2, 5), run)

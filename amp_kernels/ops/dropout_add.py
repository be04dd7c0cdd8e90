"""``dropout_add``: dropout on a branch and the addition to the residual stream, in one pass and without a mask tensor.

The op is composite, over the raw ``dropout``, whose seed is drawn from torch's generator above it. float64, torch.func
transforms and forward-mode AD take torch's own operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._checks.lists import FLOATS, KERNEL_DTYPES
from .._checks.operands import check_same_device, check_tensor, check_tensors
from .._dispatch import autocast
from .._dispatch.library import Sample, decompose_batches, define
from .._raw import dropout
from .._raw._norm import check_like, check_rate
from ._autograd import under_transform
from ._linear import gradient_dtype


class Dropout(torch.autograd.Function):
    """The raw op, which is its own derivative."""

    @staticmethod
    def forward(ctx, x, residual, seed, p, out_dtype):
        ctx.p = p
        ctx.dtypes = [None if t is None else gradient_dtype(t) for t in (x, residual)]
        ctx.save_for_backward(seed)
        return dropout.op(x, seed, residual, p=p, out_dtype=out_dtype)

    @staticmethod
    def backward(ctx, grad):
        (seed,) = ctx.saved_tensors
        needs_x, needs_residual = ctx.needs_input_grad[:2]
        of_x = Dropout.apply(grad, None, seed, ctx.p, ctx.dtypes[0]) if needs_x else None
        return of_x, grad.to(ctx.dtypes[1]) if needs_residual else None, None, None, None


def _dropout_add(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    if x.dtype == torch.float64 or under_transform():
        return dropout.composed(x, seed, residual, p, residual.dtype)
    return Dropout.apply(x, residual, seed, p, residual.dtype)


def samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)
    seed = torch.tensor([1234567890123456789], device=device)
    x, residual = (torch.randn(3, 7, generator=generator).to(device).requires_grad_() for _ in range(2))
    yield (x.detach().bfloat16().requires_grad_(), residual, seed, 0.25), {}
    yield (x.detach().half().requires_grad_(), residual.detach().half(), seed, 0.5), {}


op = define(
    "dropout_add(Tensor x, Tensor residual, Tensor seed, float p) -> Tensor",
    _dropout_add,
    samples=samples,
    composite=True,
)
decompose_batches(op)


def dropout_add(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """``dropout(x) + residual``: torch.nn.functional.dropout and the addition after it, in one pass.

    Each element of ``x`` becomes 0 with probability ``p``, or is multiplied by 1 / (1 - p); the sum is taken in fp32 and rounded
    once. No mask is stored: backward makes it again from a seed of 8 bytes, which comes from the default generator of the
    device. So torch.manual_seed repeats it, torch.utils.checkpoint recomputes with the same mask, a CUDA graph draws a
    new one at each replay, and nothing waits for the device. For one seed the mask is the same on every backend.

    Args:
        x: fp16, bf16 or fp32, any shape and strides.
        residual: the shape of ``x``, any of these dtypes; never written to. float64 is for both or for none.
        p: the probability to be dropped, from 0 to 1, exact to within 2^-25.
        training: without it ``residual + x``.

    Returns:
        A contiguous tensor in the dtype of ``residual``, inside torch.autocast, too.

    Raises:
        TypeError: a dtype or layout is not accepted, or ``x`` is a DTensor.
        ValueError: ``p`` is out of range, or shapes or devices do not fit.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> branch, stream = torch.ones(4, 256, dtype=torch.bfloat16), torch.zeros(4, 256)
        >>> ak.dropout_add(branch, stream, p=0.5).unique()
        tensor([0., 2.])
    """
    name = "dropout_add"
    check_tensors(name, residual=residual)
    check_tensor(name, "x", x, FLOATS)
    dtypes = (torch.float64,) if x.dtype == torch.float64 else KERNEL_DTYPES
    check_like(name, "residual", residual, x.shape, dtypes)
    check_same_device(name, x=x, residual=residual)
    check_rate(name, "p", p)
    if not training or p == 0.0:
        return (residual + x).to(residual.dtype)
    seed = dropout.draw_seed(name, x)
    return (_dropout_add if autocast.eager(x, residual) else op)(x, residual, seed, p)

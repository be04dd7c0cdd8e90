"""``accumulate_fp32``: accumulate a model's gradients in float32, those of GEMM weights inside the GEMM."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES
from .._checks.modules import check_module
from .._checks.types import type_name
from ..ops import _main_grad
from . import experts
from .embedding import Embedding
from .grouped_linear import GroupedLinear
from .linear import Linear
from .norm import LayerNorm, RMSNorm


class AccumulateFp32:
    """The handle returned by :func:`accumulate_fp32`: :meth:`remove`, or the end of a ``with`` block, undoes it."""

    def __init__(self, weights: list[torch.nn.Parameter], others: list[torch.nn.Parameter]):
        self._weights = weights
        self._wide = [*weights, *(p for p in others if p.dtype in HALF_DTYPES)]  # whose .grad is fp32

    def remove(self) -> None:
        """Drop every ``main_grad``. An existing ``.grad`` is cast to its parameter's dtype. A second call has no effect."""
        for weight in self._weights:
            _main_grad.withdraw(weight)
        for param in self._wide:
            _set_grad_dtype(param, param.dtype)
        self._weights, self._wide = [], []

    def __enter__(self) -> AccumulateFp32:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def accumulate_fp32(model: torch.nn.Module) -> AccumulateFp32:
    """Give each weight of ``model`` that is used in this package's GEMMs an fp32 ``main_grad`` for its gradient.

    Backward then accumulates a weight's gradient into ``main_grad`` inside the GEMM, in fp32. Without it, autograd adds the
    gradient to ``.grad`` in the dtype of the weight with a separate kernel. With 16-bit parameters this rounds every sum over
    micro-batches, until small increments are lost; with fp32 parameters it costs 12 bytes of traffic per element and
    micro-batch.

    ``.grad`` shares the memory of ``main_grad`` after a backward in 16 bits or under autocast; fp32 matrix multiplications are
    torch's and write only ``.grad``. Optimizers, scalers, clipping, ``zero_grad`` in both forms, post-accumulate hooks and
    DistributedDataParallel work unchanged. After ``zero_grad(set_to_none=True)`` or ``.grad = None``, the first micro-batch
    overwrites ``main_grad`` without reading it. ``main_grad`` is kept, so gradients keep their addresses between steps.

    The weights are those of :class:`amp_kernels.nn.Linear` modules (also inside :class:`amp_kernels.nn.MLP`),
    :class:`amp_kernels.nn.GroupedLinear`, converted experts and :class:`amp_kernels.nn.Embedding` that require a gradient. They may also be
    used through :func:`amp_kernels.linear`, :func:`amp_kernels.mlp`, :func:`amp_kernels.grouped_mm` and
    :func:`amp_kernels.embedding`. All other 16-bit parameters of the model get an fp32 ``.grad`` (``Tensor.grad_dtype``) that
    autograd accumulates into; biases of these modules get their fp32 sums without rounding.

    Within :func:`amp_kernels.batch_invariant` the gradients of these weights, of their modules' biases and of the weights and
    biases of :class:`amp_kernels.nn.LayerNorm` and :class:`amp_kernels.nn.RMSNorm` continue from ``main_grad``, token after token: any
    split into micro-batches of multiples of 64 tokens gives the bits of one pass.

    Notes:

    - A tensor hook on a weight (``weight.register_hook``) needs each increment, so autograd accumulates the gradient of such a
      weight, also in fp32. The same holds for second derivatives, torch.autograd.grad, transposed uses and compiled code.
    - With 16-bit parameters the optimizer gets fp32 gradients. This package's optimizers accept them; most of torch's do not.
      DistributedDataParallel rejects them; use :class:`amp_kernels.distributed.GradReducer` instead. With fp32 parameters
      under autocast, DistributedDataParallel works.
    - ``fully_shard`` does not need this function: ``MixedPrecisionPolicy(reduce_dtype=torch.float32)`` accumulates and reduces
      in fp32.
    - An exception inside a backward may leave part of its gradients in ``.grad``; call ``zero_grad`` afterwards.
    - Copies of the model (copy.deepcopy) and replaced parameters (for example by fully_shard) have no ``main_grad``.

    Args:
        model: any module.

    Returns:
        A handle: ``handle.remove()`` undoes it; ``with accumulate_fp32(model): ...`` does so at the end of the block.

    Raises:
        TypeError: ``model`` is not a module, or a weight is a tensor subclass such as DTensor. Nothing was changed.
        ValueError: a weight already has a tensor hook or a ``main_grad``.

    Examples:
        >>> model = ak.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> x = torch.ones(1, 4, dtype=torch.bfloat16)
        >>> with ak.nn.accumulate_fp32(model):
        ...     for _ in range(300):  # bfloat16 sums of ones end at 256
        ...         model(x).sum().backward()
        ...     model.weight.grad[0]
        tensor([300., 300., 300., 300.])
    """
    check_module("accumulate_fp32", model)
    names = {id(param): name for name, param in model.named_parameters()}
    weights: dict[int, torch.nn.Parameter] = {}
    for weight in itertools.chain.from_iterable(map(_fused_weights, model.modules())):
        if not weight.is_leaf or not weight.requires_grad or weight.numel() == 0:
            continue
        if weight.dtype in KERNEL_DTYPES:
            weights[id(weight)] = weight
    for key, weight in weights.items():
        _check(names.get(key, "a weight"), weight)
    others = [
        param
        for param in model.parameters()
        if id(param) not in weights and param.requires_grad and not is_traceable_wrapper_subclass(param)
    ]
    rows = {id(param): param for param in _summed_over_rows(model) if id(param) not in weights}
    mine = [*weights.values(), *rows.values()]
    handle = AccumulateFp32(mine, [param for param in others if id(param) not in rows])
    for param in handle._wide:
        _set_grad_dtype(param, torch.float32)
    for weight in weights.values():
        weight.main_grad = _main_grad.buffer_for(weight)
        _main_grad.MainGrad(weight)
    for param in rows.values():
        _main_grad.offer(param)
    return handle


def _fused_weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """The weights of the module whose gradient a kernel of this package can add to an fp32 buffer."""
    if experts.is_converted(module):
        return [getattr(module, name) for name in experts.WEIGHTS]
    fused = isinstance(module, (Linear, GroupedLinear)) or (isinstance(module, Embedding) and not module.sparse)
    return [module.weight] if fused else []


def _summed_over_rows(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Biases and norm weights of this package's modules that can have a ``main_grad``, which they get within
    ``batch_invariant()``."""
    for module in model.modules():
        names = ("bias",) if isinstance(module, Linear) else ("weight", "bias")
        for name in names if isinstance(module, (Linear, LayerNorm, RMSNorm)) else ():
            param = getattr(module, name, None)
            if param is None or not param.is_leaf or not param.requires_grad or param.dtype not in KERNEL_DTYPES:
                continue
            tied = getattr(param, "main_grad", None) is not None
            if (
                param.numel()
                and param.is_contiguous()
                and not (tied or param._backward_hooks or is_traceable_wrapper_subclass(param))
            ):
                yield param


def _check(name: str, weight: torch.Tensor) -> None:
    if is_traceable_wrapper_subclass(weight):
        raise TypeError(
            f"accumulate_fp32: {name} has type {type_name(weight)}; accepted: plain parameters (fully_shard accumulates "
            "and reduces in fp32 with MixedPrecisionPolicy(reduce_dtype=torch.float32))"
        )
    if getattr(weight, "main_grad", None) is not None:
        raise ValueError(f"accumulate_fp32: {name} has a main_grad already; accepted: one handle at a time")
    if weight._backward_hooks:
        raise ValueError(
            f"accumulate_fp32: {name} has a tensor hook, which would see zeros instead of gradients; accepted: hooks "
            "that are registered afterwards"
        )


def _set_grad_dtype(param: torch.nn.Parameter, dtype: torch.dtype) -> None:
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    param.grad = None if grad is None else grad.to(dtype)

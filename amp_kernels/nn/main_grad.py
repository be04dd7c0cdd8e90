"""``accumulate_fp32``: gradients of a model accumulated in float32, those of GEMM weights inside the GEMM."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES
from .._checks.modules import check_module
from ..ops import _main_grad
from .embedding import Embedding
from .linear import Linear


class AccumulateFp32:
    """What :func:`accumulate_fp32` returns; :meth:`remove` undoes it. Also a context manager that does so at its end."""

    def __init__(self, weights: list[torch.nn.Parameter], others: list[torch.nn.Parameter]):
        self._weights = weights
        self._wide = [*weights, *(p for p in others if p.dtype in HALF_DTYPES)]  # whose .grad is fp32

    def remove(self) -> None:
        """Drop every ``main_grad``. A ``.grad`` that is there stays, in its parameter's dtype. Again: nothing happens."""
        for weight in self._weights:
            entry = _main_grad.registered(weight)
            if entry is not None:
                entry.remove()
        for param in self._wide:
            _set_grad_dtype(param, param.dtype)
        self._weights, self._wide = [], []

    def __enter__(self) -> AccumulateFp32:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def accumulate_fp32(model: torch.nn.Module) -> AccumulateFp32:
    """Give every weight of ``model`` that this package multiplies by an fp32 ``main_grad`` for its gradient.

    Backward then adds a weight's gradient to ``main_grad`` inside the GEMM, in fp32, instead of storing it and having
    autograd add it to ``.grad`` by another kernel in the dtype of the weight. With 16-bit parameters that is the
    difference between sums over micro-batches that stand still and sums that are those of fp32; with fp32 parameters it
    saves the traffic of the addition, 12 bytes an element and micro-batch.

    ``.grad`` remains what it is: the same memory as ``main_grad`` once a backward in 16 bits or under autocast has run; fp32
    products are torch's own, which write ``.grad`` alone. Optimizers, scalers, clipping,
    ``zero_grad`` in both its forms, post-accumulate hooks and DistributedDataParallel work unchanged. After
    ``zero_grad(set_to_none=True)``, or ``.grad = None``, the first micro-batch overwrites ``main_grad`` without reading it.
    ``main_grad`` is kept, so gradients keep their addresses over the steps.

    Weights are those of :class:`amp_kernels.nn.Linear` modules, in an :class:`amp_kernels.nn.MLP` too, and of
    :class:`amp_kernels.nn.Embedding` modules, that require a gradient; they may also be used through
    :func:`amp_kernels.linear`, :func:`amp_kernels.mlp` and :func:`amp_kernels.embedding`. All other 16-bit parameters of the
    model, biases above all, get an fp32 ``.grad`` (``Tensor.grad_dtype``) that autograd accumulates into; biases of these
    modules get the fp32 sums themselves.

    What to know:

    - A tensor hook on a weight (``weight.register_hook``) expects each increment, so a weight with one is accumulated by
      autograd, in fp32 too. So are second derivatives, torch.autograd.grad, transposed uses and compiled code.
    - With 16-bit parameters the optimizer gets fp32 gradients. Those of this package take them; of torch's, most do not.
      DistributedDataParallel refuses them: :class:`amp_kernels.distributed.GradReducer` takes its place. With fp32
      parameters under autocast it has nothing to refuse.
    - ``fully_shard`` needs none of this: with ``MixedPrecisionPolicy(reduce_dtype=torch.float32)`` it adds up micro-batches
      and reduces them in fp32.
    - An exception inside a backward may leave a part of its gradients in ``.grad``; call ``zero_grad`` after it.
    - Copies of the model (copy.deepcopy) and parameters that were replaced (by fully_shard, say) have no ``main_grad``.

    Args:
        model: any module.

    Returns:
        A handle: ``handle.remove()`` undoes it; ``with accumulate_fp32(model): ...`` does so at the end of the block.

    Raises:
        TypeError: ``model`` is no module, or a weight is a tensor subclass such as DTensor. Nothing was changed.
        ValueError: a weight has a tensor hook or a ``main_grad`` already.

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
    for module in model.modules():
        weight = module.weight if _is_fused(module) else None
        if weight is None or not weight.is_leaf or not weight.requires_grad or weight.numel() == 0:
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
    handle = AccumulateFp32(list(weights.values()), others)
    for param in handle._wide:
        _set_grad_dtype(param, torch.float32)
    for weight in weights.values():
        weight.main_grad = _main_grad.buffer_for(weight)
        _main_grad.MainGrad(weight)
    return handle


def _is_fused(module: torch.nn.Module) -> bool:
    """Whether the gradient of the module's weight comes from a kernel of this package that can add it to an fp32 buffer."""
    return isinstance(module, Linear) or (isinstance(module, Embedding) and not module.sparse)


def _check(name: str, weight: torch.Tensor) -> None:
    if is_traceable_wrapper_subclass(weight):
        raise TypeError(
            f"accumulate_fp32: {name} is a {type(weight).__name__}; accepted: plain parameters (fully_shard adds "
            "micro-batches up and reduces them in fp32 by itself with MixedPrecisionPolicy(reduce_dtype=torch.float32))"
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

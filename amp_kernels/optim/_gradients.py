"""Gradients as the kernels take them: checked, and in their parameter's memory order."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._checks import lists
from .._sharding.local import is_dtensor, local, placed_as
from .._updates.state import GRADS
from ._options import Options

logger = logging.getLogger("amp_kernels")


class GradientReader:
    """Reads the gradients of one optimizer; warns once if it has to copy them."""

    def __init__(self, name: str, options: Options):
        self._name, self._options = name, options
        self._warned = False

    def read(self, param: Tensor, piece: Tensor) -> Tensor:
        """The gradient of a parameter as the kernels take it. ``piece`` is the parameter as they see it."""
        grad = param.grad
        if piece is not param:
            grad = self._local(param, grad)
        usual = type(grad) is Tensor and grad.dtype in GRADS and grad.layout is torch.strided
        return grad if usual and grad.stride() == piece.stride() else self._checked(piece, grad)

    def _local(self, param: Tensor, grad: Tensor) -> Tensor:
        """This rank's piece of the gradient of a DTensor, summed over ranks if that was left to do."""
        if not is_dtensor(grad):
            raise TypeError(f"{self._name}: the gradient of a DTensor is a {type(grad).__name__}; accepted: a DTensor")
        return local(placed_as(grad, param))

    def _checked(self, param: Tensor, grad: Tensor) -> Tensor:
        """Refuse a gradient or copy it into its parameter's memory order."""
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{self._name} does not support sparse gradients (layout {grad.layout}); "
                "use torch.optim.SparseAdam or torch.optim.SGD for these parameters"
            )
        if grad.dtype not in GRADS:
            raise TypeError(
                f"{self._name}: the gradient of a {param.dtype} parameter is {grad.dtype}; "
                f"accepted: {lists.names(GRADS)}"
            )
        if is_traceable_wrapper_subclass(grad):
            raise TypeError(f"{self._name}: a gradient is a {type(grad).__name__}; accepted: plain tensors")
        if self._options.zero_grads and torch._debug_has_internal_overlap(grad) == 1:
            raise ValueError(
                f"{self._name}: a gradient is {lists.describe(grad)}, which overlaps itself; zero_grads=True cannot "
                "write it"
            )
        if lists.same_order(param, grad):
            return grad
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s copies gradients whose strides differ from their parameter's, first %s for %s",
                self._name,
                lists.describe(grad),
                lists.describe(param),
            )
        return torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)

"""Hooks on tensors that come and go, for as long as a ``with`` block lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class TensorHooks:
    """Hooks that a run registers in every step and removes at its end, also from graphs that are still there then.

    Only the handles of graphs that live are kept: as many as twice those, and a few.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._most = 0  # handles; then the dead ones go
        # A leaf, such as a parameter that a module returns, outlives its graphs: tensor -> handles by key.
        self._leaves = WeakTensorKeyDictionary()

    def add(self, tensor: Tensor, key: tuple, hook: Callable[[Tensor], None]) -> None:
        """Call ``hook`` with the gradient of ``tensor``; of a leaf, in place of what was added under ``key`` before."""
        if len(self._handles) >= self._most:
            self._handles = [handle for handle in self._handles if _lives(handle)]
            self._most = 2 * len(self._handles) + 64
        handle = tensor.register_hook(hook)
        self._handles.append(handle)
        if tensor.is_leaf:
            of_leaf = self._leaves.setdefault(tensor, {})
            if key in of_leaf:
                of_leaf[key].remove()
            of_leaf[key] = handle

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leaves.clear()


def _lives(handle: Any) -> bool:
    hooks = handle.hooks_dict_ref()  # None when the graph is gone
    return hooks is not None and handle.id in hooks

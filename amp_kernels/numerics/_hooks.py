"""Hooks on temporary tensors, for the duration of a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class TensorHooks:
    """Hooks registered in every step and removed at the end, also from graphs that still exist then.

    The number of handles stays below about twice the number of those in live graphs.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._most = 0  # number of handles at which dead ones are dropped
        # A leaf, for example a parameter returned by a module, outlives its graphs: tensor -> handles by key.
        self._leaves = WeakTensorKeyDictionary()

    def add(self, tensor: Tensor, key: tuple, hook: Callable[[Tensor], None]) -> None:
        """Call ``hook`` with the gradient of ``tensor``. On a leaf, it replaces the previous hook with the same ``key``."""
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

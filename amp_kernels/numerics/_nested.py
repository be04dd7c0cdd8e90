"""The tensors in a module's inputs and outputs, with their positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path


def tensors_in(nested: Any, _around: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(position, tensor)``, for example ``("['b'][0]", ...)``. Enters torch's pytree nodes, dataclasses, and subclasses
    of dict, list and tuple, which pytree treats as leaves."""
    for path, leaf in tree_flatten_with_path(nested)[0]:
        place = keystr(path)
        if isinstance(leaf, Tensor):
            yield place, leaf
        elif id(leaf) not in _around:  # an object may contain itself
            for key, value in _entries(leaf):
                for inner, tensor in tensors_in(value, (*_around, id(leaf))):
                    yield f"{place}{key}{inner}", tensor


def _entries(leaf: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(leaf) and not isinstance(leaf, type):
        yield from ((f".{field.name}", getattr(leaf, field.name, None)) for field in fields(leaf))
    elif isinstance(leaf, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in leaf.items())
    elif isinstance(leaf, (list, tuple)):
        yield from ((f"[{i}]", value) for i, value in enumerate(leaf))

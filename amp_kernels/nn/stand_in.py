"""Tensors that report the functions they are passed to."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

Kind = TypeVar("Kind", bound="StandIn")


class StandIn(Tensor):
    """Stands for an ordinary tensor. A subclass sees the functions that get it, in its ``__torch_function__``."""

    @classmethod
    def of(cls: type[Kind], tensor: Tensor, **attributes: Any) -> Kind:
        found = tensor.as_subclass(cls)
        vars(found).update(attributes)
        return found

    @property
    def origin(self) -> Tensor:
        """As an ordinary tensor, the same at each call: behind this one in the graph, which may have hooks."""
        with torch._C.DisableTorchFunctionSubclass():
            setting = torch.is_grad_enabled(), self.requires_grad
            if vars(self).get("_setting") != setting:
                self._setting, self._origin = setting, self.as_subclass(Tensor)
            return self._origin


def plain(value: Any) -> Any:
    """``value`` with the ``origin`` of stand-ins, also inside tuples, lists and dictionaries; the latter two in place."""
    if isinstance(value, StandIn):
        return value.origin
    if type(value) is tuple:
        return tuple(map(plain, value))
    if isinstance(value, (list, dict)):
        for key, each in enumerate(value) if isinstance(value, list) else value.items():
            if isinstance(each, StandIn) or type(each) is tuple:
                value[key] = plain(each)
    return value

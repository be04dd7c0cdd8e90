"""A TorchDispatchMode that calls visitors around each op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class EveryOp(TorchDispatchMode):
    """Calls ``after(before(name, inputs), outputs)`` around each operation except views."""

    def __init__(self, before: Callable[[str, Any], Any], after: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._before, self._after = before, after

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        call = self._before(str(func), (args, kwargs) if kwargs else args)
        outputs = func(*args, **kwargs)
        self._after(call, outputs)
        return outputs

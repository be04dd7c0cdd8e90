"""Settings that a ``with`` block makes, where threads may be in blocks of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Block(Generic[T]):
    thread: dict[str, Any]  # the attributes that its thread sees in Setting._own
    value: T


class Setting(Generic[T]):
    """A thread has the value of its innermost open block. A thread without an open block has the value of the block that any thread
    entered last and that is still open.

    The second half is for autograd, which runs the backward of CUDA tensors in threads of its own, and for pools of threads.
    Blocks may end in any order.
    """

    #: The value of the open block that was entered last, ``None`` if none is open. Fast paths look at it.
    newest: T | None

    def __init__(self) -> None:
        self.newest = None
        self._own = threading.local()  # has a value in a thread that is in a block; torch.compile guards on it
        self._open: list[_Block[T]] = []  # in the order of entry
        self._changing = threading.RLock()  # a collected generator may leave a block while another is entered

    def here(self) -> T | None:
        """This thread's value; ``None`` if no block is open."""
        if self.newest is None:
            return None
        own = getattr(self._own, "value", None)
        return self.newest if own is None else own

    @contextlib.contextmanager
    def block(self, value: T) -> Iterator[None]:
        block = _Block(self._own.__dict__, value)
        with self._changing:
            self._open.append(block)
            self._settle(block.thread)
        try:
            yield
        finally:
            with self._changing:
                self._open.remove(block)
                self._settle(block.thread)

    def _settle(self, thread: dict[str, Any]) -> None:
        self.newest = self._open[-1].value if self._open else None
        thread["value"] = next((block.value for block in reversed(self._open) if block.thread is thread), None)

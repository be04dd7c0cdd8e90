"""Where optimizer state lives: flat buffers per block, views of them per parameter, and the 16-bit shadows of float32
weights.

A block's layout and what the update ops read of it: :mod:`amp_kernels.ops._blocks`.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._resolved import same

ALIGN = (
    16  # elements: every parameter's piece starts 16-byte aligned in a buffer of any dtype, 64-byte aligned in float32
)


def state_layout(numels: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of consecutive pieces in a flat buffer, multiples of :data:`ALIGN`, and the number of elements it
    needs."""
    offsets, total = [], 0
    for numel in numels:
        offsets.append(total)
        total += -(-numel // ALIGN) * ALIGN
    return offsets, total


def view_like(buffer: Tensor, param: Tensor, offset: int) -> Tensor:
    """The piece of a flat buffer that belongs to ``param``, with its shape and strides: both walk memory in the same
    order."""
    return buffer.as_strided(param.shape, param.stride(), offset)


@dataclass(eq=False)
class Block:
    """State of some parameters of one device, dtype and group. A buffer with 0 elements: the block has no such
    state."""

    group: dict[str, Any]
    params: list[Tensor]
    offsets: list[int]
    steps: Tensor
    moments: dict[str, Tensor]
    master: Tensor
    averaged: bool  # whether there are averages in `ema`
    ema: Tensor
    shadow: Tensor
    shadow_views: list[Tensor] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """All buffers that are there."""
        buffers = (self.steps, *self.moments.values(), self.master, self.ema, self.shadow)
        return [buffer for buffer in buffers if buffer.numel()]

    def refresh_shadows(self) -> None:
        for param, view in zip(self.params, self.shadow_views, strict=False):  # none, or one per param
            refresh_shadow(param, view)


def signature(param: Tensor) -> tuple:
    """What must not change as long as a parameter's state stays where it is."""
    return param.dtype, param.device, param.shape, param.stride()


@dataclass(eq=False)
class Place:
    """Where one parameter's state is."""

    param: Tensor
    block: Block
    slot: int
    state: dict[str, Tensor] | None  # what ``optimizer.state[param]`` is, if anything is shown there
    signature: tuple

    @property
    def offset(self) -> int:
        return self.block.offsets[self.slot]


class _Shadow:
    """A parameter's 16-bit copy and what the parameter was when it was taken. Owns neither of the two."""

    __slots__ = ("address", "param", "version", "view")

    def __init__(self, param: Tensor, view: Tensor, forget: Callable):
        self.param = weakref.ref(param, forget)
        self.view = weakref.ref(view)
        self.stamp(param)

    def stamp(self, param: Tensor) -> None:
        self.version, self.address = param._version, param.data_ptr()

    def fresh(self, param: Tensor) -> bool:
        return self.version == param._version and self.address == param.data_ptr()


_version = operator.attrgetter("_version")
_version_then, _address_then = operator.attrgetter("version"), operator.attrgetter("address")
_shadows: dict[int, _Shadow] = {}  # by id(param); a dead parameter's entry is removed by its weak reference
_CHECK = os.environ.get("AMP_KERNELS_CHECK_SHADOWS") == "1"


def register_shadow(param: Tensor, view: Tensor) -> None:
    """Declare ``view`` an up-to-date copy of ``param``. The optimizer keeps it alive; it dies with the optimizer."""
    key = id(param)
    entry = _shadows.get(key)
    if entry is not None and entry.view() is view and entry.param() is param:
        entry.stamp(param)
    else:
        _shadows[key] = _Shadow(param, view, lambda _: _shadows.pop(key, None))


def refresh_shadow(param: Tensor, view: Tensor) -> None:
    """Copy ``param`` into its shadow, rounded to nearest even, and declare it up to date."""
    with torch.no_grad():
        view.copy_(param)
    register_shadow(param, view)


def renew_shadow(param: Tensor, view: Tensor) -> None:
    """Copy only if the shadow is out of date. Done before each step, because a step that is skipped writes no
    shadow."""
    entry = _shadows.get(id(param))
    if entry is None or entry.view() is not view or not entry.fresh(param):
        refresh_shadow(param, view)


class ShadowList:
    """Parameters with shadows that are stepped together. What :func:`renew_shadow` and :func:`register_shadow` do for
    one, with the usual case at the speed of C."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]):
        self.pairs = pairs
        self.params = [param for param, _ in pairs]
        self.keys = list(map(id, self.params))
        self.entries: list[_Shadow] = []

    def renew(self) -> None:
        """Before a step."""
        entries = list(map(_shadows.get, self.keys))
        if (
            same(entries, self.entries)
            and list(map(_version, self.params)) == list(map(_version_then, entries))
            and list(map(Tensor.data_ptr, self.params)) == list(map(_address_then, entries))
        ):
            return
        for param, view in self.pairs:
            renew_shadow(param, view)
        self.entries = list(map(_shadows.get, self.keys))

    def stamp(self) -> None:
        """After a step, which has written weights and shadows."""
        for entry, version in zip(self.entries, map(_version, self.params), strict=True):
            entry.version = version


def fresh_shadow(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The up-to-date 16-bit copy of ``weight`` in ``dtype`` that an optimizer keeps, or ``None``.

    Up to date means that the version counter and the address of ``weight`` are those seen when the copy was written.
    Writes through ``.data`` change neither and need :func:`amp_kernels.optim.refresh_shadows`. ``None`` while
    torch.compile traces. ``AMP_KERNELS_CHECK_SHADOWS=1``, set before the import, compares the values at each use and
    raises if they differ (slow).
    """
    if torch.compiler.is_compiling():
        return None
    entry = _shadows.get(id(weight))
    if entry is None or entry.param() is not weight:
        return None
    view = entry.view()
    if view is None or view.dtype is not dtype or not entry.fresh(weight):
        return None
    if _CHECK and not torch.equal(view, weight.detach().to(dtype)):
        raise RuntimeError(
            f"the {dtype} shadow of a weight of shape {list(weight.shape)} is out of date: the weight was written "
            "through .data or by compiled or captured code; call amp_kernels.optim.refresh_shadows(model) after that"
        )
    return view


def refresh_shadows(model: torch.nn.Module) -> None:
    """Bring the 16-bit shadows of a model's parameters up to date after writes that version counters do not see.

    That is: writes through ``.data``, and by compiled or captured code. Parameters without a shadow are passed over.
    """
    for param in model.parameters():
        entry = _shadows.get(id(param))
        view = entry.view() if entry is not None and entry.param() is param else None
        if view is not None:
            refresh_shadow(param, view)

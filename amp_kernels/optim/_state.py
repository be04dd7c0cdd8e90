"""Where optimizer state lives: flat buffers per block, and views of them per parameter.

A block's layout and what the update ops read of it: :mod:`amp_kernels._updates.state`.
"""

from __future__ import annotations

import functools
import weakref
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._dispatch.walks import note_versions, same_versions
from .._dispatch.walks import versions as versions_of
from .._raw._split_master import join_master, split_master
from .._sharding.local import is_dtensor, like, local, local_value
from .._updates.state import view_like
from ..ops._shadows import ShadowList, refresh_shadow
from ._hyper_parameters import HyperParameters


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


class ShownState(dict):
    """What ``optimizer.state[param]`` is: views of the buffers. A value that a user puts in the place of one is written into
    the buffer, and must fit it. Other entries are the user's own."""

    def __init__(self, views: dict[str, Tensor]):
        super().__init__(views)
        self.views = frozenset(views)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self or name not in self.views:
            super().__setitem__(name, value)
            return
        view = self[name]
        if isinstance(value, Tensor) and value.shape != view.shape:
            raise ValueError(f"optimizer.state: {name} has shape {list(value.shape)}; accepted: {list(view.shape)}")
        with torch.no_grad():
            view.copy_(torch.as_tensor(value))

    def update(self, *arguments: Any, **values: Any) -> None:
        for name, value in dict(*arguments, **values).items():
            self[name] = value

    def __ior__(self, values: Any) -> ShownState:
        self.update(values)
        return self

    def __delitem__(self, name: str) -> None:
        self._check_removable(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        self._check_removable(name)
        return super().pop(name, *default)

    def _check_removable(self, name: str) -> None:
        if name in self.views:
            raise TypeError(
                f"optimizer.state: {name} cannot be removed alone; accepted: del optimizer.state[param], which starts all of "
                "its state anew"
            )

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy shows nothing


class SplitState(ShownState):
    """The shown state of a parameter with a split master: ``items()`` has the ``remainder`` that is held.

    Iteration yields the names of a state_dict, with ``master`` in its place, because torch's set_optimizer_state_dict looks
    them up in the flattened form. ``self["master"]`` is a float32 copy; assigning to it writes parameter and remainder.
    """

    _place: weakref.ref[Place] | None = None  # set by the place, which holds this; a strong one would be a cycle

    @property
    def place(self) -> Place | None:
        """None in a mapping that another library has rebuilt with tensors of its own, and after the place was forgotten."""
        return None if self._place is None else self._place()

    def __iter__(self) -> Iterator[str]:
        held = super().__iter__()
        return held if self.place is None else iter(["master" if name == "remainder" else name for name in held])

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name == "master" and self.place is not None)

    get = Mapping.get  # dict.get does not call __missing__

    def __missing__(self, name: str) -> Tensor:
        place = self.place
        if name != "master" or place is None:
            raise KeyError(name)
        piece = place.piece.detach()
        if place.converted:
            return like(piece.float(), place.param)
        place.adopt_write()
        return like(join_master(piece, local(self["remainder"])), place.param)

    def __setitem__(self, name: str, value: Any) -> None:
        place = self.place
        if name != "master" or place is None or place.converted:
            super().__setitem__(name, value)
            return
        piece, remainder = place.piece, local(self["remainder"])
        with torch.no_grad():
            value = local_value(torch.as_tensor(value), place.param)
            if value.shape != piece.shape:
                raise ValueError(
                    f"optimizer.state: master has shape {list(value.shape)}; accepted: {list(piece.shape)}"
                )
            weight, rest = split_master(value.to(piece.device, torch.float32), piece.dtype)
            piece.copy_(weight)
            remainder.copy_(rest)
        place.look()


def signature(param: Tensor) -> tuple:
    """What must not change as long as a parameter's state stays where it is."""
    own = param.dtype, param.device, param.shape, param.stride()
    if not is_dtensor(param):
        return own
    piece = local(param)
    return *own, param.placements, piece.shape, piece.stride()


@dataclass(eq=False)
class Place:
    """Where one parameter's state is."""

    param: Tensor
    block: Block
    slot: int
    state: dict[str, Tensor] | None  # what ``optimizer.state[param]`` is, if anything is shown there
    signature: tuple
    address: int = 0
    versions: array = field(default_factory=lambda: array("q"))  # those of `watched` begin at `index`
    index: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.state, SplitState):
            self.state._place = weakref.ref(self)
        self.look()

    @property
    def offset(self) -> int:
        return self.block.offsets[self.slot]

    @property
    def piece(self) -> Tensor:
        """What the kernels see: the parameter, or what this rank holds of it."""
        return local(self.param)

    @property
    def converted(self) -> bool:
        """True once the parameter has another dtype: a remainder then belongs to no weight."""
        return self.param.dtype != self.signature[0]

    @property
    def watched(self) -> list[Tensor]:
        """The tensors whose version counters show a write to the parameter: a DTensor has one of its own."""
        return [self.param] if not is_dtensor(self.param) else [self.param, self.piece]

    @property
    def tells_writes(self) -> bool:
        """Whether there is a master that could miss a write to the parameter, and a counter that shows the write."""
        return self.block.master.numel() > 0 and not self.param.is_inference()

    def view(self, buffer: Tensor) -> Tensor:
        """This parameter's part of a buffer of its block."""
        return view_like(buffer, self.piece, self.offset)

    def look(self) -> None:
        """Take the parameter as it is for what the last step, or a load, has left."""
        self.address = self.piece.data_ptr()
        if self.tells_writes:
            versions = versions_of(self.watched)
            self.versions[self.index : self.index + len(versions)] = versions

    def adopt_write(self) -> None:
        """If the parameter was written since, bring its master in line. Elements that still are their master, rounded,
        keep the bits that they lack.

        The remainder of a split master does not tell which ones these are: it stays at every element. Where that would
        make another number of a written one, at 0 (a mask would leave what is below the smallest weight) and at infinity
        (it would be finite, or NaN), it is cleared. Elsewhere it moves what was written by half a unit in the last place at most.
        """
        if self.tells_writes:
            versions = versions_of(self.watched)
            known = self.versions[self.index : self.index + len(versions)]
            if known != versions or self.address != self.piece.data_ptr():
                piece, master = self.piece.detach(), self.view(self.block.master)
                if master.dtype == torch.float32:
                    master.copy_(torch.where(master.to(piece.dtype) == piece, master, piece.float()))
                else:
                    master.masked_fill_((piece == 0) | piece.isinf(), 0)
        self.look()


class WrittenParams:
    """Parameters with masters that are stepped together. Usually nobody but the step has written them."""

    def __init__(self, places: list[Place]):
        self.places = [place for place in places if place.tells_writes]
        self.watched: list[Tensor] = []
        self.versions = array("q")
        for place in self.places:
            known, index = place.versions[place.index : place.index + len(place.watched)], len(self.versions)
            self.watched += place.watched
            self.versions += known
            place.versions, place.index = self.versions, index  # last: an interrupt leaves it with what it had

    def adopt(self) -> None:
        """Before a step: what others wrote since the last one goes into the masters."""
        if not same_versions(self.watched, self.versions):
            for place in self.places:
                place.adopt_write()

    def stamp(self) -> None:
        """After a step, which has written parameters and masters."""
        note_versions(self.watched, self.versions)


@dataclass
class DeviceBatch:
    """The parameters of one device that take part in a step, as the update op wants them."""

    device: torch.device
    params: list[Tensor]
    pieces: list[Tensor]  # of the params, what the kernels see: themselves, or what this rank holds
    counted: int  # so many of them, the first, count here in norms; the rest on other ranks
    numbers: list[int]  # of the params in the optimizer
    blocks: list[Block]
    groups: list[int]  # of each block
    layout: Tensor
    nothing: Tensor  # in the place of a buffer that is not there, or not to be used
    shadows: ShadowList  # of those params that have one
    written: WrittenParams  # those that have a master
    sharded: list[Tensor]  # those that are DTensors
    hyper: HyperParameters | None = None  # what `state` was made for
    state: tuple[list[Tensor], ...] = ()  # the op's arguments from the moments to `emas`

    @functools.cached_property
    def rows(self) -> Tensor:
        """``numbers`` on the device."""
        return torch.tensor(self.numbers, device=self.device)

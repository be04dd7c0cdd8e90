"""Optimizer state: flat buffers per block, and each parameter's views of them.

:mod:`amp_kernels._updates.state` describes the layout of a block and how the update ops read it.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import walks
from .._raw._block8 import Code8
from .._raw._split_master import SPLITS, join_master
from .._sharding.local import is_dtensor, like, local, local_value
from .._updates.state import view_like
from ..ops._shadows import refresh_shadow
from ._moments8 import CODE, SCALE, moment_of, read_coded, write_coded


@dataclass(eq=False)
class Block:
    """The state of some parameters of one device, dtype and group. A buffer with 0 elements stands for state that the block
    does not have."""

    group: dict[str, Any]
    params: list[Tensor]
    offsets: list[int]
    draws: bool  # whether a step draws random bits
    steps: Tensor
    moments: dict[str, Tensor]
    formats: dict[str, Code8]  # of moments in 8 bits
    master: Tensor
    averaged: bool  # whether there are averages in `ema`
    ema: Tensor
    shadow: Tensor
    shadow_views: list[Tensor] = field(default_factory=list)
    weights: Tensor | None = (
        None  # copies of the parameters, beside state that is in host memory while they are elsewhere
    )

    def tensors(self) -> list[Tensor]:
        """All buffers that the block has."""
        buffers = (self.steps, *self.moments.values(), self.master, self.ema, self.shadow, self.weights)
        return [buffer for buffer in buffers if buffer is not None and buffer.numel()]

    def refresh_shadows(self) -> None:
        for param, view in zip(self.params, self.shadow_views, strict=False):  # none, or one per param
            refresh_shadow(param, view)


class ShownState(dict):
    """The value of ``optimizer.state[param]``: views of the buffers. A value that a user assigns to a view is copied into the
    buffer and must have its shape and device. Other entries are the user's own."""

    def __init__(self, views: dict[str, Tensor]):
        super().__init__(views)
        self.views = frozenset(views)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self or name not in self.views:
            super().__setitem__(name, value)
            return
        view = self[name]
        refuse_other_device(name, value, view)
        if isinstance(value, Tensor) and value.shape != view.shape:
            raise ValueError(f"optimizer.state: {name} has shape {list(value.shape)}; accepted: {list(view.shape)}")
        with torch.no_grad():
            view.copy_(torch.as_tensor(value))

    def update(self, *arguments: Any, **values: Any) -> None:
        values = dict(*arguments, **values)
        for name, value in values.items():
            if name in self and isinstance(self[name], Tensor):
                refuse_other_device(name, value, self[name])
        for name, value in values.items():
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
        return dict, (dict(self),)  # a copy is no view


class PackedState(ShownState):
    """The shown state of a parameter with a split master or moments in 8 bits. ``items()`` has what is stored: ``remainder``, or
    ``exp_avg_code`` and ``exp_avg_scale``.

    Iteration yields ``master`` and ``exp_avg`` instead, as a state_dict does, because torch's set_optimizer_state_dict looks these
    names up in the flattened form. Values under these names are float32 copies; assigning to one writes what is stored, and
    with a master the parameter.
    """

    _place: weakref.ref[Place] | None = None

    def belongs_to(self, place: Place) -> None:
        """Tell where the views are. The reference is weak because the place holds this mapping."""
        self._place = weakref.ref(place)

    @property
    def place(self) -> Place | None:
        """None in a mapping that another library rebuilt from tensors of its own, and after the store dropped the place."""
        return None if self._place is None else self._place()

    def __iter__(self) -> Iterator[str]:
        held = super().__iter__()
        return held if self.place is None else iter(dict.fromkeys(map(unpacked_name, held)))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (self.place is not None and self._unpacks(name))

    def _unpacks(self, name: object) -> bool:
        return "remainder" in self.views if name == "master" else f"{name}{CODE}" in self.views

    get = Mapping.get  # dict.get does not call __missing__

    def __missing__(self, name: str) -> Tensor:
        place = self.place
        if place is None or not self._unpacks(name):
            raise KeyError(name)
        if name != "master":
            return read_coded(self[name + CODE], self[name + SCALE], place.block.formats[name])
        piece = place.beside
        if place.converted:
            return like(piece.float(), place.param)
        place.adopt_write()
        return like(join_master(piece, local(self["remainder"])), place.param)

    def __setitem__(self, name: str, value: Any) -> None:
        place = self.place
        if place is None or not self._unpacks(name) or (name == "master" and place.converted):
            super().__setitem__(name, value)
            return
        piece = place.piece
        refuse_other_device(name, value, piece)
        with torch.no_grad():
            value = local_value(torch.as_tensor(value), place.param)
            if value.shape != piece.shape:
                raise ValueError(
                    f"optimizer.state: {name} has shape {list(value.shape)}; accepted: {list(piece.shape)}"
                )
            if name != "master":
                write_coded(self[name + CODE], self[name + SCALE], value, place.block.formats[name])
                return
            remainder = local(self["remainder"])
            weight, rest = SPLITS[remainder.dtype](value.to(piece.device, torch.float32), piece.dtype)
            piece.copy_(weight)
            place.own.copy_(weight)
            remainder.copy_(rest)
        place.mark_clean()


def refuse_other_device(name: str, value: Any, held: Tensor) -> None:
    """Raise for a tensor that was moved, to free the memory of what is held: that is part of a flat buffer. A CPU scalar is a number."""
    is_number = not isinstance(value, Tensor) or (value.dim() == 0 and value.device.type == "cpu")
    if not is_number and value.device != held.device:
        raise ValueError(
            f"optimizer.state: {name} is on {value.device}; accepted: a tensor on {held.device} (all state shares flat buffers, so "
            "that a tensor moved alone frees none; to move all of it, keep optimizer.state_dict() with its tensors copied, delete the "
            "optimizer, and load them into a new one)"
        )


def unpacked_name(name: str) -> str:
    """The name in a state_dict of what is stored under ``name``."""
    return "master" if name == "remainder" else moment_of(name) or name


def checksum(tensor: Tensor) -> Tensor:
    """The sum of the elements' bits as integers, on the device."""
    return tensor.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).sum()


class Unloaded(NamedTuple):
    """The master and the average (``names``) that a loaded state did not bring, and the checksum of the weight they belong to."""

    names: frozenset[str]
    weight: Tensor


def signature(param: Tensor) -> tuple:
    """The properties of a parameter that its state depends on: a change of one needs new state."""
    own = param.dtype, param.device, param.shape, param.stride()
    if not is_dtensor(param):
        return own
    piece = local(param)
    return *own, param.placements, piece.shape, piece.stride()


@dataclass(eq=False)
class Place:
    """The location of one parameter's state, and the version of the parameter that the state belongs to."""

    param: Tensor
    block: Block
    slot: int
    state: dict[str, Tensor] | None  # the value of ``optimizer.state[param]``, if it shows anything
    signature: tuple
    address: int = 0
    versions: array = field(default_factory=lambda: array("q"))  # those of `watched` begin at `index`
    index: int = 0
    unloaded: Unloaded | None = None  # from a load to the next step
    twin: Tensor | None = None  # the copy in host memory that the kernels see

    def __post_init__(self) -> None:
        if isinstance(self.state, PackedState):
            self.state.belongs_to(self)
        self.mark_clean()

    @property
    def offset(self) -> int:
        return self.block.offsets[self.slot]

    @property
    def own(self) -> Tensor:
        """The parameter: of a DTensor this rank's piece."""
        return local(self.param)

    @property
    def piece(self) -> Tensor:
        """The same as the kernels see it."""
        return self.own if self.twin is None else self.twin

    @property
    def beside(self) -> Tensor:
        """The same without gradient, on the device of the state."""
        return self.piece.detach().to(self.block.steps.device)

    @property
    def converted(self) -> bool:
        """True once the parameter has another dtype, to which a remainder does not fit."""
        return self.param.dtype != self.signature[0]

    def serves(self, state: dict) -> bool:
        """True if a step can take the parameter as it is, with the state that ``optimizer.state`` shows."""
        unchanged = self.state is state.get(self.param) and self.signature == signature(self.param)
        return unchanged and self.unloaded is None and self.address == self.piece.data_ptr()

    @property
    def watched(self) -> list[Tensor]:
        """The tensors whose version counters show a write to the parameter: a DTensor has its own and its piece's."""
        return [self.param] if not is_dtensor(self.param) else [self.param, self.own]

    @property
    def needs_adoption(self) -> bool:
        """True for a parameter with a master or a twin, which can miss a write to it, and a version counter, which shows the write."""
        return (self.block.master.numel() > 0 or self.twin is not None) and not self.param.is_inference()

    @property
    def was_written(self) -> bool:
        """True if the parameter was written since it was marked clean, where that counts and is seen."""
        if not self.needs_adoption:
            return False
        versions = walks.versions(self.watched)
        known = self.versions[self.index : self.index + len(versions)]
        return known != versions or self.address != self.own.data_ptr()

    def view(self, buffer: Tensor) -> Tensor:
        """This parameter's part of a buffer of its block."""
        return view_like(buffer, self.piece, self.offset)

    def mark_clean(self) -> None:
        """Record the current version of the parameter as the one that its master agrees with."""
        self.address = self.own.data_ptr()
        if self.needs_adoption:
            versions = walks.versions(self.watched)
            self.versions[self.index : self.index + len(versions)] = versions

    def adopt_write(self) -> None:
        """Update the master if the parameter was written since it was marked clean. An element that still equals its rounded
        master keeps the master.

        A remainder cannot tell which elements were overwritten, so it stays at every element. It is cleared where it would change a
        written number: at 0 (a mask would leave what is below the smallest weight) and at infinity (the master would be finite,
        or NaN). Elsewhere it moves a written weight by at most half a unit in the last place.

        Until the next step, a master and an average that no load has brought also follow a weight that changed without a version.
        """
        followers, piece = self._followers(), self.beside
        written = "master" in followers or self.was_written
        if self.twin is not None and (written or followers):
            self.twin.copy_(self.own)
        if written and self.block.master.numel():
            master = self.view(self.block.master)
            if master.dtype == torch.float32:
                master.copy_(torch.where(master.to(piece.dtype) == piece, master, piece.float()))
            else:
                master.masked_fill_((piece == 0) | piece.isinf(), 0)
        if "ema" in followers:
            self.view(self.block.ema).copy_(self._weight())
        self.mark_clean()

    def _weight(self) -> Tensor:
        """The master, however it is kept, or the parameter."""
        piece, master = self.beside, self.block.master
        if not master.numel() or (self.converted and master.dtype != torch.float32):
            return piece
        master = self.view(master)
        return master if master.dtype == torch.float32 else join_master(piece, master)

    def _followers(self) -> frozenset[str]:
        """The state that was not loaded, if the weight is no longer the one that it belongs to."""
        if self.unloaded is None:
            return frozenset()
        weight = checksum(self.own)
        if weight == self.unloaded.weight:
            return frozenset()
        names, self.unloaded = self.unloaded.names, self.unloaded._replace(weight=weight)
        return names

    def settle(self) -> None:
        """Before a step after a load or a move of the parameter: adopt what was written, the last time for state that was not
        loaded."""
        self.adopt_write()
        self.unloaded = None


class WrittenParams:
    """The parameters with masters of one launch. One comparison of all version counters serves the usual case that only the
    step has written them."""

    def __init__(self, places: list[Place]):
        self.places = [place for place in places if place.needs_adoption]
        self.watched: list[Tensor] = []
        self.versions = array("q")
        for place in self.places:
            known, index = place.versions[place.index : place.index + len(place.watched)], len(self.versions)
            self.watched += place.watched
            self.versions += known
            place.versions, place.index = self.versions, index  # last: an interrupt leaves the old pair

    def adopt(self) -> None:
        """Before a step: update the masters of parameters that others wrote."""
        if not walks.same_versions(self.watched, self.versions):
            for place in self.places:
                place.adopt_write()

    def stamp(self) -> None:
        """After a step, which has written parameters and masters: record the new versions."""
        walks.note_versions(self.watched, self.versions)

"""The owner of an optimizer's state: creates blocks, fills them, shows views of them and keeps masters up to date."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import lists
from .._checks.lists import HALF_DTYPES
from .._checks.types import type_name
from .._dispatch.devices import restorer
from .._raw._split_master import SPLITS, join_master
from .._sharding.local import in_own_storage, is_dtensor, like, local, local_value
from .._updates.state import buffer_numel, exponents_at, state_layout, view_like
from ..ops._shadows import forget_shadows
from ._algorithm import Algorithm
from ._moments8 import (
    CODE,
    SCALE,
    check_exponents,
    coded_views,
    decoded,
    moment_dtype,
    moment_of,
    scale_shape,
    write_coded,
)
from ._options import MASTERS, Options, state_dtype_of
from ._state import Block, PackedState, Place, ShownState, Unloaded, checksum, signature, unpacked_name

logger = logging.getLogger("amp_kernels")

#: A group, one of its parameters, and the state that the parameter starts with; an empty state starts at zero.
Entry = tuple[dict[str, Any], Tensor, dict[str, Any]]
#: State that follows the weight where a checkpoint does not have it.
_FOLLOWERS = frozenset(("master", "remainder", "ema"))
#: Makes the float32 master of a parameter and its remainder.
Join = Callable[[Tensor, Tensor], Any]


class Packed(NamedTuple):
    """Filled blocks that the store does not own yet."""

    places: list[Place]
    overwrite: list[tuple[Tensor, Tensor]]  # parameters that must take a weight to agree with a loaded split master


class StateStore:
    """The state of one optimizer, in blocks.

    ``optimizer.state[param]`` shows views of the flat buffers under torch's names; :attr:`places` knows where they are. A
    user may change a view in place, or replace or clear ``optimizer.state[param]``: the next step notices and adopts the
    shown state. The mapping ``optimizer.state`` is an argument of the methods that need it, because a user may replace it too.
    """

    def __init__(self, name: str, algorithm: Algorithm, options: Options):
        self._name, self._algorithm, self._options = name, algorithm, options
        self.places: dict[int, Place] = {}  # by id(param): hashing a tensor is slow, and a place keeps its parameter
        self.blocks: set[Block] = set()
        self.version = 0  # changes with the places
        #: Checksums of weights and of what follows them, by parameter, at the first and the last state_dict since a step.
        self.marks: list[dict[int, dict[str, Tensor]]] = []
        self.complete: Callable[[], None] = lambda: None  # waits for updates that are under way
        self._homes: dict[Block, torch.device] = {}  # of blocks that are in host memory for now

    def clear(self) -> None:
        self.version += 1
        self.places, self.blocks, self._homes = {}, set(), {}

    def undo(self, packed: Packed) -> Callable[[], None]:
        """A function that brings back what is there now, after :meth:`clear` and a :meth:`commit` that did not come to its end."""
        places, blocks, homes = self.places, self.blocks, self._homes
        weights = [(param, param.clone()) for param, _ in packed.overwrite]

        @torch.no_grad()
        def restore() -> None:
            self.version += 1
            self.places, self.blocks, self._homes = places, blocks, homes
            for param, weight in weights:
                param.copy_(weight)
            for block in blocks:
                block.refresh_shadows()

        return restore

    # ---- creation ----

    @torch.no_grad()
    def pack(self, entries: Iterable[Entry], *, load: bool = False) -> Packed:
        """Build blocks for the entries and fill them, changing nothing that exists. In a ``load`` masters and averages that it does
        not bring follow their parameters until the next step."""
        sets: dict[tuple, tuple[dict, list[tuple[Tensor, Tensor, dict]]]] = {}
        for group, param, values in entries:
            piece = local(param)
            if not lists.is_dense(piece):
                raise ValueError(
                    f"{self._name}: a parameter is {lists.describe(piece)}, which leaves gaps in memory or overlaps "
                    "itself; accepted: any order of dimensions that covers its memory once"
                )
            dtype = moment_dtype(param.shape, state_dtype_of(group, self._options))
            named = {unpacked_name(name): value for name, value in values.items()}  # codes count as their moment
            key = id(group), piece.device, piece.dtype, dtype, *self._wanted(group, named)
            check_exponents(self._name, values, self._algorithm.format_of)
            if is_dtensor(param):  # exponents do not have its shape
                values = self._decoded(values)
            values = {name: local_value(value, param) for name, value in values.items()}
            sets.setdefault(key, (group, []))[1].append((param, piece, values))
        packed = Packed([], [])
        for (_, _, _, dtype, moments, averaged), (group, members) in sets.items():
            block = self._new_block(group, members, moments, dtype, averaged)
            for slot, (param, piece, values) in enumerate(members):
                views, twin = self._views(block, slot, piece), None
                if block.weights is not None:
                    twin = view_like(block.weights, piece, block.offsets[slot]).copy_(piece)
                seen = piece if twin is None else twin
                weight = self._fill(self._algorithm.of(group), seen, views, block.steps[slot], values)
                unloaded = self._unloaded(param, views, values, weight) if load else None
                if weight is not None and (unloaded is None or "master" not in unloaded.names):
                    packed.overwrite.append((piece, weight))
                    seen.copy_(weight) if twin is not None else None
                shown = {name: self._placed(name, view, param) for name, view in views.items()}
                packs = any(unpacked_name(name) != name for name in shown)
                state = PackedState(shown) if packs else ShownState(shown) if shown else None
                packed.places.append(Place(param, block, slot, state, signature(param), unloaded=unloaded, twin=twin))
        return packed

    def _unloaded(self, param: Tensor, views: dict, values: dict, weight: Tensor | None) -> Unloaded | None:
        """The master and the average that loaded ``values`` lack, or have with the bits that state_dict handed out: torch's distributed
        checkpoint loads into those tensors, and leaves what a checkpoint lacks. ``weight``: a split master, rounded."""
        names = {name for name in map(unpacked_name, _FOLLOWERS & views.keys()) if values.get(name) is None}
        place = self.places.get(id(param))
        for mark in self.marks if place is not None else ():
            known, found, live = mark.get(id(param), {}), _checksums(views), _checksums(place.state or {})
            same = {
                name for name in found.keys() & known.keys() if found[name] == known[name] == live.get(name)
            } - names
            if weight is not None and same and checksum(weight) != known["weight"]:
                same.discard("master")
            if same:
                return Unloaded(frozenset(names | same), known["weight"])
        return Unloaded(frozenset(names), checksum(local(param))) if names else None

    def note_exported(self) -> None:
        """Record the checksums of a state_dict, for :meth:`_unloaded`."""
        found = {key: _checksums(place.state or {}) for key, place in self.places.items()}
        mark = {key: {**sums, "weight": checksum(self.places[key].own)} for key, sums in found.items() if sums}
        self.marks = [*self.marks[:1], mark]

    @torch.no_grad()
    def commit(self, packed: Packed, state: dict) -> None:
        """Take over the blocks and show them in ``state``, the mapping ``optimizer.state``."""
        for param, weight in packed.overwrite:
            param.copy_(weight)
        self.version += 1
        blocks = {place.block for place in packed.places}
        replaces = any(id(place.param) in self.places for place in packed.places)
        self.blocks |= blocks
        for place in packed.places:
            place.mark_clean()  # a load's own write is no write of others
            # In this order: after an interrupt in between the next step adopts the shown state.
            if place.state is not None:
                state[place.param] = place.state
            self.places[id(place.param)] = place
        for block in blocks:
            block.refresh_shadows()
        if replaces:
            self.blocks = {place.block for place in self.places.values()}

    def outgrow(self) -> None:
        """Drop the places of parameters whose group now asks for state that their block does not have (momentum, AMSGrad
        or the average was switched on). The next step creates them again, with the values they hold."""
        for block in self.blocks:
            moments, averaged = self._wanted(block.group, {})
            if not block.moments.keys() >= set(moments) or averaged > block.averaged:
                self.version += 1
                for param in block.params:
                    place = self.places.get(id(param))
                    if place is not None and place.block is block:
                        del self.places[id(param)]

    def _wanted(self, group: dict, loaded: dict) -> tuple[tuple[str, ...], bool]:
        """The moments of a parameter of ``group``, and whether its weight is averaged."""
        averaged = group.get("ema_decay") is not None or loaded.get("ema") is not None
        return self._algorithm.of(group).moments(group, loaded), averaged

    def _decoded(self, values: dict) -> dict:
        return decoded(self._name, values, self._algorithm.format_of)

    def _has_master(self, dtype: torch.dtype) -> bool:
        return dtype in HALF_DTYPES and self._options.master_weights in MASTERS

    def _new_block(
        self, group: dict, members: list[tuple], moments: tuple[str, ...], dtype: torch.dtype, averaged: bool
    ) -> Block:
        options, (_, piece, _) = self._options, members[0]
        params, pieces = [param for param, _, _ in members], [piece for _, piece, _ in members]
        offsets, total = state_layout([piece.numel() for piece in pieces])
        has_master = self._has_master(piece.dtype)
        has_shadow = piece.dtype == torch.float32 and options.shadow_dtype is not None
        device = torch.device(options.state_device or piece.device)

        def buffer(numel: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        rounds_weight = piece.dtype in HALF_DTYPES and options.master_weights in ("none", "split24")
        block = Block(
            group,
            params,
            offsets,
            draws=rounds_weight or (dtype == torch.uint8 and len(moments) > 0),
            steps=buffer(len(params), torch.float32),
            moments={name: buffer(buffer_numel(total, dtype), dtype) for name in moments},
            formats={name: self._algorithm.format_of(name) for name in moments if dtype == torch.uint8},
            master=buffer(total if has_master else 0, MASTERS.get(options.master_weights, torch.float32)),
            averaged=averaged,
            ema=buffer(total if averaged else 0, torch.float32),
            shadow=torch.zeros(total * has_shadow, dtype=options.shadow_dtype or torch.float16, device=piece.device),
            weights=None if options.state_device is None else buffer(total, piece.dtype),
        )
        for name, format in block.formats.items():
            exponents_at(block.moments[name], 0, total).fill_(format.least)
        if state_dtype_of(group, options) == "8bit" and moments and dtype != torch.uint8:
            shapes = lists.some([str(list(param.shape)) for param in params])
            logger.debug("%s: moments in bfloat16 instead of 8 bits, by shape: %s", self._name, shapes)
        if has_shadow:
            block.shadow_views = [view_like(block.shadow, p, o) for p, o in zip(params, offsets, strict=True)]
        return block

    def _views(self, block: Block, slot: int, piece: Tensor) -> dict[str, Tensor]:
        """The state of one parameter under the names of a checkpoint, ``remainder`` for a split master."""
        # The step is part of the key of the random bits, so a checkpoint must have it.
        shows_step = self._algorithm.of(block.group).shows_step or block.draws
        views = {"step": block.steps[slot]} if shows_step else {}
        offset, buffers = block.offsets[slot], {}
        for name, buffer in block.moments.items():
            if name in block.formats:
                views[name + CODE], views[name + SCALE] = coded_views(buffer, piece, offset)
            else:
                buffers[name] = buffer
        if self._has_master(piece.dtype):
            buffers["master" if block.master.dtype == torch.float32 else "remainder"] = block.master
        if block.averaged:
            buffers["ema"] = block.ema
        views.update((name, view_like(buffer, piece, offset)) for name, buffer in buffers.items())
        return views

    def _placed(self, name: str, view: Tensor, param: Tensor) -> Tensor:
        """The view as ``optimizer.state`` shows it: a DTensor for a DTensor."""
        if name == "step":
            return view
        if not name.endswith(SCALE) or moment_of(name) is None:
            return like(view, param)
        return like(view, param, scale_shape(param.shape) if view.dim() > 1 else view.shape)  # flat: not cut

    def _fill(self, algorithm: Algorithm, param: Tensor, shown: dict, step: Tensor, values: dict) -> Tensor | None:
        """Copy ``values``, a loaded or an earlier state, into its views. Without any the average starts at the weight and
        everything else at zero.

        Returns:
            The weight that the parameter must take to agree with a split master.
        """
        values = self._decoded(values)
        for name in {**dict.fromkeys(map(unpacked_name, shown)), "master": None}:
            value = values.get(name)
            if value is not None and name != "step" and not isinstance(value, Tensor):
                raise TypeError(f"{self._name}: the loaded {name} has type {type_name(value)}; accepted: a tensor")
            if value is not None and name != "step" and value.shape != param.shape:
                raise ValueError(
                    f"{self._name}: the loaded {name} has shape {list(value.shape)}, its parameter {list(param.shape)}"
                )
            if value is not None and name + CODE in shown:
                write_coded(shown[name + CODE], shown[name + SCALE], value, algorithm.format_of(name))
            elif value is not None and name in shown and name != "step":
                shown[name].copy_(value)
            elif value is None and values and name in algorithm.required:
                raise ValueError(
                    f"{self._name}: the loaded state of a parameter of shape {list(param.shape)} lacks {name!r}"
                )
        loaded_step = algorithm.loaded_step({*map(unpacked_name, shown)}, values)
        loaded_step = torch.as_tensor(loaded_step, dtype=torch.float32, device=step.device)
        if loaded_step.numel() != 1:
            raise ValueError(f"{self._name}: the loaded step has shape {list(loaded_step.shape)}; accepted: 1 element")
        step.copy_(loaded_step.reshape(()))
        master, weight = values.get("master"), None
        if "master" in shown and master is None:
            shown["master"].copy_(param)
        elif "remainder" in shown and master is not None:
            split = SPLITS[shown["remainder"].dtype]
            weight, remainder = split(master.to(param.device, torch.float32), param.dtype)
            shown["remainder"].copy_(remainder)
        if "ema" in shown and values.get("ema") is None:
            shown["ema"].copy_(param if master is None or not {"master", "remainder"} & shown.keys() else master)
        return weight

    # ---- values ----

    def exported(self, param: Tensor, values: dict, join: Join = join_master, *, keep_codes: bool = False) -> dict:
        """``values``, a parameter's shown state, as a checkpoint has it: masters and moments in 8 bits are float32 however they are
        stored. With ``keep_codes`` codes and exponents stay if they are row-major."""
        place = self.places.get(id(param))
        if place is not None and place.state is not values:
            place = None
        if "remainder" in values:
            remainder = local(values["remainder"])
            master = like(join(local(param.detach()).to(remainder.device), remainder), param)
            values = {key: value for key, value in values.items() if key != "remainder"} | {"master": master}
        if not (keep_codes and local(param).is_contiguous()):
            values = self._decoded(values)
        if getattr(param, "_fsdp_flattened", False):  # FSDP1 saves only one dtype for all state of a parameter
            values = {key: value.float() if isinstance(value, Tensor) else value for key, value in values.items()}
        return self._algorithm.exported(dict(values), place)

    def check_form(self, groups: list[dict[str, Any]], saved: dict[str, Any]) -> None:
        """Raise a ValueError for a state_dict with other numbers of parameters, or with a moment of another shape or dtype than
        :meth:`exported` gives it with ``keep_codes``: a load would convert it."""
        sizes, own = ([len(group["params"]) for group in each] for each in (saved["param_groups"], groups))
        if sizes != own:
            raise ValueError(f"its optimizer has groups of {sizes} parameters, and here they are of {own}")
        moments = {moment for member in self._algorithm.members for moment in member.declared.moments}
        for i, (group, param) in enumerate((it, param) for it in groups for param in it["params"]):
            dtype = moment_dtype(param.shape, state_dtype_of(group, self._options))
            dtype = torch.float32 if dtype == torch.uint8 and not local(param).is_contiguous() else dtype
            for key, value in saved["state"].get(i, {}).items():
                moment = moment_of(key) or key
                if moment in moments and isinstance(value, Tensor):  # SGD's momentum is None before its first step
                    shape = scale_shape(param.shape) if key == moment + SCALE else param.shape
                    check_like(f"optimizer.state[{i}].{key}", value, shape, dtype)

    def current(self, param: Tensor, state: dict, *, moments: bool = True) -> dict:
        """A parameter's state as a checkpoint would have it now; empty if there is none. Without ``moments`` those in 8 bits are left
        out, which have to be decoded."""
        place, values = self.places.get(id(param)), state.get(param) or {}
        if place is not None and place.converted:
            values = {key: value for key, value in values.items() if key != "remainder"}
        if not moments:
            values = {key: value for key, value in values.items() if moment_of(key) is None}
        return self.exported(param, values) if values else {}

    def draws(self) -> bool:
        """True if steps of some parameter draw random bits."""
        return any(block.draws for block in self.blocks)

    def snapshot(self) -> Callable[[], None]:
        """Copy all buffers. Returns a function that restores them."""
        blocks = list(self.blocks)
        restore_buffers = restorer(tensor for block in blocks for tensor in block.tensors())

        def restore() -> None:
            restore_buffers()
            for block in blocks:
                block.refresh_shadows()

        return restore

    # ---- host memory between phases ----

    def offload(self) -> None:
        """Move all buffers to host memory. Nothing has been changed if it raises."""
        self.adopt_writes()
        blocks = [block for block in self.blocks if block not in self._homes and block.weights is None]
        homes = {block: block.steps.device for block in blocks}
        self._move(dict.fromkeys(blocks, torch.device("cpu")))
        self._homes |= homes
        for block in blocks:
            forget_shadows(block.params[: len(block.shadow_views)])

    def reload(self) -> None:
        """Move them back. Nothing has been changed if it raises."""
        self._move(self._homes)
        for block in self._homes:
            block.refresh_shadows()
        self._homes = {}

    def check_home(self) -> None:
        """Before a step."""
        if self._homes:
            raise RuntimeError(
                f"{self._name}: the state is in host memory, since offload_state(); accepted: reload_state() before the next step"
            )

    @torch.no_grad()
    def _move(self, targets: dict[Block, torch.device]) -> None:
        self.version += 1
        copies = [(b, moved(b, device)) for block, device in targets.items() for b in block.tensors()]
        for buffer, copy in copies:
            buffer.data = copy
        for block in targets:
            for param, offset, view in zip(block.params, block.offsets, block.shadow_views, strict=False):
                view.data = view_like(block.shadow, param, offset)
        for place in self.places.values() if targets else ():
            views = self._views(place.block, place.slot, place.piece) if place.block in targets else {}
            for name in views.keys() & getattr(place.state, "views", ()):
                shown, view = dict.get(place.state, name), views[name]
                local(shown).data = in_own_storage(view) if is_dtensor(shown) else view

    # ---- writes of others to parameters ----

    @torch.no_grad()
    def mark_clean(self) -> None:
        """Record that all masters agree with the parameters as they are now."""
        for place in self.places.values():
            if place.twin is not None:
                place.twin.copy_(place.own)
            place.mark_clean()

    @torch.no_grad()
    def adopt_writes(self) -> None:
        """Update the masters of parameters that others wrote since the last step."""
        self.complete()
        for place in self.places.values():
            place.adopt_write()

    @torch.no_grad()
    def reload_params(self) -> None:
        """Set all masters to the parameters, without extra bits, and copy the parameters into the shadows."""
        self.complete()
        for place in self.places.values():
            master = place.block.master
            if master.numel() and master.dtype == torch.float32:
                place.view(master).copy_(place.own)
            elif master.numel():
                place.view(master).zero_()
        self.mark_clean()
        for block in self.blocks:
            block.refresh_shadows()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on ``device``, in pinned memory if that is the CPU; itself if it is there."""
    if tensor.device == device or device.type != "cpu":
        return tensor.to(device)
    return torch.empty_like(tensor, device=device, pin_memory=tensor.is_cuda).copy_(tensor)


def _checksums(views: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checksums of a parameter's stored master and average, under the names of a checkpoint."""
    names = [name for name in dict.keys(views) if name in _FOLLOWERS]
    return {unpacked_name(name): checksum(local(views[name])) for name in names}


def check_like(name: str, saved: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if saved.shape != shape or saved.dtype != dtype:
        raise ValueError(
            f"its {name} is {saved.dtype} of shape {list(saved.shape)}, and here it is {dtype} of shape {list(shape)}; "
            "for a conversion load what torch.load(path, weights_only=True) returns"
        )

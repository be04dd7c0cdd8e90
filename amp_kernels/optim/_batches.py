"""The parameters of a step, device by device, in the form that the update op takes."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .._sharding.agreement import shard_number
from .._sharding.local import is_dtensor
from ..ops._shadows import ShadowList
from ._state import Block, Place, WrittenParams


@dataclass
class DeviceBatch:
    """The parameters of one device that take part in a step."""

    device: torch.device
    params: list[Tensor]
    pieces: list[Tensor]  # what the kernels see: the params, or this rank's pieces of them
    counted: int  # the first so many params count here in norms, the others on other ranks
    numbers: list[int]  # of the params in the optimizer
    blocks: list[Block]
    groups: list[int]  # of each block
    layout: Tensor
    nothing: Tensor  # stands for a buffer that does not exist or is not used
    shadows: ShadowList
    written: WrittenParams
    sharded: list[Tensor]  # the params that are DTensors
    _used: list[tuple[str, ...]] | None = None
    _state: tuple[list[Tensor], ...] = ()  # for `_used`

    @functools.cached_property
    def rows(self) -> Tensor:
        """``numbers`` on the device."""
        return torch.tensor(self.numbers, device=self.device)

    def state(
        self, moments: tuple[str, ...], used: list[tuple[str, ...]], averaged: list[bool]
    ) -> tuple[list[Tensor], ...]:
        """The op's arguments from the moments to ``emas``: a buffer per block, empty where the block's group does not use it.

        Args:
            moments: those that the op declares.
            used: those of each group. The arguments are cached as long as it is the same list.
            averaged: whether each group keeps averages.
        """
        if self._used is not used:
            pairs = list(zip(self.blocks, self.groups, strict=True))
            self._state = (
                [
                    block.moments[name] if name in used[group] else self.nothing
                    for name in moments
                    for block, group in pairs
                ],
                [block.steps for block in self.blocks],
                [block.master for block in self.blocks],
                [block.shadow for block in self.blocks],
                [block.ema if averaged[group] else self.nothing for block, group in pairs],
            )
            self._used = used  # last: an interrupt before it leaves nothing half made
        return self._state


def make_batches(
    params: list[Tensor], active: list[tuple[int, Place]], counts: list[bool], shard_group: ProcessGroup | None
) -> list[DeviceBatch]:
    """The batches of a step of the ``active`` parameters, each with the number of its group.

    Args:
        params: all of the optimizer's.
        counts: whether each of them counts on this rank in norms.
        shard_group: the option of that name.
    """
    number = {id(param): i for i, param in enumerate(params)}  # as in the state_dict
    by_device: dict[torch.device, list[tuple[int, Place]]] = defaultdict(list)
    for group, place in sorted(active, key=lambda entry: not counts[number[id(entry[1].param)]]):
        by_device[place.piece.device].append((group, place))
    batches = []
    for device, members in by_device.items():
        places = [place for _, place in members]
        numbers = [number[id(place.param)] for place in places]
        group_of = {place.block: group for group, place in members}
        position = {block: i for i, block in enumerate(group_of)}
        rows = []
        for (group, place), index in zip(members, numbers, strict=True):
            # The random bits depend on the index: pieces of one parameter must not share them, and copies must.
            index += len(params) * shard_number(place.param, shard_group)
            rows.append((position[place.block], place.offset, place.slot, group, index % 2**32))
        batches.append(
            DeviceBatch(
                device,
                params=[place.param for place in places],
                pieces=[place.piece for place in places],
                counted=sum(counts[index] for index in numbers),
                numbers=numbers,
                blocks=list(group_of),
                groups=list(group_of.values()),
                # On the CPU whatever torch.set_default_device says: the host reads it at each launch.
                layout=torch.tensor(rows, dtype=torch.int64, device="cpu"),
                nothing=torch.empty(0, dtype=torch.float32, device=device),
                shadows=ShadowList([(p.param, p.block.shadow_views[p.slot]) for p in places if p.block.shadow_views]),
                written=WrittenParams(places),
                sharded=[place.param for place in places if is_dtensor(place.param)],
            )
        )
    return batches

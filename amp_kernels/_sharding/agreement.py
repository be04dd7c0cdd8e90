"""Norms and skip decisions that ranks with pieces of one list of tensors agree on.

Every square must count once, although several ranks may have a piece (replicated dimensions of a mesh, a submesh, a
plain parameter among sharded ones): it counts on the first rank that has it. Who that is follows from meshes and
placements, so nothing is communicated to find it out. One sum over the ranks of two numbers then decides for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._dispatch.walks import identical
from .local import is_dtensor


class Agreement:
    """Which of some tensors count on this rank, and the ranks that sum up what counts.

    Args:
        tensors: parameters or gradients, in the same order on all ranks. The widest mesh among those of its DTensors must
            contain the others; plain tensors among DTensors are the same on all its ranks.
        shard_group: ranks that hold different tensors of one model: the pieces that FSDP1 or ZeRO leave them, or stages
            of a pipeline.

    Raises:
        ValueError: of the meshes none contains all others, or one of them leaves out this rank.
    """

    def __init__(self, tensors: Sequence[Tensor], shard_group: dist.ProcessGroup | None = None):
        self.groups: list[dist.ProcessGroup] = []
        self.counts = [True] * len(tensors)
        mesh = _widest(tensors)
        if mesh is not None:
            first = int(mesh.mesh.min())
            known: dict[tuple | None, bool] = {}  # most tensors are placed alike
            for i, tensor in enumerate(tensors):
                placed = (id(tensor.device_mesh), tensor.placements) if is_dtensor(tensor) else None
                if placed not in known:
                    known[placed] = _counts(tensor, first)
                self.counts[i] = known[placed]
            whole = mesh.size() == dist.get_world_size()
            self.groups = [dist.group.WORLD] if whole else [mesh.get_group(dim) for dim in range(mesh.ndim)]
        of_fsdp1 = any(map(_is_of_fsdp1, tensors))
        declared = [] if shard_group is None else [shard_group]
        of_tensors = [*(self.groups if any(map(_is_sharded, tensors)) else []), *(declared if of_fsdp1 else [])]
        self.groups = [group for group in (*self.groups, *declared) if group.size() > 1]
        #: Those over which pieces of one tensor lie.
        self.tensor_groups = [group for group in of_tensors if group.size() > 1]
        self._undeclared = shard_group is None and of_fsdp1 and dist.get_world_size() > 1

    def __bool__(self) -> bool:
        """True if there is any other rank to agree with."""
        return bool(self.groups)

    def check(self, name: str) -> None:
        """Raise where every rank would decide for itself.

        Raises:
            ValueError: parameters are pieces that FSDP1 has made, and no ``shard_group`` says whose.
        """
        if self._undeclared:
            raise ValueError(
                f"{name}: parameters are sharded by FullyShardedDataParallel, and shard_group is None, so that each rank "
                "would clip and skip by its own pieces; accepted: shard_group=model.process_group, or fully_shard (FSDP2)"
            )

    @property
    def device(self) -> torch.device:
        """The device of the other ranks' numbers, guessed from the process group on a rank without tensors."""
        types = {device.type for device in self.groups[0]._device_types}
        return torch.device("cuda" if "cuda" in types and torch.cuda.is_available() else "cpu")

    def reduce(self, sum_sq: Tensor, flag: Tensor) -> tuple[Tensor, Tensor]:
        """A sum of squares and a flag of this rank, 0-dim float32; of all ranks in return, the flag 0 or 1.

        Both are summed in float64. Every rank must call this, one without gradients with zeros. The host does not wait.
        """
        both = torch.stack((sum_sq, flag)).double()
        for group in self.groups:
            both = _reduced(both, group, dist.ReduceOp.SUM)
        sum_sq, flag = both.float().unbind()
        return sum_sq, flag.clamp(max=1.0)

    def total(self, sums: Tensor) -> Tensor:
        """A row of float64 numbers for each tensor, summed over the ranks that hold pieces of it, copies included.

        Every rank must call this, one without gradients with zeros. The host does not wait.
        """
        for group in self.tensor_groups:
            sums = _reduced(sums, group, dist.ReduceOp.SUM)
        return sums

    def gather(self, value: Any) -> list[tuple[int, Any]]:
        """Every rank's value, with its rank. For the end of a training run: it waits, and moves Python objects."""
        values = [(dist.get_rank(), value)]
        for group in self.groups:
            everyone: list[Any] = [None] * group.size()
            dist.all_gather_object(everyone, values, group=group)
            values = [pair for part in everyone for pair in part]
        return sorted(dict(values).items())

    def largest(self, value: Tensor) -> Tensor:
        """The maximum of all ranks' values, NaN if one is NaN."""
        both = torch.stack((value.nan_to_num(torch.inf, torch.inf, -torch.inf), value.isnan().float()))
        for group in self.groups:
            both = _reduced(both, group, dist.ReduceOp.MAX)
        return torch.where(both[1] > 0, torch.nan, both[0])


class LatestAgreement:
    """The agreement over a list of tensors, rebuilt when the list changes."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] | None = None
        self._agreement: Agreement | None = None

    def over(self, tensors: list[Tensor], shard_group: dist.ProcessGroup | None) -> Agreement:
        if self._tensors is None or not identical(tensors, self._tensors):
            self._agreement = Agreement(tensors, shard_group)
            self._tensors = tensors
        return self._agreement


def shard_number(param: Tensor, shard_group: dist.ProcessGroup | None = None) -> int:
    """Differs between the pieces of one parameter, and is the same for copies of one piece."""
    number = 0
    if is_dtensor(param) and param.device_mesh.get_coordinate() is not None:
        for at, size, placement in zip(
            param.device_mesh.get_coordinate(), param.device_mesh.shape, param.placements, strict=True
        ):
            number = number if placement.is_replicate() else number * size + at
    return number if shard_group is None else number * shard_group.size() + shard_group.rank()


def _widest(tensors: Iterable[Tensor]) -> DeviceMesh | None:
    """The mesh whose ranks are all that hold a piece of anything here."""
    meshes: dict[int, DeviceMesh] = {id(t.device_mesh): t.device_mesh for t in tensors if is_dtensor(t)}
    if not meshes:
        return None
    widest = max(meshes.values(), key=DeviceMesh.size)
    ranks = set(widest.mesh.flatten().tolist())
    for mesh in meshes.values():
        inside = set(mesh.mesh.flatten().tolist()) <= ranks and widest.size() % mesh.size() == 0
        if not inside or mesh.get_coordinate() is None:
            raise ValueError(
                f"parameters are on {widest} and on {mesh}, of which none covers the other on every rank; accepted: meshes "
                "that are parts of one another, such as a mesh and its slices"
            )
    return widest


def _counts(tensor: Tensor, first: int) -> bool:
    """True if this rank is the first of those that hold the same piece. ``first``: the lowest rank of all."""
    if not is_dtensor(tensor):
        return dist.get_rank() == first
    mesh = tensor.device_mesh
    copies = zip(mesh.get_coordinate(), tensor.placements, strict=True)
    # A slice of a mesh has siblings with other ranks, which hold copies: of these the one with the first rank counts.
    return bool((mesh.mesh == first).any()) and all(at == 0 for at, placed in copies if placed.is_replicate())


def _is_sharded(tensor: Tensor) -> bool:
    return is_dtensor(tensor) and any(placement.is_shard() for placement in tensor.placements)


def _is_of_fsdp1(tensor: Tensor) -> bool:
    return getattr(tensor, "_fsdp_flattened", False)


def _reduced(numbers: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp) -> Tensor:
    """Over the ranks of a group, where it communicates: for parameters offloaded to the CPU that may be the GPU."""
    devices = group._device_types
    there = numbers if any(device.type == numbers.device.type for device in devices) else numbers.to(devices[0])
    dist.all_reduce(there, op, group=group)
    return there.to(numbers.device)

"""Norms and skip decisions that ranks with pieces of one list of tensors agree on.

Every square must count once, although several ranks may have a piece (replicated dimensions of a mesh, a submesh, a
plain parameter among sharded ones): it counts on the first rank that has it. Who that is follows from meshes, placements and declared
groups; evidence shows that undeclared tensors on a part of the mesh are copies (:mod:`.evidence`). One sum over the ranks of two numbers
then decides for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._dispatch import walks
from .evidence import Siblings, Undeclared
from .local import is_dtensor

#: The ``shard_group`` of a parameter group.
Declared = dist.ProcessGroup | Literal["copies"] | None


class Factor(NamedTuple):
    """Ranks that sum over ``groups``, one after the other. All factors together are a grid of ranks."""

    ranks: frozenset[int]
    groups: list[dist.ProcessGroup]


@dataclass
class Pieces:
    """The tensors, by number, of which the ranks of ``groups`` have pieces."""

    groups: list[dist.ProcessGroup]
    numbers: list[int]
    _index: Tensor | None = None

    def index(self, device: torch.device) -> Tensor:
        """``numbers`` on a device."""
        if self._index is None or self._index.device != device:
            self._index = torch.tensor(self.numbers, device=device)
        return self._index


class Agreement:
    """Which of some tensors count on this rank, and the ranks that sum up what counts.

    Args:
        tensors: parameters or gradients, in the same order on all ranks. The widest mesh among those of its DTensors must
            contain the others; plain tensors among DTensors are the same on all its ranks, unless declared otherwise.
        shard_group: ranks that hold different tensors of one model: the pieces that FSDP1 or ZeRO leave them, or stages
            of a pipeline.
        declared: by tensor, what its group says of it: a process group over which it is distinct, besides its own mesh;
            ``"copies"``: the same on all other parts of the mesh or, without a mesh, on all ranks of ``shard_group``. A group that has
            ranks in common with ``shard_group`` replaces it; otherwise the tensor is distinct over both.
        are_grads: ``tensors`` are gradients, whose weights are unknown.

    Raises:
        ValueError: of the meshes none contains all others, or one of them leaves out this rank; or groups overlap and none
            contains the other.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        shard_group: dist.ProcessGroup | None = None,
        declared: Sequence[Declared] | None = None,
        are_grads: bool = False,
    ):
        self.groups: list[dist.ProcessGroup] = []
        self.counts = [True] * len(tensors)
        #: The tensors of which this rank and others hold pieces, by the groups of these ranks.
        self.tensor_groups: list[Pieces] = []
        self._siblings: Siblings | None = None
        says = [None] * len(tensors) if declared is None else declared
        declared_groups = dict.fromkeys(group for group in (shard_group, *says) if _is_group(group))
        #: True if any process group was declared.
        self.is_declared = bool(declared_groups)
        mesh = _widest(tensors)
        if mesh is not None or declared_groups:
            self._count(tensors, mesh, shard_group, says, list(declared_groups), are_grads)
        of_fsdp1 = any(_is_of_fsdp1(tensor) and group is None for tensor, group in zip(tensors, says, strict=True))
        self._undeclared = of_fsdp1 and shard_group is None and dist.get_world_size() > 1

    def _count(
        self,
        tensors: Sequence[Tensor],
        mesh: DeviceMesh | None,
        shard_group: dist.ProcessGroup | None,
        says: Sequence[Declared],
        declared_groups: list[dist.ProcessGroup],
        are_grads: bool,
    ) -> None:
        whole, of_mesh = frozenset((dist.get_rank(),)), []
        if mesh is not None:
            whole, of_mesh = _ranks_of(mesh), _groups_of(mesh)
        factors = _factors([Factor(whole, of_mesh)] if of_mesh else [], declared_groups)
        self.groups = [group for factor in factors for group in factor.groups]
        known: dict[tuple, tuple[bool, bool]] = {}  # most tensors are placed alike
        undeclared: list[Undeclared] = []
        pieces: dict[Any, Pieces] = {}
        for i, (tensor, declared) in enumerate(zip(tensors, says, strict=True)):
            own = tensor.device_mesh if is_dtensor(tensor) else None
            key = id(own), None if own is None else tensor.placements, declared
            if key not in known:
                ranks = whole & {dist.get_rank()} if own is None else _ranks_of(own)
                parts = _parts(ranks, whole, declared, shard_group)
                is_open = (
                    declared != "copies" and ranks != whole and not any(len(part & whole) > 1 for part in parts[1:])
                )
                known[key] = _is_first_copy(tensor) and all(_has_first(parts, factor) for factor in factors), is_open
            self.counts[i], is_open = known[key]
            if is_open:
                undeclared.append(Undeclared(i, tensor, own))
            group = shard_group if declared is None else declared
            if own is not None:
                if id(own) not in pieces:  # by value, because each slicing makes another mesh
                    pieces[id(own)] = pieces.setdefault(own, Pieces(_groups_of(own), []))
                pieces[id(own)].numbers.append(i)
            elif _is_group(group) and _is_of_fsdp1(tensor):
                pieces.setdefault(group, Pieces([group], [])).numbers.append(i)
        found = {id(found): found for found in pieces.values() if found.groups}.values()
        self.tensor_groups = [it for it in found if any(_is_piece(tensors[i]) for i in it.numbers)]
        if undeclared:
            self._siblings = Siblings(mesh, of_mesh, undeclared, are_grads)

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

    def settle(self, name: str | None) -> bool:
        """Exchange evidence about undeclared tensors, once. Every rank must call this before a norm, when the gradients are there.
        Later calls do nothing, unless a gradient was zero or not finite.

        Args:
            name: of the function that needs the norm, for the error; ``None``: it can do without.

        Returns:
            ``True`` if no square is known to be left out of the norm.

        Raises:
            ValueError: undeclared tensors on a part of the mesh are no copies.
        """
        if self._siblings is None:
            return True
        self._siblings.ask(_reduced)
        refusal = self._siblings.refusal
        if refusal is not None and name is not None:
            raise ValueError(f"{name}: {refusal}")
        return refusal is None

    @property
    def device(self) -> torch.device:
        """The device of the other ranks' numbers, guessed from the process group on a rank without tensors."""
        types = {device.type for device in self.groups[0]._device_types}
        return torch.device("cuda" if "cuda" in types and torch.cuda.is_available() else "cpu")

    def reduce(self, sum_sq: Tensor, flag: Tensor) -> tuple[Tensor, Tensor]:
        """A sum of squares and a flag of this rank, 0-dim float32; of all ranks in return, the flag 0 or 1.

        Both are summed in float64. Every rank must call this, one without gradients with zeros. The host does not wait.
        """
        sum_sq, flag = self.sum(torch.stack((sum_sq, flag)).double()).float().unbind()
        return sum_sq, flag.clamp(max=1.0)

    def sum(self, numbers: Tensor) -> Tensor:
        """Float64 numbers of this rank, summed over all ranks. Every rank must call this, one without gradients with zeros."""
        for group in self.groups:
            numbers = _reduced(numbers, group, dist.ReduceOp.SUM)
        return numbers

    def total(self, sums: Tensor) -> Tensor:
        """A row of float64 numbers for each tensor, summed over the ranks that hold pieces of it, copies on its own mesh
        included.

        Every rank must call this, one without gradients with zeros. The host does not wait.
        """
        for pieces in self.tensor_groups:
            index = pieces.index(sums.device)
            rows = sums if len(index) == len(sums) else sums[index]
            for group in pieces.groups:
                rows = _reduced(rows, group, dist.ReduceOp.SUM)
            sums = rows if rows is sums else sums.index_copy(0, index, rows)
        return sums

    def gather(self, value: Any) -> list[tuple[int, Any]]:
        """Every rank's value, with its rank. For the end of a training run: it waits, and moves Python objects."""
        return _gathered(value, self.groups)

    def largest(self, value: Tensor) -> Tensor:
        """The maximum of all ranks' values, NaN if one is NaN."""
        both = torch.stack((value.nan_to_num(torch.inf, torch.inf, -torch.inf), value.isnan().float()))
        for group in self.groups:
            both = _reduced(both, group, dist.ReduceOp.MAX)
        return torch.where(both[1] > 0, torch.nan, both[0])


class LatestAgreement:
    """The agreement over a list of tensors, rebuilt when the list or a group changes."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] | None = None
        self._groups: Any = None
        self._agreement: Agreement | None = None

    def over(
        self, tensors: list[Tensor], shard_group: dist.ProcessGroup | None, declared: list[Declared] | None
    ) -> Agreement:
        groups = shard_group, declared
        if self._tensors is None or groups != self._groups or not walks.same_objects(tensors, self._tensors):
            self._agreement = Agreement(tensors, shard_group, declared)
            self._tensors, self._groups = tensors, groups
        return self._agreement


def check_shard_group(name: str, group: object) -> None:
    """Raise unless the argument ``shard_group`` is acceptable."""
    if group is not None and not _is_group(group):
        raise TypeError(
            f"{name}: shard_group is {group!r}, of type {type(group).__name__}; accepted: None, a process group (get_group() of "
            "a device mesh)"
        )


def check_declared(name: str, group: Mapping[str, Any]) -> None:
    """Raise unless the ``shard_group`` of a parameter group is acceptable."""
    value = group.get("shard_group")
    if not (value is None or value == "copies" or _is_group(value)):
        error = ValueError if isinstance(value, str) else TypeError
        raise error(
            f"{name}: shard_group of a group is {value!r}, of type {type(value).__name__}; accepted: None, a process group "
            "(get_group() of a device mesh), 'copies'"
        )


def declared_in(groups: Iterable[dict[str, Any]]) -> list[Declared] | None:
    """By parameter, the ``shard_group`` of its group. ``None``: no group has one."""
    groups = list(groups)
    if all(group.get("shard_group") is None for group in groups):
        return None
    return [group.get("shard_group") for group in groups for _ in group["params"]]


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


def _ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Process groups that make up a mesh, those of this rank alone left out."""
    whole = mesh.size() == dist.get_world_size()
    groups = [dist.group.WORLD] if whole else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return [group for group in groups if group.size() > 1]


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup)


def _ranks(group: dist.ProcessGroup) -> frozenset[int]:
    return frozenset(dist.get_process_group_ranks(group))


def _factors(factors: list[Factor], groups: list[dist.ProcessGroup]) -> list[Factor]:
    """The given factors and those that the process groups add."""
    for group in groups:
        ranks = _ranks(group)
        met = [factor for factor in factors if len(factor.ranks & ranks) > 1]
        if len(ranks) == 1 or any(ranks <= factor.ranks for factor in met):
            continue
        if not all(factor.ranks <= ranks for factor in met):
            known = "; ".join(str(sorted(factor.ranks)) for factor in met)
            raise ValueError(
                f"shard_group has the ranks {sorted(ranks)}, and the meshes and other groups {known}; accepted: a part of them, a group "
                "that contains them, or one with no other rank in common than this one"
            )
        factors = [factor for factor in factors if factor not in met] + [Factor(ranks, [group])]
    return factors


def _parts(
    own: frozenset[int], whole: frozenset[int], declared: Declared, shard_group: dist.ProcessGroup | None
) -> list[frozenset[int]]:
    """The ranks over which a tensor is distinct, as factors of a product: its ``own`` mesh first. ``whole``: the widest mesh."""
    others = [] if shard_group is None else [_ranks(shard_group)]
    if _is_group(declared):
        ranks = _ranks(declared)
        others = [ranks, *(other for other in others if len(other & ranks) == 1)]
    elif declared == "copies":
        others = [other for other in others if len(whole) > 1 and len(other & whole) == 1]
    return [own, *(ranks for ranks in others if not ranks <= own)]  # within the own mesh a group says nothing


_reached: dict[tuple, frozenset[int]] = {}


def _has_first(parts: list[frozenset[int]], factor: Factor) -> bool:
    """True if a tensor that is distinct over the product of ``parts`` is so on the first rank of a factor: the other ranks of the
    factor have copies of what these have."""
    me, first = frozenset((dist.get_rank(),)), min(factor.ranks)
    inside = {part & factor.ranks for part in parts}
    inside = sorted((part for part in inside if not any(part < other for other in inside)), key=sorted)
    reached, size = me, 1
    for part in inside:
        reached, size = reached | part, size * len(part) // len(part & reached)
    if size < len(factor.ranks) and len(inside) > 1:  # only the other ranks' parts complete the product
        key = factor.ranks, *inside
        if key not in _reached:
            of_rank = dict(_gathered(reached, factor.groups))
            while not reached >= (wider := reached.union(*(of_rank[rank] for rank in reached))):
                reached = wider
            _reached[key] = reached
        reached = _reached[key]
    return size == len(factor.ranks) or first in reached


def _is_first_copy(tensor: Tensor) -> bool:
    """True if this rank is the first of the copies on a tensor's own mesh."""
    if not is_dtensor(tensor):
        return True
    placed = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(at == 0 for at, placement in placed if placement.is_replicate())


def _is_piece(tensor: Tensor) -> bool:
    return _is_of_fsdp1(tensor) or (is_dtensor(tensor) and any(placement.is_shard() for placement in tensor.placements))


def _is_of_fsdp1(tensor: Tensor) -> bool:
    return getattr(tensor, "_fsdp_flattened", False)


def _gathered(value: Any, groups: list[dist.ProcessGroup]) -> list[tuple[int, Any]]:
    values = [(dist.get_rank(), value)]
    for group in groups:
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, values, group=group)
        values = [pair for part in everyone for pair in part]
    return sorted(dict(values).items())


def _reduced(numbers: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp) -> Tensor:
    """Over the ranks of a group, where it communicates: for parameters offloaded to the CPU that may be the GPU."""
    devices = group._device_types
    there = numbers if any(device.type == numbers.device.type for device in devices) else numbers.to(devices[0])
    dist.all_reduce(there, op, group=group)
    return there.to(numbers.device)

"""The ranks that together hold one copy of a DTensor, and the part of it that each of them holds."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .dtensor import is_dtensor

#: Indices of one part in each dimension of the whole: slices, or tensors that broadcast.
Box = tuple[slice, ...] | tuple[Tensor, ...]


class Piece(NamedTuple):
    """The part of a tensor on one rank."""

    shape: tuple[int, ...]
    box: Box


class Holders(NamedTuple):
    """The pieces of a tensor by rank of ``group``, in ascending order."""

    group: dist.ProcessGroup
    pieces: dict[int, Piece]


def sharded_dims(tensor: Tensor) -> set[int]:
    """The dimensions of a DTensor that are cut."""
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return {placement.dim % tensor.dim() for size, placement in placed if size > 1 and not placement.is_replicate()}


def most_elements(tensor: Tensor) -> int:
    """At least the elements of each rank's piece of a DTensor, the same number on all ranks; those of a plain tensor."""
    shape = list(tensor.shape)
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if is_dtensor(tensor) else ():
        if not placement.is_replicate():
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return math.prod(shape)


class Rows(NamedTuple):
    """A piece that has ``width`` consecutive elements of each ``pitch`` elements of a tensor, from element ``first`` on; of
    consecutive elements both are 0."""

    first: int
    width: int = 0
    pitch: int = 0


def rows_of(tensor: Tensor) -> Rows | None:
    """The elements of a DTensor that are this rank's piece, in row-major order. ``None``: they are no such rows."""
    piece, own, cut = tensor._local_tensor, tensor.device_mesh.get_coordinate(), sharded_dims(tensor)
    if not cut:
        return Rows(0)
    row_major = tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
    last = max(cut)
    if own is None or not (row_major and piece.is_contiguous() and cut <= {0, last}):
        return None
    if not piece.numel():
        return Rows(0)
    box = _piece(tensor, own).box
    if not all(isinstance(indices, slice) for indices in box):
        return None
    first = sum(indices.start * stride for indices, stride in zip(box, tensor.stride(), strict=True))
    inner = tensor.stride(last)
    return Rows(first, piece.shape[last] * inner, tensor.shape[last] * inner) if last else Rows(first)


def holders_of(tensor: Tensor) -> Holders:
    """The holders of the copy of a DTensor to which this rank's piece belongs.

    Raises:
        ValueError: the tensor is cut along several dimensions of a mesh that is not all ranks.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    cut = [i for i, placement in enumerate(placements) if mesh.size(i) > 1 and not placement.is_replicate()]
    if len(cut) == 1:
        group = mesh.get_group(cut[0])
    elif mesh.size() == dist.get_world_size():
        group = dist.group.WORLD
    else:
        raise ValueError(
            f"placements {placements} cut a tensor along several dimensions of {mesh}, which leaves out ranks; accepted: a "
            "mesh of all ranks, or one dimension"
        )
    own, pieces = mesh.get_coordinate(), {}
    for part in itertools.product(*(range(mesh.size(i)) for i in cut)):
        at = list(own)
        for i, coordinate in zip(cut, part, strict=True):
            at[i] = coordinate
        pieces[dist.get_group_rank(group, int(mesh.mesh[tuple(at)]))] = _piece(tensor, at)
    return Holders(group, dict(sorted(pieces.items())))


def _piece(tensor: Tensor, at: list[int]) -> Piece:
    """The piece at a coordinate of the mesh."""
    indices = []
    for dim, size in enumerate(tensor.shape):
        index = torch.arange(size, device="cpu").view([1] * dim + [-1])
        for count, coordinate, placement in zip(tensor.device_mesh.shape, at, tensor.placements, strict=True):
            if not placement.is_replicate() and placement.dim % tensor.dim() == dim:
                index = placement._split_tensor(index, count, with_padding=False, contiguous=False)[0][coordinate]
        indices.append(index.reshape(-1))
    shape = tuple(map(len, indices))
    first = [int(index[0]) if len(index) else 0 for index in indices]
    ranges = [slice(begin, begin + count) for begin, count in zip(first, shape, strict=True)]
    if all(torch.equal(index, torch.arange(r.start, r.stop)) for index, r in zip(indices, ranges, strict=True)):
        return Piece(shape, tuple(ranges))
    return Piece(shape, torch.meshgrid(*indices, indexing="ij") if len(indices) > 1 else (indices[0],))

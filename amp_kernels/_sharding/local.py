"""DTensors and the pieces of them that this rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from .dtensor import is_dtensor


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor, as a plain tensor over the same memory; a plain tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    piece = tensor._local_tensor
    return piece.wait() if hasattr(piece, "wait") else piece  # of a collective that may still run


def like(piece: Tensor, param: Tensor, shape: torch.Size | None = None) -> Tensor:
    """``piece``, over the same memory, as a DTensor placed as ``param``, row-major if it has a ``shape`` of its own; itself if
    ``param`` is a plain tensor."""
    if not is_dtensor(param):
        return piece
    piece = in_own_storage(piece)
    stride = param.stride() if shape is None else torch.empty(shape, device="meta").stride()
    placed = {"run_check": False, "shape": param.shape if shape is None else shape, "stride": stride}
    # Uneven shards need shape and stride.
    if piece.device.type == param.device_mesh.device_type:
        return type(param).from_local(piece, param.device_mesh, param.placements, **placed)
    described = type(param).from_local(piece.to("meta"), param.device_mesh, param.placements, **placed)
    return type(param)(piece, described._spec, requires_grad=False)  # from_local would move it to the mesh's devices


def in_own_storage(piece: Tensor) -> Tensor:
    """``piece`` without an offset, over the same memory: asynchronous saving takes a DTensor with an offset for a plain tensor."""
    return from_dlpack(to_dlpack(piece)) if piece.storage_offset() else piece


def local_value(value: Any, param: Tensor) -> Any:
    """This rank's piece of a loaded state of ``param``: a DTensor of any placement, the whole tensor, or a scalar.

    Raises:
        ValueError: the shape is not the parameter's.
    """
    if not is_dtensor(param):
        return value.full_tensor() if is_dtensor(value) else value
    if not isinstance(value, Tensor) or value.dim() == 0 < param.dim():
        return local(value) if isinstance(value, Tensor) else value
    if value.shape != param.shape:
        raise ValueError(f"a loaded state has shape {list(value.shape)}, its parameter {list(param.shape)}")
    return local(placed_as(value, param))


def placed_as(value: Tensor, param: Tensor) -> Tensor:
    """A DTensor of any placement, or a whole tensor that every rank has, with the placements of ``param``."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = param.device_mesh, param.placements
    if not is_dtensor(value):
        return distribute_tensor(value.to(param.device), mesh, placements, src_data_rank=None)
    if value.device_mesh != mesh:
        return distribute_tensor(value.full_tensor(), mesh, placements, src_data_rank=None)
    return value if value.placements == placements else value.redistribute(mesh, placements)


def summed(tensor: Tensor) -> Tensor:
    """A tensor whose pieces no longer have to be added up over ranks (``Partial``), to tell what its values are."""
    if not is_dtensor(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])

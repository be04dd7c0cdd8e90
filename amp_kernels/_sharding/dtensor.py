"""Functions of rows, and products with a weight, on DTensors: every rank works on what it holds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: Any) -> bool:
    """Without importing what defines DTensor, which takes a second: where it was not imported there are none."""
    if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_dtensors(op: str, accepted: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise TypeError(f"{op}: {name} is a DTensor with the placements {tensor.placements}; accepted: {accepted}")


def by_rows(
    name: str,
    function: Callable[..., Any],
    dims: Sequence[int],
    rows: Sequence[Tensor | None],
    weights: Sequence[Tensor | None] = (),
) -> Any:
    """``function(*rows, *weights)`` of each rank's part, as DTensors placed like the first of ``rows``.

    If its dimensions ``dims`` are spread over several ranks, or sums are pending (``Partial``), the rows are gathered first, and so
    are weights that not every rank has. A weight's gradient is a sum over the ranks' rows, left to DTensor.

    Raises:
        TypeError: one of them is a plain tensor, of which it cannot be known whether all ranks have the same.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    first, replicate = rows[0], Replicate()
    _check(name, (*rows, *weights))
    mesh, own = first.device_mesh, {dim % first.ndim for dim in dims}
    placements = [
        replicate if placed.is_partial() or (placed.is_shard() and placed.dim in own) else placed
        for placed in first.placements
    ]
    sums = [replicate if placed.is_replicate() else Partial() for placed in placements]
    pieces = [t if t is None else t.redistribute(mesh, placements).to_local() for t in rows]
    everywhere = [replicate] * mesh.ndim
    whole = [t if t is None else t.redistribute(mesh, everywhere).to_local(grad_placements=sums) for t in weights]

    def placed_as_rows(piece: Tensor) -> Tensor:
        shape = list(piece.shape)  # the function's own where it changes them
        for dim, (size, before) in enumerate(zip(first.shape, pieces[0].shape, strict=True)):
            shape[dim] = size if shape[dim] == before else shape[dim]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            piece.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    found = function(*pieces, *whole)
    return tuple(map(placed_as_rows, found)) if isinstance(found, tuple) else placed_as_rows(found)


def of_weight(
    name: str, function: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``function(x, weight, bias)``, a product ``x @ weight^T`` with what follows it, of each rank's part, as a DTensor.

    The weight stays in place and ``x`` follows, so that placements and communication are those of torch's linear under
    tensor parallelism. On each dimension of the mesh ``weight`` is

    - whole: rows of ``x`` stay where they are;
    - cut by rows (ColwiseParallel): each rank has all of ``x`` and computes some columns;
    - cut by columns (RowwiseParallel): so is ``x``. Each rank has a summand (``Partial``), one of them with the bias.

    Raises:
        TypeError: one of them is a plain tensor, of which it cannot be known whether all ranks have the same.
        ValueError: they are on different meshes.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    _check(name, (x, weight, bias))
    mesh, last, whole, summand = weight.device_mesh, Shard(x.ndim - 1), Replicate(), Partial()
    plan = []  # of x, weight and bias, of their gradients, and of the result
    for rows, kept in zip(x.placements, weight.placements, strict=True):
        if kept.is_shard(0):
            plan.append(((whole, kept, kept), (summand, kept, kept), last))
        elif kept.is_shard(1):
            plan.append(((last, kept, whole), (last, kept, whole), summand))
        elif rows.is_shard() and rows != last:
            plan.append(((rows, whole, whole), (rows, summand, summand), rows))
        else:
            plan.append(((whole,) * 3, (whole,) * 3, whole))
    placements, gradients, placed = zip(*plan, strict=True)
    pieces = []
    for tensor, at, grad_at in zip(
        (x, weight, bias), zip(*placements, strict=True), zip(*gradients, strict=True), strict=True
    ):
        if tensor is not None and tensor.placements != at:  # otherwise a backward would sum up too early
            tensor = tensor.redistribute(placements=at)
        pieces.append(None if tensor is None else tensor.to_local(grad_placements=grad_at))
    if bias is not None and any(at for at, it in zip(mesh.get_coordinate(), placed, strict=True) if it.is_partial()):
        pieces[2] = pieces[2] - pieces[2].detach()  # zeros, with the gradient that the first rank's bias has
    found = function(*pieces)
    columns = weight.shape[0] if last in placed else found.shape[-1]
    shape = torch.Size((*x.shape[:-1], columns))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(found, mesh, placed, run_check=False, shape=shape, stride=stride)


def _check(name: str, tensors: Sequence[Tensor | None]) -> None:
    """Raise unless all are DTensors on one mesh."""
    first = next(tensor for tensor in tensors if is_dtensor(tensor))
    for tensor in tensors:
        if tensor is not None and not is_dtensor(tensor):
            raise TypeError(
                f"{name}: a tensor of shape {list(tensor.shape)} is plain among DTensors; accepted: DTensors, such as "
                "distribute_tensor(tensor, mesh, [Replicate()])"
            )
        if tensor is not None and tensor.device_mesh != first.device_mesh:
            raise ValueError(
                f"{name}: DTensors are on {first.device_mesh} and on {tensor.device_mesh}; accepted: one mesh"
            )

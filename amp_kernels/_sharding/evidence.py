"""Evidence that tensors on a part of a mesh are copies of those on its other parts, which no mesh tells.

FSDP2 on ``mesh["dp"]`` beside tensor parallelism and experts on ``mesh["edp"]`` look alike: DTensors on a slice of the widest mesh. The
former are copies, whose squares count once in a norm, the latter are distinct. So do plain tensors among DTensors. The parts exchange
a checksum of each weight and the norm of its gradient, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from .._dispatch.capture import is_capturing
from .._dispatch.devices import at
from .local import is_dtensor, local, placed_as

logger = logging.getLogger("amp_kernels")

#: Gradient norms of copies agree within this factor: ranks may sum a gradient in different orders.
CLOSE = 1.01
#: Tensors that stay undecided are asked for in so many norms, and then in norm 64, 128, 256, ...
ALWAYS_ASKED = 32
_LISTS = 256  # of gradients, remembered by their structure
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: reduce(numbers, group, op)
Reduce = Callable[[Tensor, dist.ProcessGroup, dist.ReduceOp], Tensor]


class Evidence:
    """The state of the question for one tensor."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh, self.copies, self._norms = mesh, False, 0

    def is_due(self) -> bool:
        self._norms += 1
        return self._norms <= ALWAYS_ASKED or self._norms & (self._norms - 1) == 0


class Undeclared(NamedTuple):
    """A tensor on a part of the widest mesh of which nobody says if it is a copy. ``mesh`` is that part, ``None`` for one rank."""

    number: int
    tensor: Tensor
    mesh: DeviceMesh | None


_of_weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_of_lists: dict[tuple, list[Evidence]] = {}  # gradients are other tensors in each step


class Siblings:
    """The undeclared tensors of a list.

    Args:
        mesh, groups: the widest mesh, and the process groups that make it up.
        undeclared: in the same order on all its ranks.
        are_grads: the tensors are gradients, of unknown weights.
    """

    def __init__(
        self, mesh: DeviceMesh, groups: list[dist.ProcessGroup], undeclared: list[Undeclared], are_grads: bool
    ):
        self._mesh, self._groups, self._are_grads = mesh, groups, are_grads
        known = _known_of_list(mesh, undeclared) if are_grads else [_known(mesh, it.tensor) for it in undeclared]
        self._open = [pair for pair in zip(undeclared, known, strict=True) if not pair[1].copies]
        #: Why a norm is refused.
        self.refusal: str | None = None

    @torch._disable_dynamo
    def ask(self, reduce: Reduce) -> None:
        """Exchange evidence about the tensors that are undecided, if it is time. Every rank of the mesh must call this. The host
        waits for the device then. A capture and its rehearsal exchange nothing."""
        if not self._open or self.refusal is not None or is_capturing(local(self._open[0][0].tensor)):
            return
        due = [pair for pair in self._open if pair[1].is_due()]
        due = [(it, evidence) for it, evidence in due if self._are_grads or it.tensor.requires_grad]
        if not due:
            return
        by_mesh: dict[DeviceMesh | None, list[tuple[Undeclared, Evidence]]] = {}
        for it, evidence in due:
            by_mesh.setdefault(it.mesh, []).append((it, evidence))
        device = local(due[0][0].tensor).device
        blocks = []
        for mesh, members in by_mesh.items():
            pairs = [torch.stack(self._numbers(it.tensor)) for it, _ in members]
            block = torch.stack([at(pair, device) for pair in pairs])
            for dim in range(mesh.ndim if mesh is not None else 0):
                block = reduce(block, mesh.get_group(dim), dist.ReduceOp.SUM)
            blocks.append(block)
        numbers = torch.cat(blocks)
        numbers = torch.cat((numbers, -numbers), dim=1)
        for group in self._groups:
            numbers = reduce(numbers, group, dist.ReduceOp.MAX)
        asked = [pair for members in by_mesh.values() for pair in members]
        for (it, evidence), found in zip(asked, _on_host(numbers), strict=True):
            self._decide(it, evidence, *found)
        self._open = [pair for pair in self._open if not pair[1].copies]

    def _decide(
        self, it: Undeclared, evidence: Evidence, checksum: float, square: float, negative: float, opposite: float
    ) -> None:
        """``negative`` and ``opposite`` are minus the smallest checksum and square. Gradients have sums for checksums, which agree as
        closely as their norms."""
        norms = (-opposite) ** 0.5, square**0.5
        unknown = norms[0] == 0.0 or square == torch.inf
        largest = norms[0] + max(abs(checksum), abs(negative))
        tolerance = (torch.inf if unknown else (CLOSE - 1.0) * largest) if self._are_grads else 0.0
        same = checksum + negative <= tolerance
        if same and unknown:
            logger.debug(
                "tensor %d, of shape %s, on %s: its gradient has norm %g to %g on the parts of %s; it counts as copies for now",
                it.number,
                list(it.tensor.shape),
                it.mesh or "one rank",
                *norms,
                self._mesh,
            )
        elif same and norms[1] <= CLOSE * norms[0]:
            evidence.copies = True
        elif self.refusal is None:
            where = (
                f"on {it.mesh}, a part of {self._mesh},"
                if it.mesh is not None
                else f"plain among those on {self._mesh}"
            )
            weights = not (same or self._are_grads)
            differ = "weights differ" if weights else f"gradients, of norm {norms[0]:g} to {norms[1]:g}, differ"
            self.refusal = (
                f"tensor {it.number}, of shape {list(it.tensor.shape)}, is {where} and its {differ} between the parts, so that it may be "
                'distinct on each of them; accepted: groups {"params": [...], "shard_group": ...} with the process group over which '
                "such parameters are distinct (mesh['ep'].get_group() for experts) or 'copies'"
            )

    def _numbers(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The checksum of this rank's piece of a weight, or the sum of a gradient's, and the sum of squares, in float64."""
        if self._are_grads:
            piece = local(tensor)
            return piece.sum(dtype=torch.float64).nan_to_num(0.0, 0.0, 0.0), _square(piece)
        checksum = _checksum(local(tensor))
        grad = tensor.grad
        if grad is None:
            return checksum, torch.zeros_like(checksum)
        return checksum, _square(local(placed_as(grad, tensor)) if is_dtensor(tensor) else grad)


def _known(mesh: DeviceMesh, tensor: Tensor) -> Evidence:
    evidence = _of_weights.get(tensor)
    if evidence is None or evidence.mesh != mesh:
        evidence = _of_weights[tensor] = Evidence(mesh)
    return evidence


def _known_of_list(mesh: DeviceMesh, undeclared: Sequence[Undeclared]) -> list[Evidence]:
    described = [
        (it.number, it.mesh, getattr(it.tensor, "placements", None), it.tensor.shape, it.tensor.dtype)
        for it in undeclared
    ]
    key = mesh, *described
    if key not in _of_lists:
        if len(_of_lists) == _LISTS:
            _of_lists.clear()
        _of_lists[key] = [Evidence(mesh) for _ in undeclared]
    return _of_lists[key]


def _square(grad: Tensor) -> Tensor:
    """The sum of squares, infinite if an element is not finite."""
    values = grad._values() if grad.is_sparse else grad
    return torch.linalg.vector_norm(values, dtype=torch.float64).square().nan_to_num(torch.inf, torch.inf)


def _checksum(piece: Tensor) -> Tensor:
    """A number below 2^32 that each bit and its place changes: those of 2^20 pieces add up exactly in float64."""
    if is_traceable_wrapper_subclass(piece):
        return torch.zeros((), dtype=torch.float64, device=piece.device)
    bits = torch.view_as_real(piece) if piece.is_complex() else piece
    bits = bits.detach().view(_INTEGERS[bits.element_size()])
    bits = bits.reshape(1, -1) if bits.dim() < 2 else bits.flatten(1)
    rows, columns = (
        (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum() for sums in (bits.sum(1), bits.sum(0))
    )
    return ((rows * 0x9E3779B1 + columns) % 2**32).double()


def _on_host(numbers: Tensor) -> list[list[float]]:
    """Waits by an event: a program that forbids implicit waits (``torch.cuda.set_sync_debug_mode``) may take its first step."""
    if not numbers.is_cuda:
        return numbers.tolist()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(numbers.device))
    event.synchronize()
    return host.tolist()

"""Counts the bytes that the collectives of a step send."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Bytes that one of n ranks sends to its neighbour in a ring, as a multiple of its operand.
RING = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "broadcast": lambda n: 1,
}
OPS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
}
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "barrier"}


class CountSent(TorchDispatchMode):
    """Within it: ``bytes`` this rank sends, if every collective is a ring, and ``calls`` by kind.

    Raises:
        KeyError: a collective is of a kind that is not counted here.
    """

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = 0.0, dict.fromkeys(RING, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: it calls the collectives
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and name.split("::")[1] not in SILENT:
            kind, operand = OPS[name]
            handed = sum(tensor.nbytes for tensor in tree_leaves(args[operand]))
            self.bytes += RING[kind](_size(args)) * handed
            self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def _size(args: tuple) -> int:
    """Size of the group that a collective runs over."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).size()
    return dist.distributed_c10d._resolve_process_group(args[-1]).size()

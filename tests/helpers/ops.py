"""The ops that run, as torch's dispatcher sees them."""

from torch.utils._python_dispatch import TorchDispatchMode

#: Ops by which Python learns a tensor's value: on a GPU each of them waits for the device.
HOST_READS = {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero"}


class Ops(TorchDispatchMode):
    """``names`` of the ops that run, in order, such as ``aten::mm``."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))

    def count(self, *parts):
        """The number of those whose names have one of the parts."""
        return sum(any(part in name for part in parts) for name in self.names)

    def host_reads(self):
        return [name for name in self.names if name.partition("::")[2] in HOST_READS]

"""torch's own CUDA ops, for a device whose memory is host memory: torch's CPU kernels work on the same bytes.

torch's CUDA kernels are machine code, which nobody can run here. Views and allocations need no kernel and stay as they are.
"""

import ctypes
import warnings

import torch
from torch.utils._pytree import tree_map

COMPOSITE = {"aten::copy_"}  # one kernel for all devices, which starts machine code
NATIVE = {"empty", "empty_strided", "record_stream", "detach", "set_", "resize_", "is_pinned", "_pin_memory"}
_library = torch.library.Library("aten", "IMPL")


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in memory as a CPU tensor."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    data = (ctypes.c_uint8 * size).from_address(storage.data_ptr())
    flat = torch.frombuffer(data, dtype=torch.uint8)
    same = torch.empty(0, dtype=tensor.dtype)
    return same.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def takes_number(function, args) -> bool:
    """Whether a Python number stands where the overload has a tensor: the dispatcher hands tensors made of numbers over as such."""
    schema = getattr(function, "_schema", None)
    return schema is not None and any(
        isinstance(value, (int, float)) and isinstance(argument.type, torch.TensorType)
        for argument, value in zip(schema.arguments, args, strict=False)
    )


def run_on_cpu(function, args, kwargs):
    originals = []

    def lower(value):
        if isinstance(value, torch.Tensor) and value.is_cuda:
            originals.append((on_cpu(value), value))
            return originals[-1][0]
        return value

    device = kwargs.get("device")
    args, kwargs = tree_map(lower, (args, dict(kwargs)))
    if device is not None:
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
    given = [a for a in args if isinstance(a, torch.Tensor)]
    result = (function.overloadpacket if takes_number(function, args) else function)(*args, **kwargs)
    scalar = function is torch.ops.aten._local_scalar_dense.default
    to_cuda = torch.device(device).type == "cuda" if device is not None else not scalar

    def lift(value):
        for copy, original in originals:  # what was written in place is its argument
            if value is copy:
                if copy.shape != original.shape:
                    on_cpu(original.resize_(copy.shape)).copy_(copy)
                return original
        if not isinstance(value, torch.Tensor) or not to_cuda or value.is_cuda or any(value is a for a in given):
            return value
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        on_cpu(out).copy_(value)
        return out

    return tree_map(lift, result)


# Products with a wider result, which torch has on CUDA alone.
SUBSTITUTES = {
    "mm.dtype": lambda a, b, out_dtype: torch.mm(a.to(out_dtype), b.to(out_dtype)),
    "bmm.dtype": lambda a, b, out_dtype: torch.bmm(a.to(out_dtype), b.to(out_dtype)),
}


def is_view(schema) -> bool:
    """Whether the op only makes another view of an argument."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def replace_cuda_kernels() -> None:
    """For the rest of the process."""
    warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
    for name in torch._C._dispatch_get_all_op_names():
        has_kernel = name in COMPOSITE or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        if not name.startswith("aten::") or not has_kernel:
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        function = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if function is None or base in NATIVE or is_view(function._schema):
            continue
        function = SUBSTITUTES.get(name.removeprefix("aten::"), function)
        call = lambda *args, function=function, **kwargs: run_on_cpu(function, args, kwargs)  # noqa: E731
        _library.impl(name.removeprefix("aten::"), call, "CUDA", with_keyset=False)

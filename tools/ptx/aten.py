"""torch's own CUDA ops, for a device whose memory is host memory: torch's CPU kernels work on the same bytes.

torch's CUDA kernels are machine code, which nobody can run here. Views and allocations need no kernel and stay as they are. In a stream
that is being captured, what such an op has written is taken back, and written again at each replay.
"""

import ctypes
import functools
import os
import warnings

import torch
from torch.utils._pytree import tree_leaves, tree_map

COMPOSITE = {"aten::copy_", "aten::convolution"}  # one kernel for all devices, which starts or chooses machine code
NATIVE = {"empty", "empty_strided", "record_stream", "detach", "set_", "resize_", "is_pinned", "_pin_memory"}
# torch's kernels that have the host wait for a value, or for a size that values decide. Some only for an index of bools.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "_unique", "_unique2", "unique_dim"}
WAITING |= {"unique_consecutive", "unique_dim_consecutive"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_library = torch.library.Library("aten", "IMPL")


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the tensor's storage as a CPU tensor."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(0, dtype=torch.uint8)
    data = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(data, dtype=torch.uint8)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in memory as a CPU tensor."""
    flat = memory_of(tensor)
    if flat.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    same = torch.empty(0, dtype=tensor.dtype)
    return same.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def takes_number(function, args) -> bool:
    """True if a Python number stands where the overload has a tensor: the dispatcher hands tensors made of numbers over as such."""
    schema = getattr(function, "_schema", None)
    return schema is not None and any(
        isinstance(value, (int, float)) and isinstance(argument.type, torch.TensorType)
        for argument, value in zip(schema.arguments, args, strict=False)
    )


_replayed: list = []  # what captured ops do, by number


def cpu_generator(generator: torch.Generator) -> torch.Generator:
    """A CPU generator in place of one on the device, whose draws it counts: other numbers, as reproducible."""
    if generator.device.type == "cpu":
        return generator
    draws = generator.get_offset()
    generator.set_offset(draws + 4)  # a multiple of 4 is asked for
    return torch.Generator().manual_seed(generator.initial_seed() + (draws << 32))


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
def _replay(number: int) -> int:
    _replayed[number]()
    return 0


def waits(function, args, kwargs) -> bool:
    """True if torch's own kernel has the host wait for the device."""
    name = function._schema.name.removeprefix("aten::") if hasattr(function, "_schema") else ""
    if name == "copy_":
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return blocking and is_on_device(args[0]) != is_on_device(args[1])
    if name in INDEXING:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return name in WAITING


_waits_are_errors = False


def set_sync_debug_mode(mode: int | str) -> None:
    """In place of torch.cuda's, which asks torch's kernels: with "error", an op or a call of the runtime that waits raises."""
    global _waits_are_errors
    _waits_are_errors = mode in (2, "error")
    runtime().fake_forbid_waits(_waits_are_errors)


def run_on_cpu(function, args, kwargs):
    """The work of the device's kernel for the op."""
    if _waits_are_errors and waits(function, args, kwargs):
        raise RuntimeError(f"{function} has the host wait for the device")
    if not torch.cuda.is_current_stream_capturing():
        return _run_on_cpu(function, args, kwargs)[0]
    if function is torch.ops.aten._local_scalar_dense.default:
        torch.cuda.current_stream().synchronize()  # which no capture allows
    given = [memory_of(t) for t in tree_leaves((args, kwargs)) if is_on_device(t)]
    before = [memory.clone() for memory in given]
    result, outputs = _run_on_cpu(function, args, kwargs)
    for memory, value in zip(given, before, strict=True):
        memory.copy_(value)

    def again():
        for output, value in zip(outputs, _run_on_cpu(function, args, kwargs)[1], strict=True):
            on_cpu(output).copy_(on_cpu(value))

    _replayed.append(again)
    runtime().fake_record(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), _replay, len(_replayed) - 1)
    return result


@functools.cache
def runtime() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["LD_PRELOAD"])


def is_on_device(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _run_on_cpu(function, args, kwargs):
    """The result, and which tensors were made for it."""
    originals, made = [], []

    def lower(value):
        if isinstance(value, torch.Generator):
            return cpu_generator(value)
        if is_on_device(value):
            originals.append((on_cpu(value), value))
            return originals[-1][0]
        return value

    device = kwargs.get("device")
    args, kwargs = tree_map(lower, (args, dict(kwargs)))
    if device is not None:
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
    given = [a for a in args if isinstance(a, torch.Tensor)]
    place = device if device is not None else originals[0][1].device if originals else "cuda"
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
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=place)
        on_cpu(out).copy_(value)
        made.append(out)
        return out

    return tree_map(lift, result), made


# Products with a wider result, which torch has on CUDA alone.
SUBSTITUTES = {
    "mm.dtype": lambda a, b, out_dtype: torch.mm(a.to(out_dtype), b.to(out_dtype)),
    "bmm.dtype": lambda a, b, out_dtype: torch.bmm(a.to(out_dtype), b.to(out_dtype)),
}


def is_view(schema) -> bool:
    """True if the op only makes another view of an argument."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def replace_cuda_kernels() -> None:
    """For the rest of the process."""
    torch.cuda.set_sync_debug_mode = set_sync_debug_mode
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

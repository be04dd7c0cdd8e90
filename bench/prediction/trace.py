"""A training step as the list of ops that it runs, with shapes and bytes, traced on tensors that hold nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_kernels._dispatch import autocast
from amp_kernels._raw import segmented_gemm

# Ops that move nothing: views and queries.
FREE = {
    "prim::device",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
    "detach",
    "alias",
    "lift_fresh",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "_local_scalar_dense",
    "is_pinned",
}


@dataclass
class Op:
    """`reads` and `writes` are (number of the storage, bytes that the op touches of it)."""

    name: str
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    strides: list[tuple[int, ...]]
    results: list[tuple[int, ...]]
    options: dict  # arguments that are no tensors

    @property
    def bytes(self) -> int:
        return sum(size for _, size in (*self.reads, *self.writes))


class Trace(TorchDispatchMode):
    """The ops below autograd, in order, and the most memory that their tensors take together."""

    def __init__(self):
        super().__init__()
        self.ops: list[Op] = []
        self.bytes = self.peak = self.first_peak = 0  # of the second step, and of the first
        self._numbers: dict[int, int] = {}
        self._count = 0

    def hold(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage, which counts as memory until it goes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._count += 1
            self._numbers[key] = self._count
            size = storage.nbytes()
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._gone, key, size)
        return self._numbers[key]

    def _gone(self, key: int, size: int) -> None:
        self.bytes -= size
        del self._numbers[key]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:  # asked of CPU tensors alone, and there is no value
            return float("nan")
        result = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        name = func._schema.name.removeprefix("aten::").replace("amp_kernels::", "ak::")
        places = [self.hold(t) for t in outputs]
        if name in FREE:
            return result
        known = [self.hold(t) for t in inputs]
        if not func._schema.is_mutable and outputs and set(places) <= set(known):
            return result  # a view
        mutated = [
            t
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for t in tree_leaves(value)
            if isinstance(t, torch.Tensor)
        ]
        reads = {self.hold(t): t.nbytes for t in inputs}
        writes = {self.hold(t): t.nbytes for t in (*outputs, *mutated)}
        self.ops.append(
            Op(
                name,
                [tuple(t.shape) for t in inputs],
                [t.dtype for t in (*inputs, *outputs)],
                list(reads.items()),
                list(writes.items()),
                [t.stride() for t in inputs],
                [tuple(t.shape) for t in outputs],
                {
                    argument.name: value
                    for argument, value in zip(func._schema.arguments, args, strict=False)
                    if isinstance(value, (str, bool, int, float))
                }
                | {name: value for name, value in (kwargs or {}).items() if isinstance(value, (str, bool, int, float))},
            )
        )
        return result


class _Attention(torch.autograd.Function):
    """Stands for the fused kernels: reads q, k, v and writes the result; backward reads these and writes three gradients."""

    @staticmethod
    def forward(ctx, q, k, v):
        y = torch.ops.bench.attention(q, k, v)
        ctx.save_for_backward(q, k, v, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return torch.ops.bench.attention_backward(dy, *ctx.saved_tensors)


@torch.library.custom_op("bench::attention", mutates_args=())
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("bench::attention_backward", mutates_args=())
def _attention_backward(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_attention.register_fake(lambda q, k, v: torch.empty_like(q))
_attention_backward.register_fake(
    lambda dy, q, k, v, y: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
)


class _FusedAttention(TorchFunctionMode):
    """scaled_dot_product_attention as the one kernel that it is on a GPU; without one torch takes it apart."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return _Attention.apply(*(t.to(self.dtype) for t in args[:3]))
        return func(*args, **(kwargs or {}))


def trace(build: Callable[[], tuple], dtype: torch.dtype = torch.bfloat16) -> Trace:
    """The ops of a step that ``build()`` returns; under CPU autocast, whose rules are CUDA's for what these models call."""
    watched = mock.patch.object(autocast, "eager", _eager)
    nowhere = mock.patch.object(FakeTensor, "data_ptr", _no_address)
    hopper = mock.patch.object(segmented_gemm, "chosen", _chosen)
    with watched, nowhere, hopper, FakeTensorMode(), _FusedAttention(dtype):
        step = build()
        recorded = Trace()
        with recorded:
            step(lambda call: _under(dtype, call))
            recorded.ops.clear()  # the first step makes what lasts
            recorded.first_peak, recorded.peak = recorded.peak, 0
            step(lambda call: _under(dtype, call))
    return recorded


# In place of functions that are called with tensors. A Mock would keep these alive.


def _eager(*tensors: torch.Tensor) -> bool:
    """The mode only watches."""
    return True


def _chosen(tensor: torch.Tensor) -> bool:
    """The trace is of a GPU that reads segments."""
    return True


def _no_address(tensor: torch.Tensor) -> int:
    """Shadows compare addresses."""
    return 0


def _under(dtype: torch.dtype, call: Callable):
    with torch.autocast("cpu", dtype):
        return call()

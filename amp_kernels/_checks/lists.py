"""Shared by the ops over tensor lists: the tensors that they take, and the numbering of a dense tensor's elements.

Elementwise list ops walk memory, not indices: element ``i`` of a dense tensor is the ``i``-th one in memory, whatever
the order of its dimensions. A parameter in ``channels_last`` therefore costs no copy, as long as its gradient and state
have the same strides.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from .types import type_name

HALF_DTYPES = (torch.float16, torch.bfloat16)
KERNEL_DTYPES = (*HALF_DTYPES, torch.float32)  # read and written by the kernels
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_dense(tensor: Tensor) -> bool:
    """True if the elements cover one range of memory without gaps or overlap, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_order(a: Tensor, b: Tensor) -> bool:
    """True if two tensors of one shape are laid out alike; strides of dimensions of size 1 mean nothing."""
    if a.stride() == b.stride():
        return True
    if a.numel() == 0:
        return True
    return all(s == t for s, t, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size != 1)


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor as a 1-D view in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def overlap(written: Sequence[Tensor], read: Sequence[Tensor] = ()) -> tuple[int, int] | None:
    """The positions, in ``[*written, *read]``, of two tensors that share memory and of which one is written; ``None``
    if there are none. Dense tensors of one device.

    One pass writes all tensors of a list at the same time, so shared elements would be written by two blocks in a race.
    Looks at addresses, which tensors without memory (meta, fake, traced ones) do not have: those share none.
    """
    tensors = [*written, *read]
    if torch.compiler.is_compiling() or not all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors):
        return None
    spans = sorted((at, t.nbytes, i) for i, t in enumerate(tensors) if (at := t.data_ptr()) and t.nbytes)
    if all(begin + size <= after for (begin, size, _), (after, _, _) in itertools.pairwise(spans)):
        return None  # the common case, in a third of the time
    furthest = {True: (0, -1), False: (0, -1)}  # the end of a written and of a read span, and whose it is
    for begin, size, i in spans:
        mine = i < len(written)
        for theirs in (True, False) if mine else (True,):
            end, j = furthest[theirs]
            if begin < end:
                return min(i, j), max(i, j)
        furthest[mine] = max(furthest[mine], (begin + size, i))
    return None


def describe(tensor: Tensor) -> str:
    """For error messages: dtype, shape, strides and device."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} with strides {tuple(tensor.stride())} on {tensor.device}"


def some(texts: Sequence[str], separator: str = ", ", most: int = 10) -> str:
    """For error messages: the first of ``texts``, and how many more there are."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return separator.join([*texts[:most], *more])


def names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_list(op: str, argument: str, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """Raise unless ``tensors`` is a non-empty list of dense tensors of one device and of the given dtypes.

    Raises:
        TypeError: an entry is no tensor, or of another dtype.
        ValueError: the list is empty, or an entry is sparse, not dense, or on another device than the first.
    """
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{op}: {argument} has type {type_name(tensors)}; accepted: a list of tensors")
    if not tensors:
        raise ValueError(f"{op}: {argument} is an empty list; at least one tensor is needed")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {argument}[{i}] has type {type_name(tensor)}; accepted: a tensor")
        if tensor.dtype not in dtypes:
            raise TypeError(f"{op}: {argument}[{i}] is {tensor.dtype}; accepted: {names(dtypes)}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{op}: {argument}[{i}] has layout {tensor.layout}; accepted: torch.strided (dense)")
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"{op}: {argument}[{i}] is on {tensor.device} and {argument}[0] on {tensors[0].device}; "
                "one call takes one device"
            )
        if not is_dense(tensor):
            raise ValueError(
                f"{op}: {argument}[{i}] is {describe(tensor)}, which leaves gaps in memory or overlaps itself; "
                "accepted: any order of dimensions that covers its memory once (call .contiguous())"
            )


def check_scalar(op: str, argument: str, tensor: Tensor, device: torch.device) -> None:
    """Raise unless ``tensor`` holds one float32 element on ``device``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {argument} has type {type_name(tensor)}; accepted: a tensor of one element")
    if tensor.dtype != torch.float32 or tensor.numel() != 1:
        raise TypeError(f"{op}: {argument} is {describe(tensor)}; accepted: one element of float32")
    if tensor.device != device:
        raise ValueError(f"{op}: {argument} is on {tensor.device} and the tensors on {device}; move it there first")


def check_number(op: str, argument: str, value: float, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise unless ``low <= value <= high``; NaN never passes.

    Raises:
        TypeError: ``value`` is no number.
        ValueError: it is out of range.
    """
    try:
        if low <= value <= high:
            return
        error = ValueError
    except (TypeError, ValueError, RuntimeError):  # the last two: arrays and tensors of several elements
        error = TypeError
    start = "above 0" if low == math.ulp(0.0) else f"from {low}"
    raise _refusal(error, op, argument, value, f"a number {start} to {high}")


def check_count(op: str, argument: str, value: int, low: int, high: int | None = None) -> None:
    """Raise unless ``value`` is a whole number of at least ``low``, and at most ``high`` if there is one.

    Raises:
        TypeError: ``value`` is no whole number.
        ValueError: it is out of range.
    """
    try:
        if operator.index(value) >= low and (high is None or value <= high):
            return
        error = ValueError
    except TypeError:
        error = TypeError
    raise _refusal(
        error, op, argument, value, f"a whole number from {low}" + (f" to {high}" if high is not None else "")
    )


def _refusal(error: type[Exception], op: str, argument: str, value: object, accepted: str) -> Exception:
    shown = f"{value!r}, of type {type_name(value)}" if error is TypeError else value
    return error(f"{op}: {argument} is {shown}; accepted: {accepted}")


def within_float32(value: float) -> float:
    """A scalar as kernels take it, who keep it as float32: beyond its range it is infinite, where torch's operations raise."""
    return math.copysign(math.inf, value) if abs(value) > torch.finfo(torch.float32).max else value


def inverse_scale(grad_scale: Tensor | None) -> Tensor | float:
    """``1 / grad_scale``, the reciprocal taken in double and rounded once, as torch.amp.GradScaler does; 1 without a
    scale."""
    return 1.0 if grad_scale is None else grad_scale.reshape(()).double().reciprocal().float()

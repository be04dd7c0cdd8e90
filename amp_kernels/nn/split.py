"""Linear layers whose result is split, such as into queries, keys and values, as ``amp_kernels.linear(split=)`` without an edit.

The layer returns its result as a :class:`Whole`. The first time that notes how the result is split. From then on the layer's autograd
node also has the pieces as results, whose gradients its backward reads in place, and the same split gets them. Nothing else changes: any
other use gets the whole result of the same node. It is for GPUs whose kernels read such gradients. Elsewhere, where no gradient is
recorded, and in compiled code, the layer is an ordinary one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._checks.lists import HALF_DTYPES
from .._dispatch import autocast
from .._dispatch.batch_invariant import is_batch_invariant
from .._dispatch.library import PLAIN
from .._raw import segmented_gemm
from ..ops._autograd import under_transform
from ..ops._tensors import is_strided
from ..ops.linear import linear, whole_and_pieces
from ._wrapped import is_untouched
from .stand_in import StandIn, plain

NAME = "_amp_kernels_split"  # attribute of a layer
Span = tuple[int, int]  # columns


@dataclass
class Split:
    """The sizes of a layer's pieces; none before its result was split for the first time."""

    sizes: tuple[int, ...] = ()
    #: The last result was split. After one that was not, the layer is an ordinary one.
    used: bool = field(default=True, compare=False)


def give_split(layer: torch.nn.Module) -> None:
    """Let ``layer`` make its pieces if its result is split; also if that was given up."""
    vars(layer).setdefault(NAME, Split()).used = True


def result(layer: torch.nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """The result of ``layer``, which has an attribute ``NAME``."""
    bias = layer.bias
    if torch.compiler.is_compiling() or not _may_split(layer, x, weight):
        return linear(x, weight, bias)
    split: Split = vars(layer)[NAME]
    whole, pieces = whole_and_pieces(x, weight, bias, split.sizes) if split.sizes else (linear(x, weight, bias), None)
    split.used = False
    return Whole.of(whole, call=_Call(split, whole, whole._version), stacked=None, pieces=pieces)


def _may_split(layer: torch.nn.Module, x: Tensor, weight: Tensor) -> bool:
    """True if the backward of a call reads gradients of pieces in place."""
    if (
        not vars(layer)[NAME].used
        or type(x) not in PLAIN
        or type(weight) not in PLAIN
        or not is_strided(x)
        or not is_strided(weight)
        or x.ndim < 2
    ):
        return False
    dtype = autocast.dtype_on(x.device.type)
    return (
        torch.is_grad_enabled()
        and (x.requires_grad or weight.requires_grad)
        and (x.dtype == weight.dtype in HALF_DTYPES if dtype is None else torch.float64 not in (x.dtype, weight.dtype))
        and is_untouched(layer)
        and not under_transform()
        and not is_batch_invariant()
        and segmented_gemm.chosen(x)
    )


@dataclass
class _Call:
    """A call of a layer, shared by its result and the views of that."""

    split: Split
    whole: Tensor
    version: int  # of the memory
    spans: list[Span] = field(default_factory=list)  # taken so far, while the sizes are not known
    given: bool = False  # a piece was
    open: bool = True  # nothing but pieces was asked for

    @property
    def columns(self) -> int:
        return self.whole.shape[-1]

    def watch(self, spans: Sequence[Span]) -> None:
        self.spans += spans
        begins, ends = zip(*self.spans, strict=True)
        sizes = tuple(end - begin for begin, end in self.spans)
        if (0, *ends) != (*begins, self.columns):
            return
        self.open = False
        if 2 <= len(sizes) <= segmented_gemm.MOST and all(size and size % segmented_gemm.STEP == 0 for size in sizes):
            self.split.sizes, self.split.used = sizes, True

    def indices(self, spans: Sequence[Span]) -> list[int] | None:
        """The pieces that have these columns."""
        known = _spans(self.split.sizes)
        if not self.open or not all(span in known for span in spans):
            return None
        self.given = self.split.used = True
        return [known.index(span) for span in spans]

    def check(self, hook: bool) -> None:
        """Raise where autograd would miss something: it does not see that pieces are parts of ``whole``."""
        if self.given and (hook or self.whole._version != self.version):
            raise RuntimeError(
                "a linear layer's result was split, and then written to or given a hook; accepted in a model converted with "
                "fuse_residuals=True: a hook before the split, writing to a copy, or the layer in skip"
            )


class View(StandIn):
    """A view of a linear layer's result, made after the split: writes to it raise, like writes to the result."""

    call: _Call

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in _FACTS or torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        return cls.call_function(function, args, kwargs)

    @classmethod
    def call_function(cls, function: Callable, args: tuple, kwargs: dict) -> Any:
        return _used(function, args, kwargs)


class Whole(View):
    """The result of a linear layer, or a view of it. ``pieces`` are results of the same node; ``None`` before the sizes are known."""

    stacked: int | None  # the dimension that pieces are stacked along; None: they are neighbours in the last one
    pieces: list[Tensor] | None

    @classmethod
    def call_function(cls, function: Callable, args: tuple, kwargs: dict) -> Any:
        own = args[0] if args and type(args[0]) is cls else None
        if own is not None and (spans := _SPANS.get(function)) and (asked := spans(own, *args[1:], **kwargs)):
            return own.take_pieces(asked, function, args, kwargs)
        return _used(function, args, kwargs) if own is None else own.view_or_use(function, args, kwargs)

    def take_pieces(self, spans: list[Span], function: Callable, args: tuple, kwargs: dict) -> Any:
        if self.pieces is None and self.call.open:
            self.call.watch(spans)
            return function(*plain(args), **kwargs)
        indices = self.call.indices(spans)
        if indices is None or self.pieces is None:
            return _used(function, args, kwargs)
        found = [self.pieces[i] for i in indices]
        if function is Tensor.__getitem__:
            return found[0]
        return iter(found) if function is Tensor.__iter__ else tuple(found)

    def view_or_use(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        view = _VIEWS.get(function) if self.call.open else None
        if view is None:
            return _used(function, args, kwargs)
        result = function(*plain(args), **kwargs)
        found = view(self, result, *args[1:], **kwargs)
        if found is None:
            self.call.open = False
            return result
        dim, of_piece = found
        pieces = None if self.pieces is None else [of_piece(piece) for piece in self.pieces]
        return Whole.of(result, call=self.call, stacked=dim, pieces=pieces)


def _used(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Anything else: a function of ordinary tensors."""
    views = [each for each in (*args, *kwargs.values()) if isinstance(each, View)]
    checks = [
        (each.call, type(each) is Whole and function in (Tensor.register_hook, Tensor.retain_grad)) for each in views
    ]
    for call, hook in checks:
        call.open = False
        call.check(hook)
    found = function(*plain(args), **plain(kwargs))
    for call, hook in checks:
        call.check(hook)
    viewed = [call for call, _ in checks if call.given and type(found) is Tensor and _shares_memory(found, call.whole)]
    return View.of(found, call=viewed[0]) if viewed else found


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.layout is torch.strided and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


_FACTS = {
    getattr(Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "layout", "ndim", "requires_grad", "shape")
}
_FACTS |= {Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.size, Tensor.__len__}


# ---- functions that ask for pieces: the columns that they ask for


def _spans(sizes: Sequence[int]) -> list[Span]:
    return [*itertools.pairwise((0, *itertools.accumulate(sizes)))]


def _of_split(whole: Whole, sizes: int | Sequence[int], dim: int = 0) -> list[Span] | None:
    if whole.stacked is not None or dim not in (-1, whole.ndim - 1):
        return None
    columns = whole.shape[-1]
    if isinstance(sizes, int):
        sizes = [min(sizes, columns - begin) for begin in range(0, columns, max(sizes, 1))]
    return _spans(sizes)


def _of_chunk(whole: Whole, chunks: int, dim: int = 0) -> list[Span] | None:
    return _of_split(whole, math.ceil(whole.shape[-1] / max(chunks, 1)), dim)


def _spans_of_stacked(whole: Whole) -> list[Span]:
    count = whole.shape[whole.stacked]
    size = whole.call.columns // count
    return [(i * size, (i + 1) * size) for i in range(count)]


def _of_unbind(whole: Whole, dim: int = 0) -> list[Span] | None:
    return _spans_of_stacked(whole) if whole.stacked is not None and dim % whole.ndim == whole.stacked else None


def _of_item(whole: Whole, index: Any) -> list[Span] | None:
    """``[..., a:b]`` of neighbours; ``[:, :, i]`` of what is stacked along the third dimension."""
    *before, last = index if type(index) is tuple and index else (index,)
    if not all(each is Ellipsis or (type(each) is slice and each == slice(None)) for each in before):
        return None
    dim = whole.ndim - 1 if Ellipsis in before else len(before)
    if whole.stacked is None and isinstance(last, slice) and dim == whole.ndim - 1 and last.step in (None, 1):
        begin, end, _ = last.indices(whole.shape[-1])
        return [(begin, end)]
    if (
        whole.stacked is not None
        and dim == whole.stacked
        and type(last) is int
        and -whole.shape[dim] <= last < whole.shape[dim]
    ):
        return [_spans_of_stacked(whole)[last]]
    return None


_SPANS: dict[Callable, Callable] = {
    Tensor.split: _of_split,
    torch.split: _of_split,
    Tensor.chunk: _of_chunk,
    torch.chunk: _of_chunk,
    Tensor.unbind: _of_unbind,
    torch.unbind: _of_unbind,
    Tensor.__iter__: _of_unbind,
    Tensor.__getitem__: _of_item,
}


# ---- views of results whose pieces are views of the pieces: the dimension that these are stacked along, and the view of a piece

_View = tuple[int, Callable[[Tensor], Tensor]]


def _reshaped(whole: Whole, result: Tensor, *args: Any, **kwargs: Any) -> _View | None:
    """Columns in a few equal parts, such as ``view(batch, tokens, 3, heads, width)``."""
    shape, columns = result.shape, whole.call.columns
    dim = next((i for i, n in enumerate(shape) if n > 1 and math.prod(shape[i:]) == columns), None)
    if (
        whole.stacked is not None
        or dim is None
        or shape[dim] > segmented_gemm.MOST
        or result.data_ptr() != whole.origin.data_ptr()
    ):
        return None
    of_piece = (*shape[:dim], *shape[dim + 1 :])
    return dim, lambda piece: piece.reshape(of_piece)


def _permuted(whole: Whole, result: Tensor, *dims: Any, **kwargs: Any) -> _View | None:
    if whole.stacked is None or kwargs:
        return None
    order = [d % whole.ndim for d in (dims if isinstance(dims[0], int) else dims[0])]
    of_piece = [d - (d > whole.stacked) for d in order if d != whole.stacked]
    return order.index(whole.stacked), lambda piece: piece.permute(of_piece)


def _transposed(whole: Whole, result: Tensor, one: int, other: int) -> _View | None:
    order = list(range(whole.ndim))
    order[one], order[other] = order[other], order[one]
    return _permuted(whole, result, order)


_VIEWS: dict[Callable, Callable] = {
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    Tensor.unflatten: _reshaped,
    Tensor.permute: _permuted,
    Tensor.transpose: _transposed,
}

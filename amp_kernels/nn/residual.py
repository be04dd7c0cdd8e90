"""Blocks whose norms make the addition in front of them: ``norm(residual + branch)`` as one kernel, forward and backward.

The block's own forward runs, whatever its signature is, but its submodules return stand-ins for tensors. A stand-in that is added to
a tensor gives a sum that is not computed yet. A norm that gets such a sum computes it in its own pass; everything else that gets one
sees an ordinary tensor. So no model needs a forward of its own here, and the results have the bits of the separate addition.

The addition at the end of a block is made by the first norm of the next block (:class:`Successor`), called from the block in front of
it. The norm's result waits as an attribute of the sum, which is an ordinary tensor, until the next block passes that tensor to its norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks.lists import FLOATS
from .._dispatch import autocast
from .._dispatch.library import PLAIN
from . import copied_norm
from ._derived import base_of, shows
from ._probe import same, standing_in, values
from ._wrapped import own_class
from .fused import is_untouched
from .norm import LayerNorm, RMSNorm

_ADDITIONS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


class Branch:
    """Stands for the tensor that a submodule returned."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in _ADDITIONS and len(args) == 2 and not kwargs:
            return _added(*args)
        return function(*plain(args), **plain(kwargs or {}))

    def __add__(self, other: Any) -> Any:
        return _added(self, other)

    __radd__ = __add__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    @property
    def __class__(self):  # for isinstance
        return torch.Tensor


def _operator(name: str) -> Callable:
    def call(self, *args):
        return getattr(Tensor, name)(self.tensor, *plain(args))

    return call


_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__format__"}
_OWN = {*dir(object), *vars(Branch), "__torch_dispatch__", "__setstate__"} - _COMPARISONS
for _name in dir(Tensor):  # operators are looked up in the class, past __getattr__
    if _name.startswith("__") and _name not in _OWN and callable(getattr(Tensor, _name)):
        setattr(Branch, _name, _operator(_name))


class Sum(Branch):
    """Stands for ``stream + branch``, which is computed when somebody asks for it."""

    def __init__(self, stream: Tensor, branch: Tensor):
        self.stream, self.branch = stream, branch

    def __getattr__(self, name: str) -> Any:
        if name != "tensor":
            return getattr(self.tensor, name)
        self.settle(self.stream + self.branch)
        return self.tensor

    def settle(self, tensor: Tensor) -> None:
        self.tensor = tensor
        del self.stream, self.branch  # their memory may be free now


def _is_open(value: Any) -> bool:
    """True for a sum that nobody has asked for."""
    return type(value) is Sum and "tensor" not in vars(value)


def _added(one: Any, other: Any) -> Any:
    if type(one) is not Branch:
        one, other = other, one
    branch, stream = plain(one), plain(other)
    return Sum(stream, branch) if type(one) is Branch and _keeps_stream(stream, branch) else stream + branch


def _keeps_stream(stream: Any, branch: Tensor) -> bool:
    """True if the sum has the shape and dtype of ``stream``, and a norm takes both."""
    return (
        type(stream) in PLAIN
        and stream.shape == branch.shape
        and stream.device == branch.device
        and stream.layout is branch.layout is torch.strided
        and stream.dtype in FLOATS
        and branch.dtype in FLOATS
        and (stream.dtype == torch.float64) == (branch.dtype == torch.float64)
        and torch.promote_types(stream.dtype, branch.dtype) == stream.dtype
    )


def plain(value: Any) -> Any:
    """``value`` with tensors in place of stand-ins, also inside tuples, lists and dictionaries; the latter two in place."""
    if issubclass(type(value), Branch):
        return value.tensor
    if type(value) is tuple:
        return tuple(map(plain, value))
    if isinstance(value, (list, dict)):
        for key, each in enumerate(value) if isinstance(value, list) else value.items():
            if issubclass(type(each), Branch):
                value[key] = each.tensor
    return value


class _Submodule:
    """Calls a submodule with tensors, and returns a stand-in for its result or the first of its results."""

    fused = False

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.module(*plain(args), **plain(kwargs))
        if type(result) is tuple and result and type(result[0]) is Tensor:
            return (Branch(result[0]), *result[1:])
        return Branch(result) if type(result) is Tensor else result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class _Norm(_Submodule):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            if _is_open(args[0]):
                found = _norm_of_sum(self.module, args[0])
                if found is not None:
                    self.fused = True
                    y, total = found
                    args[0].settle(total)
                    return Branch(y)
            elif (
                type(args[0]) is Tensor
                and (waiting := vars(args[0]).get(_WAITING))
                and waiting.is_for(self.module, args[0])
            ):
                return Branch(waiting.take(args[0]))
        return super().__call__(*args, **kwargs)


_WAITING = "_amp_kernels_norm"  # attribute of a tensor: its norm, computed with it
_SUCCESSOR = "_amp_kernels_successor"  # attribute of a block


class Successor:
    """The norm that gets what a block returns, unless the model calls its blocks in another way than it defines them: then a result
    is not fetched, and no other is made."""

    def __init__(self, norm: torch.nn.Module):
        self.norm = norm
        self.fetched = True  # the last result

    def normalise(self, total: Any) -> None:
        """Compute the sum that a block returns together with its norm."""
        if not _is_open(total) or not self.fetched or _saving_is_hooked() or not _fits(self.norm, total.stream):
            return
        found = _norm_of_sum(self.norm, total)
        if found is not None:
            y, tensor = found
            total.settle(tensor)
            setattr(tensor, _WAITING, _Waiting(self, y, _setting(tensor)))
            self.fetched = False


@dataclass(frozen=True)
class _Waiting:
    """The norm of a tensor, and the setting that it was computed in."""

    successor: Successor
    y: Tensor
    setting: tuple

    def is_for(self, module: torch.nn.Module, tensor: Tensor) -> bool:
        return (
            self.successor.norm is module
            and is_untouched(module)
            and not _saving_is_hooked()
            and self.setting == _setting(tensor)
        )

    def take(self, tensor: Tensor) -> Tensor:
        delattr(tensor, _WAITING)
        self.successor.fetched = True
        return self.y


def _fits(norm: torch.nn.Module, x: Tensor) -> bool:
    """False for a model on several devices, or if the next block is that of a decoder with another width."""
    weight = norm.weight
    shape = norm.normalized_shape if weight is None else weight.shape
    return x.shape[-len(shape) :] == shape and (weight is None or weight.device == x.device)


def _setting(tensor: Tensor) -> tuple:
    return (
        tensor._version,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast.dtype_on(tensor.device.type),
    )


def _saving_is_hooked() -> bool:
    """True in torch.utils.checkpoint: what is computed in one block must be computed there again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _norm_of_sum(module: torch.nn.Module, total: Sum) -> tuple[Tensor, Tensor] | None:
    """``(norm(total), total)`` in one pass; ``None`` if calling ``module`` does more than its norm."""
    if type(module.weight) not in (type(None), *PLAIN) or not is_untouched(module):
        return None
    if type(module).forward is copied_norm.forward:
        return copied_norm.of_sum(module, total.branch, total.stream)
    return module.forward(total.branch, residual=total.stream)


def _is_norm(module: torch.nn.Module) -> bool:
    kind = own_class(module)
    return kind in (LayerNorm, RMSNorm) or (kind.forward is copied_norm.forward and base_of(kind) is not None)


def _lazy(modules: dict[str, Any]) -> dict[str, Any]:
    return {
        name: child
        if child is None or isinstance(child, _CONTAINERS)
        else (_Norm if _is_norm(child) else _Submodule)(child)
        for name, child in modules.items()
    }


@shows("amp_kernels.convert(fuse_residuals=True)")
def forward(self, *args: Any, **kwargs: Any) -> Any:
    base = self._amp_kernels_base
    if torch.compiler.is_compiling():  # the compiler fuses additions itself
        return base.forward(self, *args, **kwargs)
    result = base.forward(standing_in(self, _modules=_lazy(self._modules)), *args, **kwargs)
    if successor := vars(self).get(_SUCCESSOR):
        successor.normalise(_first(result))
    return plain(result)


def _first(result: Any) -> Any:
    return result[0] if type(result) is tuple and result else result


class _Watched(_Norm):
    """A norm in a probe."""

    got: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.got = args[0] if args else None
        return super().__call__(*args, **kwargs)


class _Part(torch.nn.Module):
    """Stands for any other submodule in a probe: a matrix product whose result comes alone or first of ``count`` results."""

    def __init__(self, seed: float, count: int):
        super().__init__()
        self.matrix, self.count = values(_WIDTH, _WIDTH, seed=seed), count

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        y = F.linear(x, self.matrix)
        return y if self.count == 1 else (y, *[None] * (self.count - 1))


_WIDTH = 4
_MOST = 4  # submodules besides norms


@dataclass(frozen=True)
class Block:
    """Facts about a block, from its run on a few numbers."""

    fuses: bool  # a norm got a sum
    entry: str | None  # the norm that got the block's input
    returns_sum: bool  # that nothing in the block has asked for


def fusible(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, torch.nn.Module | None]]:
    """The blocks among ``modules`` in which, or between which, a norm gets a sum; each with the norm that gets its result."""
    blocks = {module: block for module in modules if (block := examined(module))}
    order = list(blocks)
    successors = {
        one: other._modules[blocks[other].entry]
        for one, other in itertools.pairwise(order)
        if blocks[one].returns_sum and blocks[other].entry
    }
    for i, module in enumerate(order):
        if blocks[module].fuses or module in successors or (i and order[i - 1] in successors):
            yield module, successors.get(module)


def set_successor(module: torch.nn.Module, norm: torch.nn.Module | None) -> None:
    """Let ``norm`` make the addition at the end of the block ``module``; ``None`` undoes it."""
    vars(module).pop(_SUCCESSOR, None)
    if norm is not None:
        vars(module)[_SUCCESSOR] = Successor(norm)  # in an object, so that it is no submodule


def examined(module: torch.nn.Module) -> Block | None:
    """Facts about the block ``module``, if it computes the same when norms make its sums; else ``None``.

    The block's forward runs on a few numbers, with small submodules in place of its own. Nobody knows how many results these have to
    return, or how many tensors the block takes, so all small numbers are tried.
    """
    if "forward" in vars(module) or base_of(own_class(module)) not in (None, _base(module)):
        return None
    norms = [name for name, child in module._modules.items() if child is not None and _is_norm(child)]
    others = [name for name, child in module._modules.items() if child is not None and name not in norms]
    if not norms or not 0 < len(others) <= _MOST:
        return None
    counts = [(1,) if type(module._modules[name]) is torch.nn.Dropout else (1, 2, 3) for name in others]
    runs = (
        _run(module, norms, dict(zip(others, chosen, strict=True)), count)
        for count in (1, 2)
        for chosen in itertools.product(*counts)
    )
    return max(filter(None, runs), key=lambda block: (block.fuses, block.returns_sum, block.entry or ""), default=None)


def _base(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class whose forward says what the block does."""
    kind = own_class(module)
    return base_of(kind) if kind.forward is forward else kind


def _run(module: torch.nn.Module, norms: list[str], results: dict[str, int], count: int) -> Block | None:
    """``results``: how many each other submodule returns; ``count``: how many tensors the block takes."""
    parts: dict[str, Any] = dict.fromkeys(module._modules)
    for i, name in enumerate(norms):
        parts[name] = LayerNorm(_WIDTH, device="cpu", dtype=torch.float64)
        parts[name].weight.data = values(_WIDTH, seed=0.2 + i)
    parts |= {name: _Part(0.4 + 0.1 * i, number) for i, (name, number) in enumerate(results.items())}
    watched = {name: _Watched(parts[name]) for name in norms}
    lazy, kind, inputs = _lazy(parts) | watched, _base(module), tuple(values(count, 2, 3, _WIDTH))
    returns_sum = False

    def run(parts: dict[str, Any]) -> Tensor:
        nonlocal returns_sum
        view = standing_in(module, _modules=parts)
        result = _first(kind.forward(view, *inputs))
        if {**vars(view), "_modules": None} != {**vars(module), "_modules": None}:
            raise RuntimeError("it writes its own attributes")  # which a copy of it would lose
        returns_sum = _is_open(result)
        return plain(result)

    try:
        agree = same(lambda _: run(lazy), lambda _: run(parts), inputs[0], 1e-9)
    except Exception:
        return None
    if not agree:
        return None
    entry = next((name for name in norms if watched[name].got is inputs[0]), None)
    return Block(any(norm.fused for norm in watched.values()), entry, returns_sum)

"""Blocks whose norms make the addition in front of them: ``norm(residual + branch)`` as one kernel, forward and backward.

The block's own forward runs, whatever its signature is, but its submodules return stand-ins for tensors. A stand-in that is added to
a tensor gives a sum that is not computed yet. A norm that gets such a sum computes it in its own pass; everything else that gets one
sees an ordinary tensor. So no model needs a forward of its own here, and the results have the bits of the separate addition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks.lists import FLOATS
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
        if len(args) == 1 and not kwargs and type(args[0]) is Sum and "tensor" not in vars(args[0]):
            found = _norm_of_sum(self.module, args[0])
            if found is not None:
                self.fused = True
                y, total = found
                args[0].settle(total)
                return Branch(y)
        return super().__call__(*args, **kwargs)


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
    return plain(base.forward(standing_in(self, _modules=_lazy(self._modules)), *args, **kwargs))


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


def fusible(module: torch.nn.Module) -> bool:
    """True if a norm of the block ``module`` gets a sum, and the block computes the same when the norm makes it.

    The block's forward runs on a few numbers, with small submodules in place of its own. Nobody knows how many results these have to
    return, or how many tensors the block takes, so all small numbers are tried.
    """
    if "forward" in vars(module) or base_of(own_class(module)) is not None:
        return False
    norms = [name for name, child in module._modules.items() if child is not None and _is_norm(child)]
    others = [name for name, child in module._modules.items() if child is not None and name not in norms]
    if not norms or not 0 < len(others) <= _MOST:
        return False
    counts = [(1,) if type(module._modules[name]) is torch.nn.Dropout else (1, 2, 3) for name in others]
    return any(
        _computes(module, norms, dict(zip(others, chosen, strict=True)), inputs)
        for inputs in (1, 2)
        for chosen in itertools.product(*counts)
    )


def _computes(module: torch.nn.Module, norms: list[str], counts: dict[str, int], inputs: int) -> bool:
    parts: dict[str, Any] = dict.fromkeys(module._modules)
    for i, name in enumerate(norms):
        parts[name] = LayerNorm(_WIDTH, device="cpu", dtype=torch.float64)
        parts[name].weight.data = values(_WIDTH, seed=0.2 + i)
    parts |= {name: _Part(0.4 + 0.1 * i, count) for i, (name, count) in enumerate(counts.items())}
    lazy, kind = _lazy(parts), own_class(module)
    tensors = values(inputs, 2, 3, _WIDTH)

    def run(parts: dict[str, Any]) -> Tensor:
        view = standing_in(module, _modules=parts)
        result = plain(kind.forward(view, *tensors))
        if {**vars(view), "_modules": None} != {**vars(module), "_modules": None}:
            raise RuntimeError("it writes its own attributes")  # which a copy of it would lose
        return result[0] if type(result) is tuple else result

    try:
        agree = same(lambda _: run(lazy), lambda _: run(parts), tensors, 1e-9)
    except Exception:
        return False
    return agree and any(each.fused for each in lazy.values() if isinstance(each, _Norm))

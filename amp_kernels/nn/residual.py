"""Blocks whose norms make the addition in front of them: ``norm(residual + branch)`` as one kernel, forward and backward.

The block's own forward runs, whatever its signature is and with all of its control flow, but its submodules return their tensors as
:class:`Branch`. An addition to one is looked up in the block's plan (:mod:`.residual_blocks`), which names the norm that is to
get the sum: of the same block, of a submodule, of the next block, or the last norm of a model. That norm's kernel makes the sum, and
its result waits until the norm is called (:mod:`.waiting`). So no model needs a forward of its own here, a model that does something
else than planned gets torch's additions, and the results have the bits of the separate addition.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .._checks.lists import FLOATS
from .._dispatch.library import PLAIN
from . import copied_norm
from ._derived import base_of, shows
from ._probe import standing_in
from ._wrapped import is_untouched, own_class
from .norm import LayerNorm, RMSNorm
from .stand_in import StandIn, plain
from .waiting import Successor, is_awaited

#: An addition: the norm that was called last in the block, the submodule that the branch comes from, and the number of such before.
Key = tuple[str, str, int]
Plan = dict[Key, Successor]

_ADDITIONS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)
_SUM = "+"  # ends the path of a sum
INPUT = _SUM  # the path of an argument, which is a stream, not a branch
_PLAN = "_amp_kernels_plan"  # attribute of a block


class Run:
    """One call of a block."""

    def __init__(self, plan: Plan):
        self.plan, self.last_norm, self.keys = plan, "", set()
        self.adds_inputs = any(path.startswith(INPUT) for _, path, _ in plan)

    def receive(self, x: Any) -> Any:
        """``x``, an argument of the block."""
        return Branch.of(x, path=INPUT, run=self) if self.adds_inputs and type(x) is Tensor else x

    def enter(self, submodule: Submodule, args: tuple, kwargs: dict) -> None:
        if submodule.is_norm:
            self.last_norm = submodule.path

    def key(self, path: str) -> Key:
        key = next(key for n in itertools.count() if (key := (self.last_norm, path, n)) not in self.keys)
        self.keys.add(key)
        return key

    def add(self, key: Key, one: Tensor, other: Any) -> Any:
        successor = self.plan.get(key)
        if successor is not None and successor.is_ready() and (operands := stream_and_branch(one, other)):
            found = _norm_of_sum(successor.norm, *operands)
            if found is not None:
                y, total = found
                successor.give(total, y)
                return total
        total = one + other
        return Branch.of(total, path=key[1] + _SUM, run=self) if type(total) is Tensor else total


class Branch(StandIn):
    """A tensor that a submodule returned or, if the plan asks, that the block got; or one of the same shape computed from it: dropped
    out, scaled, added to another."""

    path: str
    run: Run

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        compiling = torch.compiler.is_compiling()
        if function in _ADDITIONS and len(args) == 2 and not kwargs and not compiling:
            return _sum(*args)
        if isinstance(function, torch._ops.OpOverload):  # in a compiled function, whose modes know no other classes
            return function(*plain(args), **plain(kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        source = next((each for each in args if type(each) is Branch), None)
        is_attribute = function.__name__ == "__get__"  # such as _base
        if compiling or is_attribute or source is None or type(result) is not Tensor or result.shape != source.shape:
            return result
        return Branch.of(result, path=source.path, run=source.run)


def _sum(one: Any, other: Any) -> Any:
    if type(one) is not Branch or (type(other) is Branch and one.path.endswith(_SUM)):
        one, other = other, one
    return one.run.add(one.run.key(one.path), one.origin, plain(other))


def stream_and_branch(one: Tensor, other: Any) -> tuple[Tensor, Tensor] | None:
    """The operands of a sum if a norm takes them: first the one that has the sum's dtype."""
    if (
        type(one) not in PLAIN
        or type(other) not in PLAIN
        or one.shape != other.shape
        or one.device != other.device
        or not (one.layout is other.layout is torch.strided)
        or one.dtype not in FLOATS
        or other.dtype not in FLOATS
        or (one.dtype == torch.float64) != (other.dtype == torch.float64)
    ):
        return None
    dtype = torch.promote_types(one.dtype, other.dtype)
    return (other, one) if other.dtype == dtype else (one, other) if one.dtype == dtype else None


def _norm_of_sum(norm: torch.nn.Module, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor] | None:
    """``(norm(stream + branch), stream + branch)`` in one pass; ``None`` if calling ``norm`` does more, or it has another width or
    device: that of a decoder, or of a model on several devices."""
    weight = norm.weight
    shape = norm.normalized_shape if weight is None else weight.shape
    if (
        type(weight) not in (type(None), *PLAIN)
        or not is_untouched(norm)
        or stream.shape[-len(shape) :] != shape
        or (weight is not None and weight.device != stream.device)
    ):
        return None
    if type(norm).forward is copied_norm.forward:
        return copied_norm.of_sum(norm, branch, stream)
    return norm.forward(branch, residual=stream)


class Submodule:
    """Calls a submodule with tensors, and returns its result or the first of its results as a branch."""

    def __init__(self, module: torch.nn.Module, path: str, run: Run):
        self.module, self.path, self.run, self.is_norm = module, path, run, is_norm(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.run.enter(self, args, kwargs)
        result = self.module(*plain(args), **plain(kwargs))
        if type(result) is tuple and result:
            return (self._branch(result[0]), *result[1:])
        return self._branch(result)

    def _branch(self, result: Any) -> Any:
        return (
            Branch.of(result, path=self.path, run=self.run)
            if type(result) is Tensor and not is_awaited(result)
            else result
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def is_norm(module: torch.nn.Module) -> bool:
    kind = own_class(module)
    return kind in (LayerNorm, RMSNorm) or (base_of(kind) is not None and kind.forward is copied_norm.forward)


def is_list(module: torch.nn.Module | None) -> bool:
    return isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))


def submodules(modules: dict[str, Any], run: Run, prefix: str = "") -> dict[str, Any]:
    """``modules`` of a block, also those in its lists, as it sees them in this run."""
    found: dict[str, Any] = {}
    for name, child in modules.items():
        if is_list(child):
            found[name] = standing_in(child, _modules=submodules(child._modules, run, f"{prefix}{name}."))
        elif child is None or isinstance(child, (torch.nn.ParameterList, torch.nn.ParameterDict)):
            found[name] = child
        else:
            found[name] = Submodule(child, prefix + name, run)
    return found


@shows("amp_kernels.convert(fuse_residuals=True)")
def forward(self, *args: Any, **kwargs: Any) -> Any:
    base = self._amp_kernels_base
    if torch.compiler.is_compiling():  # the compiler fuses additions itself
        return base.forward(self, *args, **kwargs)
    run = Run(vars(self).get(_PLAN, {}))
    args, kwargs = tuple(map(run.receive, args)), {name: run.receive(x) for name, x in kwargs.items()}
    view = standing_in(self, _modules=submodules(self._modules, run))
    return plain(base.forward(view, *args, **kwargs))


def set_plan(module: torch.nn.Module, plan: Plan | None) -> None:
    """Let norms make the additions of the block ``module``; ``None`` undoes it."""
    vars(module).pop(_PLAN, None)
    if plan:
        vars(module)[_PLAN] = plan

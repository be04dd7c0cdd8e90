"""Blocks whose norms make the addition in front of them: ``norm(residual + branch)`` as one kernel, forward and backward.

The block's own forward runs, whatever its signature is and with all of its control flow, but its submodules return their tensors as
:class:`Branch`. The block's plan (:mod:`.residual_blocks`) names the norm that is to get the sum of such a tensor: of the same block, of
a submodule, of the next block, or the last norm of a model. That norm's kernel makes the sum, and its result waits until the norm is
called (:mod:`.waiting`). So no model needs a forward of its own here, a model that does something else than planned gets torch's
additions, and the results have the bits of the separate addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._checks.lists import FLOATS
from .._dispatch.compiled import subclasses_in_compiled
from .._dispatch.library import PLAIN
from . import copied_norm
from ._derived import base_of, shows
from ._probe import standing_in
from ._wrapped import is_untouched, own_class
from .norm import LayerNorm, RMSNorm
from .waiting import NAME, Successor

_ADDITIONS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)
LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
PLAN = "_amp_kernels_plan"  # attribute of a block: its plan


@dataclass
class Plan:
    """The additions of a block's forward. A step begins with the call of the submodule ``path``, or of the block for ``""``, the first.
    It skips so many additions, and the sum of the next one is for the successor."""

    steps: list[tuple[str, int, Successor | None]]  # path, skipped, successor
    adds_inputs: bool  # the block's arguments are branches


class Run:
    """One call of a block."""

    def __init__(self, plan: Plan):
        self.plan, self.at, self.added = plan, 0, 0

    def enter(self, path: str) -> None:
        paths = [step[0] for step in self.plan.steps]
        if path in paths:
            self.at, self.added = paths.index(path, self.at + 1 if path in paths[self.at + 1 :] else 0), 0

    def add(self, one: Any, other: Any) -> Any:
        if operands := _stream_and_branch(one, other):
            _, skipped, successor = self.plan.steps[self.at]
            planned, self.added = self.added == skipped, self.added + 1
            if planned and successor and successor.is_ready() and (found := _norm_of_sum(successor.norm, *operands)):
                y, total = found
                successor.give(total, y)
                return total
        total = one + other
        return Branch.of(total, self) if type(total) is Tensor else total


class Branch(Tensor):
    """A tensor that a submodule returned or, if the plan asks, that the block got; or one of the same shape computed from it: dropped
    out, scaled, added to another."""

    run: Run

    @classmethod
    def of(cls, tensor: Tensor, run: Run) -> Branch:
        found = tensor.as_subclass(cls)
        found.run = run
        return found

    @property
    def origin(self) -> Tensor:
        """As an ordinary tensor, the same at each call: behind this one in the graph, which may have hooks."""
        with torch._C.DisableTorchFunctionSubclass():
            setting = torch.is_grad_enabled(), self.requires_grad
            if vars(self).get("_setting") != setting:
                self._setting, self._origin = setting, self.as_subclass(Tensor)
            return self._origin

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        compiling = torch.compiler.is_compiling()
        if function in _ADDITIONS and len(args) == 2 and not kwargs and not compiling:
            return next(each for each in args if type(each) is Branch).run.add(*plain(args))
        if isinstance(function, torch._ops.OpOverload):  # in a compiled function, whose modes know no other classes
            return function(*plain(args), **plain(kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        source = next((each for each in args if type(each) is Branch), None)
        computed = function.__name__ != "__get__" and not compiling  # and not an attribute, such as _base
        same_shape = source is not None and type(result) is Tensor and result.shape == source.shape
        return Branch.of(result, source.run) if computed and same_shape else result


def plain(value: Any) -> Any:
    """``value`` with ordinary tensors for branches, also inside tuples, lists and dictionaries; the latter two in place."""
    if isinstance(value, Branch):
        return value.origin
    if type(value) is tuple:
        return tuple(map(plain, value))
    if isinstance(value, (list, dict)):
        for key, each in enumerate(value) if isinstance(value, list) else value.items():
            if isinstance(each, Branch) or type(each) is tuple:
                value[key] = plain(each)
    return value


def _stream_and_branch(one: Any, other: Any) -> tuple[Tensor, Tensor] | None:
    """The operands of a sum if a norm takes them: first the one that has the sum's dtype."""
    if any(type(x) not in PLAIN or x.layout is not torch.strided or x.dtype not in FLOATS for x in (one, other)):
        return None
    dtype, mixed = torch.promote_types(one.dtype, other.dtype), one.dtype != other.dtype
    if one.shape != other.shape or one.device != other.device or (mixed and dtype == torch.float64):
        return None
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
        self.module, self.path, self.run = module, path, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.run.enter(self.path)
        result = self.module(*plain(args), **plain(kwargs))
        first = result[0] if type(result) is tuple and result else result
        if type(first) is not Tensor or NAME in vars(first):  # a sum whose norm waits, in this very object
            return result
        branch = Branch.of(first, self.run)
        return branch if first is result else (branch, *result[1:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def is_norm(module: torch.nn.Module) -> bool:
    kind = own_class(module)
    return kind in (LayerNorm, RMSNorm) or (base_of(kind) is not None and kind.forward is copied_norm.forward)


def _seen(module: torch.nn.Module | None, run: Run, path: str = "") -> Any:
    """A block, or what lies at ``path`` in it, as its forward sees it in this run."""
    if not path or isinstance(module, LISTS):
        children = module._modules.items()
        return standing_in(module, _modules={k: _seen(child, run, f"{path}.{k}".lstrip(".")) for k, child in children})
    untouched = (type(None), torch.nn.ParameterList, torch.nn.ParameterDict)
    return module if isinstance(module, untouched) else Submodule(module, path, run)


@shows("amp_kernels.convert(fuse_residuals=True)")
def forward(self, *args: Any, **kwargs: Any) -> Any:
    base, plan = self._amp_kernels_base, vars(self).get(PLAN)
    if plan is None or torch.compiler.is_compiling():  # the compiler fuses additions itself
        return base.forward(self, *args, **kwargs)
    run = Run(plan)
    if plan.adds_inputs:
        args = tuple(Branch.of(x, run) if type(x) is Tensor else x for x in args)
        kwargs = {name: Branch.of(x, run) if type(x) is Tensor else x for name, x in kwargs.items()}
    before = dict(vars(view := _seen(self, run)))
    with subclasses_in_compiled():
        result = base.forward(view, *args, **kwargs)
    vars(self).update(plain({name: x for name, x in vars(view).items() if before.get(name, view) is not x}))  # written
    return plain(result)

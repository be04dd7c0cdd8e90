"""Steps in programs that torch.compile makes: one op each, which makes the call when the program runs.

A step plans on the host: which gradients there are, what was written since the last one, where everything lies. A compiler
cannot trace that and would gain nothing, because the work is one launch. So the program has an op in the call's place, whose
arguments are the tensors that the call may write: they order it among the program's other ops. Everything else is read
when the op runs, so that nothing of it is guarded, learning rates least of all.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .library import LIBRARY

Method = TypeVar("Method", bound=Callable[..., Any])

_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id
_methods: dict[str, tuple[Callable, str]] = {}  # and the keyword of the number that a call may have

LIBRARY.define(
    "_call_(Tensor(a!)[] tensors, int[] with_grad, str method, int owner, int optimizer, float? number) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),  # a replay would not run the host's part
)


class Traced:
    """What a program reads of an optimizer or scaler. To read an optimizer itself would guard all that stands in its groups."""

    def __init__(self, owner: Any, groups: list[dict[str, Any]] | None = None):
        self.number, self.groups = id(owner), groups
        self.announced = torch.zeros(0, device="cpu")  # written by no one; see _take_back
        _owners[self.number] = owner

    def params(self) -> list[Tensor]:
        return [param for group in self.groups or () for param in group["params"]]


class OneOpEach:
    """Base of what has methods that are :func:`one_op`."""

    _traced: Traced

    def _written(self) -> list[Tensor]:
        """The tensors that such a method may write, besides parameters and gradients, and that a program might read."""
        return []


def one_op(keyword: str = "") -> Callable[[Method], Method]:
    """Makes a method one op of compiled programs if it is called with nothing but an optimizer of this package and a number,
    called ``keyword``; any other call ends the program before it and is made as ever."""

    def decorate(method: Method) -> Method:
        name, untraced = method.__qualname__, torch._disable_dynamo(method)
        _methods[name] = method, keyword

        @functools.wraps(method)
        def call(self: OneOpEach, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                return method(self, *args, **kwargs)
            given = [value for value in (*args, *kwargs.values()) if value is not None]
            numbers = [float(value) for value in given if isinstance(value, (int, float))]
            owners = [value for value in given if isinstance(value, OneOpEach)]
            optimizer = owners[0] if owners else self
            params = optimizer._traced.params()
            if (
                len(numbers) > 1
                or len(owners) > 1
                or len(numbers) + len(owners) < len(given)
                or any(key != keyword for key in kwargs)
                or any(type(param) is not torch.nn.Parameter for param in params)
            ):
                return untraced(self, *args, **kwargs)
            with_grad = [i for i, param in enumerate(params) if param.grad is not None]
            grads = [params[i].grad for i in with_grad]
            tensors = [optimizer._traced.announced, *params, *grads, *self._written()]
            number = numbers[0] if numbers else None
            with torch.no_grad():
                torch.ops.amp_kernels._call_(
                    tensors, with_grad, name, self._traced.number, optimizer._traced.number, number
                )
            return None

        return call

    return decorate


def _call(tensors: list[Tensor], with_grad: list[int], name: str, owner: int, optimizer: int, number: float | None):
    """The op: make the call on the tensors that the program hands over, which usually are those that the objects have."""
    called, stepped = _owners[owner], _owners[optimizer]
    method, keyword = _methods[name]
    params, written = stepped._traced.params(), called._written()
    given = tensors[1 : 1 + len(params)], tensors[1 + len(params) + len(with_grad) :]
    grads = tensors[1 + len(params) : len(tensors) - len(given[1])]
    if len(grads) != len(with_grad) or len(given[1]) != len(written):
        raise RuntimeError(f"{name}: its tensors are others than when it was compiled; call torch.compiler.reset()")
    _take_back(stepped._traced, params)
    # Those that the program keeps elsewhere: it wrote them before, or its backend works on copies.
    moved = [pair for pair in zip([*params, *written], [*given[0], *given[1]], strict=True) if _differ(*pair)]
    of_grads = [(params[i], params[i].grad, grad) for i, grad in zip(with_grad, grads, strict=True)]
    replaced = [(param, own, other) for param, own, other in of_grads if _differ(own, other)]
    with torch.no_grad():
        for own, other in moved:
            own.copy_(other)
        for param, _, other in replaced:
            param.grad = other
        try:
            arguments = [] if stepped is called else [stepped]
            method(called, *arguments, **({} if number is None else {keyword: number}))
        finally:
            for param, own, _ in replaced:
                param.grad = own
        for own, other in moved:
            other.copy_(own)


def _differ(own: Tensor | None, other: Tensor) -> bool:
    return own is None or own.data_ptr() != other.data_ptr()


def _take_back(traced: Traced, params: list[Tensor]) -> None:
    """A program counts its writes in the version counters before it runs. The step counts its own, and takes any other for
    a write that its masters and shadows have missed; so what was announced is subtracted."""
    times = traced.announced._version
    if times:
        counted = [traced.announced, *(param for param in params if not param.is_inference())]
        versions = tuple(tensor._version - times for tensor in counted)
        torch._C._autograd._unsafe_set_version_counter(tuple(counted), versions)


LIBRARY.impl("_call_", _call, "CompositeExplicitAutograd")
torch.library.register_fake("amp_kernels::_call_", lambda *_: None, lib=LIBRARY)

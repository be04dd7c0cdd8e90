"""Calls of optimizers and scalers in programs that torch.compile makes: each is one op, which makes the call when it runs.

The host plans a step: it finds the gradients, the writes since the last step and the addresses. A compiler cannot trace that and
would gain nothing, because the work is one launch. The arguments of the op are the tensors that the call may write; they order
it among the program's other ops. The op reads everything else when it runs, so that no guard depends on it, above all not on
learning rates.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch import config

from .library import LIBRARY

Method = TypeVar("Method", bound=Callable[..., Any])

_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id
_methods: dict[str, tuple[Callable, str]] = {}  # with the keyword of the optional scalar argument

LIBRARY.define(
    "_call_(Tensor(a!) announced, Tensor(b!)[] params, Tensor(c!)[] grads, Tensor(d!)[] written, int[] with_grad, str method, "
    "int owner, int optimizer, float? number) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),  # a replay would not run the host's part
)


class CompiledHandle:
    """Stands for an optimizer or scaler in a program. Reading an optimizer itself would guard all values in its groups."""

    def __init__(self, owner: Any, groups: list[dict[str, Any]] | None = None):
        self.number, self.groups = id(owner), groups
        self.announced = torch.zeros(0, device="cpu")  # never written; see _take_back
        _owners[self.number] = owner

    def params(self) -> list[Tensor]:
        return [param for group in self.groups or () for param in group["params"]]


class HasCompiledCalls:
    """Base of classes with methods that are a :func:`compiled_call`."""

    _compiled_handle: CompiledHandle

    def _written_tensors(self) -> list[Tensor]:
        """The tensors besides parameters and gradients that such a method may write and a program might read."""
        return []


def compiled_call(keyword: str = "", *others: str) -> Callable[[Method], Method]:
    """Make a method one op of compiled programs.

    This applies to calls whose only arguments are an optimizer of this package and a number, ``keyword`` or by one of the ``others``,
    its other names. Any other call causes a graph break.
    """

    def decorate(method: Method) -> Method:
        name, untraced = method.__qualname__, torch._disable_dynamo(method)
        parameter = inspect.signature(method).parameters.get(keyword)
        by_keyword = parameter is not None and parameter.kind is parameter.KEYWORD_ONLY
        _methods[name] = method, keyword

        @functools.wraps(method)
        def call(self: HasCompiledCalls, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                return method(self, *args, **kwargs)
            given = [value for value in (*args, *kwargs.values()) if value is not None]
            numbers = [float(value) for value in given if isinstance(value, (int, float))]
            owners = [value for value in given if isinstance(value, HasCompiledCalls)]
            optimizer = owners[0] if owners else self
            params = optimizer._compiled_handle.params()
            if (
                len(numbers) > 1
                or len(owners) > 1
                or len(numbers) + len(owners) < len(given)
                or any(key not in (keyword, *others) for key in kwargs)
                or (by_keyword and any(isinstance(value, (int, float)) for value in args))
                or any(type(param) is not torch.nn.Parameter for param in params)
            ):
                return untraced(self, *args, **kwargs)
            with_grad = [i for i, param in enumerate(params) if param.grad is not None]
            grads = [params[i].grad for i in with_grad]
            number = numbers[0] if numbers else None
            called, stepped = self._compiled_handle, optimizer._compiled_handle
            with torch.no_grad():
                torch.ops.amp_kernels._call_(
                    stepped.announced,
                    params,
                    grads,
                    self._written_tensors(),
                    with_grad,
                    name,
                    called.number,
                    stepped.number,
                    number,
                )
            return None

        return call

    return decorate


def _call(
    announced: Tensor,
    params: list[Tensor],
    grads: list[Tensor],
    written: list[Tensor],
    with_grad: list[int],
    name: str,
    owner: int,
    optimizer: int,
    number: float | None,
) -> None:
    """The op: make the call on the program's tensors, which usually are those that the objects have. ``with_grad``: the numbers of the
    parameters that have ``grads``."""
    called, stepped = _owners[owner], _owners[optimizer]
    method, keyword = _methods[name]
    own_params, own_written = stepped._compiled_handle.params(), called._written_tensors()
    if len(params) != len(own_params) or len(written) != len(own_written):
        raise RuntimeError(f"{name}: its tensors are others than when it was compiled; call torch.compiler.reset()")
    _take_back(stepped._compiled_handle, own_params)
    # The program has other tensors where it wrote them before or its backend works on copies.
    moved = [pair for pair in zip([*own_params, *own_written], [*params, *written], strict=True) if _differ(*pair)]
    of_grads = [(own_params[i], own_params[i].grad, grad) for i, grad in zip(with_grad, grads, strict=True)]
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


def _take_back(handle: CompiledHandle, params: list[Tensor]) -> None:
    """Subtract from the version counters the writes that a program announces before it runs. The step counts its own, and
    takes any other for a write that its masters and shadows have missed."""
    times = handle.announced._version
    if times:
        counted = [handle.announced, *(param for param in params if not param.is_inference())]
        versions = tuple(tensor._version - times for tensor in counted)
        torch._C._autograd._unsafe_set_version_counter(tuple(counted), versions)


@contextlib.contextmanager
def subclasses_in_compiled() -> Iterator[None]:
    """Within the block compiled functions take tensors of a subclass: torch 2.14 looks for aliases in their first call, in a mode that
    raises for these."""
    checks = getattr(config, "check_custom_op_aliasing", False)
    if checks:
        config.check_custom_op_aliasing = False
    try:
        yield
    finally:
        if checks:
            config.check_custom_op_aliasing = True


LIBRARY.impl("_call_", _call, "CompositeExplicitAutograd")
torch.library.register_fake("amp_kernels::_call_", lambda *_: None, lib=LIBRARY)

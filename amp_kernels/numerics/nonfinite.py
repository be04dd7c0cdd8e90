"""Find the module that produced the first infinity or NaN, in the forward or the backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.weak import WeakTensorKeyDictionary

from .._checks import lists
from .._checks.types import check_scaler, type_name
from .._raw.exponent_histogram import INFINITY_BIN, exponent_histogram
from ..amp import GradScaler
from ._hooks import TensorHooks
from ._statistics import Statistics, values_of

_LISTED = 8  # names per list in a report


class NonFiniteError(RuntimeError):
    """Raised by :class:`amp_kernels.numerics.find_nonfinite`; the message is its report.

    Examples:
        >>> issubclass(ak.numerics.NonFiniteError, RuntimeError)
        True
    """


@dataclass(eq=False)
class _Call:
    """One call of a module, or of an operation inside a module."""

    name: str
    kind: str  # the class, or the operation
    parent: _Call | None

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


@dataclass(eq=False)
class _Look:
    """One observation of a tensor: its role in a call, and its histogram, which stays on the device."""

    call: _Call | None
    role: Literal["input", "parameter", "output", "gradient of output", "gradient of input", "gradient of parameter"]
    place: str  # position such as "[0]" in nested inputs and outputs, or a parameter's name
    shape: tuple[int, ...]
    dtype: torch.dtype
    counts: Tensor
    largest: Tensor
    made_by: str = ""  # the autograd node of an output, which names its last operation

    def __str__(self) -> str:
        statistics = Statistics.of(self.counts.tolist(), self.largest.item(), self.shape, self.dtype)
        return f"{self.role} {self.place}".rstrip() + f": {statistics}"


class _EveryOp(TorchDispatchMode):
    """Shows the finder each operation, except views."""

    def __init__(self, finder: find_nonfinite) -> None:
        super().__init__()
        self._finder = finder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        call = self._finder._before_operation(str(func), (args, kwargs) if kwargs else args)
        outputs = func(*args, **kwargs)
        self._finder._after_operation(call, outputs)
        return outputs


class find_nonfinite:
    """Name the module that produced the first infinity or NaN inside the block: the *producer*, whose inputs and parameters
    were finite. Modules that only pass it on are listed as *propagators*.

    Every module's inputs, parameters and outputs are checked in the forward, and their gradients in the backward. A check reads
    the tensor once; its result stays on the device. The host reads one flag per step: when the model's next forward begins, in
    :meth:`check`, and at the end of the block. The block leaves the model unchanged, also after an exception.

    With a gradient scaler, infinities in the backward are expected: the scale was too high, the step is skipped and the scale
    backs off. They are reported only after ``patience`` consecutive steps with the scale at its minimum, where backing off no
    longer helps. A non-finite forward is always reported, because no scale helps there.

    Args:
        model: the module whose training is checked. Inputs and outputs may be nested (tuples, lists, dicts, dataclasses, any
            torch pytree); tensors of non-floating dtypes are ignored.
        scaler: the gradient scaler, if one is in use; torch's or this package's.
        patience: number of consecutive overflows at the minimum scale after which they are reported.
        on_detect: ``"raise"`` a :class:`amp_kernels.numerics.NonFiniteError`, or ``"warn"`` once per step and continue.
        ops: also check every torch operation in the model's forward, and name it. Slow.

    Raises:
        NonFiniteError: a value was not finite. Raised by the model's next forward, :meth:`check`, or the end of the block.
        TypeError: ``model`` is not a module.
        ValueError: ``on_detect`` or ``patience`` is not accepted.

    Examples:
        >>> class Root(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.sqrt()
        >>> model = torch.nn.Sequential(torch.nn.Identity(), Root(), torch.nn.ReLU())
        >>> try:
        ...     with ak.numerics.find_nonfinite(model):
        ...         y = model(torch.tensor([4.0, -1.0]))
        ... except ak.numerics.NonFiniteError as error:
        ...     print(error)
        step 0: made in the forward of '1' (Root)
          input [0]: float32[2]: finite, largest finite magnitude 4
          output: float32[2]: 1 NaN, 0 inf of 2, largest finite magnitude 2
        passed on by '2' (ReLU)
    """

    def __init__(
        self,
        model: nn.Module,
        scaler: torch.amp.GradScaler | None = None,
        *,
        patience: int = 8,
        on_detect: Literal["raise", "warn"] = "raise",
        ops: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"find_nonfinite: model has type {type_name(model)}; accepted: a torch.nn.Module")
        if on_detect not in ("raise", "warn"):
            raise ValueError(f"find_nonfinite: on_detect is {on_detect!r}; accepted: 'raise' and 'warn'")
        check_scaler("find_nonfinite", scaler)
        lists.check_number("find_nonfinite", "patience", patience, 1)
        self._model, self._scaler, self._patience, self._on_detect = model, scaler, patience, on_detect
        self._every_op = _EveryOp(self) if ops else None
        self._handles: list[Any] = []
        self._hooks = TensorHooks()
        self._step = self._at_minimum = 0
        self._forget()

    def _forget(self) -> None:
        self._looks: list[_Look] = []  # in chronological order
        self._open: list[_Call] = []
        # An output is usually the next module's input, so each tensor is read once: tensor -> (version, counts, largest).
        self._known = WeakTensorKeyDictionary()

    # ---- the block ----

    def __enter__(self) -> find_nonfinite:
        for name, module in self._model.named_modules():
            shown = repr(name) if name else "the model"
            self._handles.append(module.register_forward_pre_hook(self._before(shown), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))
        for name, param in self._model.named_parameters():
            if param.requires_grad and param.is_leaf:
                self._handles.append(param.register_post_accumulate_grad_hook(self._of_parameter(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.remove()
        try:
            if kind is None:
                self.check()
            elif issubclass(kind, Exception) and not issubclass(kind, NonFiniteError):
                report = self._report()  # this may be the cause of the exception
                if report is not None:
                    warnings.warn(report, stacklevel=2)
        finally:
            self._forget()

    def check(self) -> None:
        """Read the flag of the current step and begin the next one. Waits for the device.

        Raises:
            NonFiniteError: a value was not finite, and ``on_detect`` is ``"raise"``.
        """
        report = self._report()
        self._forget()
        self._step += 1
        if report is None:
            return
        if self._on_detect == "raise":
            raise NonFiniteError(report)
        warnings.warn(report, stacklevel=2)

    # ---- looking ----

    def _look(self, call: _Call | None, role: Any, place: str, tensor: Tensor, made_by: str = "") -> None:
        if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.device.type == "meta":
            return
        version = 0 if tensor.is_inference() else tensor._version
        known = self._known.get(tensor)
        if known is None or known[0] != version:
            with torch.no_grad(), _disable_current_modes():
                (counts,), (largest,) = exponent_histogram([values_of(tensor)])
            known = self._known[tensor] = (version, counts, largest)
        self._looks.append(_Look(call, role, place, tuple(tensor.shape), tensor.dtype, *known[1:], made_by))

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if module is self._model and not self._open and self._looks:
                self.check()
            call = _Call(name, type(module).__name__, self._open[-1] if self._open else None)
            for place, tensor in _tensors_in((args, kwargs) if kwargs else args):
                self._look(call, "input", place, tensor)
                if tensor.requires_grad:
                    self._of_gradient(call, "gradient of input", place, tensor)
            for key, param in module.named_parameters(recurse=False):
                self._look(call, "parameter", key, param)
            self._open.append(call)
            if self._every_op is not None and len(self._open) == 1:
                self._every_op.__enter__()

        return hook

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._open:
            return
        call = self._open.pop()
        if self._every_op is not None and not self._open:
            self._every_op.__exit__(None, None, None)
        for place, tensor in _tensors_in(output):
            made_by = "" if tensor.grad_fn is None else tensor.grad_fn.name()
            self._look(call, "output", place, tensor, made_by)
            if made_by:
                self._of_gradient(call, "gradient of output", place, tensor, made_by)

    def _before_operation(self, operation: str, inputs: Any) -> _Call:
        call = _Call(self._open[-1].name, operation, self._open[-1])
        for place, tensor in _tensors_in(inputs):
            self._look(call, "input", place, tensor)
        return call

    def _after_operation(self, call: _Call, outputs: Any) -> None:
        for place, tensor in _tensors_in(outputs):
            self._look(call, "output", place, tensor)

    def _of_gradient(self, call: _Call, role: str, place: str, tensor: Tensor, made_by: str = "") -> None:
        self._hooks.add(tensor, (call.name, role, place), lambda grad: self._look(call, role, place, grad, made_by))

    def _of_parameter(self, name: str) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            if param.grad is not None:
                self._look(None, "gradient of parameter", name, param.grad)

        return hook

    # ---- the verdict ----

    def _report(self) -> str | None:
        """The report, or ``None`` if there is nothing to report."""
        bad = _not_finite(self._looks)
        forward = [look for look in bad if not look.role.startswith("gradient")]
        if bad and not forward and self._scaler is not None and self._scaler.is_enabled():
            lowest = self._scaler._rule.min_scale if isinstance(self._scaler, GradScaler) else 0.0
            minimum = max(lowest, torch.finfo(torch.float32).tiny)
            self._at_minimum = self._at_minimum + 1 if self._scaler.get_scale() <= minimum else 0
            if self._at_minimum < self._patience:
                return None
        elif not bad:
            self._at_minimum = 0
            return None
        lines = self._of_forward(forward) if forward else self._of_backward(bad)
        if self._at_minimum:
            lines.append(f"the last {self._at_minimum} steps overflowed with the scale at its minimum")
        rank = f"rank {torch.distributed.get_rank()}, " if _distributed() else ""
        return "\n".join([f"{rank}step {self._step}: {lines[0]}", *lines[1:]])

    def _of_forward(self, bad: list[_Look]) -> list[str]:
        calls = list(dict.fromkeys(look.call for look in bad))
        tainted = {look.call for look in bad if look.role in ("input", "parameter")}
        producers = [call for call in calls if call not in tainted]
        # Inner calls end before outer ones, so the first non-finite output is that of the innermost producer.
        first = next((look for look in bad if look.role != "output" or look.call not in tainted), bad[0])
        if first.role == "output":
            producer = first.call
            lines = [f"made in the forward of {_with_operations(producer, bad, 'output')}"]
            lines += [f"  {look}" for look in self._looks if look.call is producer and look.role in ("input", "output")]
        else:
            lines = [f"came in with {first.role} {first.place} of {first.call}", f"  {first}"]
        others = [call for call in producers if not _within(first.call, call)]
        passed_on = [call for call in calls if call in tainted and call is not first.call]
        also = [_with_operations(call, bad, "output") for call in others]
        return lines + _listed("also made by", also) + _listed("passed on by", passed_on)

    def _of_backward(self, bad: list[_Look]) -> list[str]:
        first = bad[0]
        # The gradient of a module's input is usually that of another's output: one tensor, one observation.
        same = [look for look in bad if look.counts is first.counts]
        entered = {look.call for look in bad if look.role == "gradient of output"}
        makers = [look.call for look in same if look.role == "gradient of input" and look.call not in entered]
        if makers:
            producer = makers[-1]
            lines = [f"made in the backward of {_with_operations(producer, self._looks, 'gradient of output')}"]
            lines += [f"  {look}" for look in self._looks if look.call is producer and look.role.startswith("gradient")]
        elif first.role == "gradient of parameter":
            lines = [f"made in the gradient of parameter {first.place!r}"]
        elif first.call is not None and (parent := first.call.parent) is not None and parent not in entered:
            lines = [f"made in the backward of {parent}, by an operation of its own after {first.call}", f"  {first}"]
        else:
            named = _with_operations(first.call, [first], "gradient of output")
            lines = [f"came into the model from the loss, as the gradient of an output of {named}", f"  {first}"]
        grads = [look for look in bad if look.role == "gradient of parameter"]
        every = sum(look.role == "gradient of parameter" for look in self._looks)
        return lines + _listed(f"not finite, of {every} gradients of parameters:", [look.place for look in grads])


def _tensors_in(nested: Any, _around: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(position, tensor)``, for example ``("['b'][0]", ...)``. Enters torch's pytree nodes, dataclasses, and subclasses
    of dict, list and tuple, which pytree treats as leaves."""
    for path, leaf in tree_flatten_with_path(nested)[0]:
        place = keystr(path)
        if isinstance(leaf, Tensor):
            yield place, leaf
        elif id(leaf) not in _around:  # an object may contain itself
            for key, value in _entries(leaf):
                for inner, tensor in _tensors_in(value, (*_around, id(leaf))):
                    yield f"{place}{key}{inner}", tensor


def _entries(leaf: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(leaf) and not isinstance(leaf, type):
        yield from ((f".{field.name}", getattr(leaf, field.name, None)) for field in fields(leaf))
    elif isinstance(leaf, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in leaf.items())
    elif isinstance(leaf, (list, tuple)):
        yield from ((f"[{i}]", value) for i, value in enumerate(leaf))


def _within(inner: _Call | None, outer: _Call | None) -> bool:
    while inner is not None:
        if inner is outer:
            return True
        inner = inner.parent
    return False


def _with_operations(call: _Call, looks: Sequence[_Look], role: str) -> str:
    """``call`` with the last operations that produced its observed tensors in ``role``."""
    operations = dict.fromkeys(
        look.made_by for look in looks if look.call is call and look.role == role and look.made_by
    )
    several = "s" if len(operations) > 1 else ""
    return f"{call}, last operation{several} {' and '.join(operations)}" if operations else str(call)


def _not_finite(looks: list[_Look]) -> list[_Look]:
    """The observations with non-finite values, with one host read per device."""
    by_device: dict[torch.device, list[_Look]] = {}
    for look in looks:
        by_device.setdefault(look.counts.device, []).append(look)
    bad = set()
    for of_device in by_device.values():
        flags = torch.stack([look.counts[INFINITY_BIN:] for look in of_device]).sum(1).tolist()
        bad |= {look for look, flag in zip(of_device, flags, strict=True) if flag}
    return [look for look in looks if look in bad]


def _listed(title: str, things: Sequence[object]) -> list[str]:
    names = list(dict.fromkeys(map(str, things)))
    if not names:
        return []
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return [f"{title} {', '.join(names[:_LISTED])}{more}"]


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

"""Gradient release: each parameter is updated within backward, as soon as its gradient is complete, and the gradient is freed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from .._checks.types import type_name
from .._sharding.local import is_dtensor, like, local
from ._base import FusedOptimizer
from ._gradients import StepRequest
from ._groups import labels
from ._host import HostUpdates

#: Options, and keys of groups, that need all gradients at once.
_NEED_ALL = ("max_grad_norm", "skip_nonfinite", "unscale_grads", "independent_groups", "spike_zscore")
#: Those that gradients in host memory can wait for.
_WAITED_FOR = ("max_grad_norm", "skip_nonfinite")
_RACES = TorchVersion(torch.__version__) < (2, 13)
_handles: weakref.WeakSet[ReleasedGradients] = weakref.WeakSet()


def release_gradients(optimizer: FusedOptimizer) -> ReleasedGradients:
    """Update each parameter within backward, as soon as its gradient is complete, and free the gradient: during backward one
    gradient is alive, after it none. Weights, state and ``state_dict`` are those of a plain step, bit for bit.

    ``optimizer.step()`` ends a step and stays required. It also updates what was not released: parameters whose gradient was put by
    hand or held, which were frozen, or whose group was added later. Its hooks run once. ``zero_grad()`` ends a step, too. A change
    of a learning rate counts from the next backward on.

    Refused is what needs all gradients before the first update: see Raises.

    Args:
        optimizer: an optimizer of this package. Its parameters may be DTensors (``fully_shard``).

    Returns:
        A handle; a context manager that removes itself.

    Raises:
        TypeError: ``optimizer`` is none of this package.
        ValueError: it releases its gradients already, or it has ``max_grad_norm``, ``skip_nonfinite`` or ``unscale_grads``; a
            parameter has a ``main_grad`` (:func:`amp_kernels.nn.accumulate_fp32`), is no DTensor in a process group above one rank
            (DistributedDataParallel would sum after the update), or is offloaded by ``fully_shard`` in a torch before 2.13. Each is
            also raised by the next backward if it comes later, before anything is written.
        RuntimeError: from ``backward``: a second gradient of a parameter before ``step()``, a scaled loss, or the backward before
            failed. From ``step``: a closure, a second gradient, or a scaler or ``max_norm`` that come after the updates.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = ak.optim.AdamW(model.parameters(), lr=1e-2)
        >>> released = ak.optim.release_gradients(optimizer)
        >>> with released.hold():  # all micro-batches but the last
        ...     model(torch.ones(3, 4)).square().mean().backward()
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["step"]
        tensor(1.)
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"release_gradients: optimizer has type {type_name(optimizer)}; accepted: an optimizer of amp_kernels"
        )
    if optimizer._released is not None:
        raise ValueError(
            f"release_gradients: {type(optimizer).__name__} releases its gradients already; accepted: remove() of that handle first"
        )
    _refuse(optimizer)
    optimizer._released = ReleasedGradients(optimizer)
    return optimizer._released


class ReleasedGradients:
    """The handle of :func:`release_gradients`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = ak.optim.SGD([weight], lr=0.5)
        >>> with ak.optim.release_gradients(optimizer):
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> weight.data, weight.grad
        (tensor([0.5000, 0.5000]), None)
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # parameters keep their hooks, which must not keep the state
        self._updated: set[int] = set()  # ids of parameters, since the last step()
        self._scaled_kept = False  # whether kept gradients carry a scale
        self._holds = 0
        self._task = -1  # the number of the last backward
        self._scaled: Callable[[], _Scaled | None] = _nothing  # the last one of a scaled loss, while it lasts
        self._unfinished: list[weakref.ref[_Backward]] = []
        self._lock = threading.Lock()  # backward has a thread for each device
        params = [param for param in optimizer._params() if param.requires_grad]
        self._hooks = [param.register_post_accumulate_grad_hook(self._hook) for param in params]
        _handles.add(self)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Backward passes within accumulate gradients, as without release. The next one outside releases those that it completes;
        ``step()`` takes the rest."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def remove(self) -> None:
        """Make the optimizer a plain one again."""
        for hook in self._hooks:
            hook.remove()
        _handles.discard(self)
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._released is self:
            if (host := optimizer._plan.host) is not None:
                host.finish()
                host.wait_for_kept()
                for param in optimizer._params():
                    if id(param) in host.kept:  # back to where a plain step looks for it
                        param.grad = like(host.kept[id(param)].to(local(param).device, copy=True), param)
                host.drop()
            optimizer._released = None
            optimizer._plan.forget()

    def __enter__(self) -> ReleasedGradients:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # ---- within backward ----

    def _hook(self, param: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or param.grad is None:
            return
        with self._lock:
            plan, key = optimizer._plan, id(param)
            if key in self._updated or (plan.host is not None and key in plan.host.kept):
                self._refuse_after_failure(optimizer)
                raise _second_gradient(optimizer, param)
            if self._holds:
                return
            task = torch._C._current_graph_task_id()
            if task != self._task or task < 0:
                self._begin(optimizer, task)
            scaled = self._scaled()
            if plan.host is not None and (scaled or optimizer.max_grad_norm is not None or optimizer.skip_nonfinite):
                # One decision for all gradients comes before the first update.
                if plan.keep_alone(param, scaled and scaled.scale):
                    self._scaled_kept |= scaled is not None
                    param.grad = None
            elif plan.step_alone(param, optimizer.param_groups, optimizer.state):
                self._updated.add(key)
                param.grad = None

    def _begin(self, optimizer: FusedOptimizer, task: int) -> None:
        """At the first gradient of a backward, before anything is written."""
        self._refuse_after_failure(optimizer)
        if self._scaled() and optimizer._plan.host is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}: the loss was scaled by GradScaler, which checks all gradients before an update, and each is "
                "released as it arrives; accepted: a loss without a scale, or state_device='cpu'"
            )
        _refuse(optimizer)
        optimizer._plan.begin_alone(optimizer.param_groups)
        if task >= 0:  # not a call from outside of backward
            done = _Backward(self._unfinished, optimizer._plan.host)
            torch.autograd.Variable._execution_engine.queue_callback(done)
        self._task = task

    def _refuse_after_failure(self, optimizer: FusedOptimizer) -> None:
        if any(backward() is None for backward in self._unfinished):
            raise RuntimeError(
                f"{type(optimizer).__name__}: the backward before failed, so that some parameters are a step ahead, or some gradients "
                "are in host memory; accepted: optimizer.zero_grad() after a failure"
            )

    # ---- for the optimizer ----

    def check_step(self, request: StepRequest) -> bool:
        """Before ``step()``: whether it has anything to update. Raises for gradients or a ``request`` that come too late."""
        optimizer = self._optimizer()
        kept: dict[int, Tensor] = {}
        if (host := optimizer._plan.host) is not None:
            host.finish()
            kept = host.kept
        params = [param for param in optimizer._params() if param.grad is not None]
        for param in params:
            if id(param) in self._updated or id(param) in kept:
                raise _second_gradient(optimizer, param)
        if kept:
            self._refuse_after_failure(optimizer)
        if kept and self._scaled_kept and request.grad_scale is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}: the released gradients carry the scale of GradScaler, and step() came without it; accepted: "
                "scaler.step(optimizer), without scaler.unscale_() before"
            )
        if self._updated and any(value is not None and value is not False for value in request):
            raise RuntimeError(
                f"{type(optimizer).__name__}: a scaler, max_norm or an option asks for a scale, a check or a norm in step(), after "
                f"{len(self._updated)} parameters were updated and their gradients released; accepted: a step without"
            )
        return bool(params) or bool(kept) or not self._updated

    def end_step(self) -> None:
        """After ``step()``."""
        self._updated.clear()
        self._scaled_kept = False
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._plan.host is not None:
            optimizer._plan.host.finish()
            optimizer._plan.host.drop()

    def reset(self) -> None:
        """In ``zero_grad()``, which gives a failed backward up."""
        self.end_step()
        self._unfinished = []


class _Backward:
    """One that has begun. autograd drops it at the end, and calls it before if there was no error."""

    def __init__(self, unfinished: list[weakref.ref[_Backward]], host: HostUpdates | None) -> None:
        self._unfinished, self._own, self._host = unfinished, weakref.ref(self), host
        unfinished.append(self._own)

    def __call__(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.finish()
        self._unfinished.remove(self._own)

    def __del__(self) -> None:
        if self._host is not None:  # after an error: no update is still under way when the caller sees it
            self._host.wait()


class _Scaled:
    """The backward of a loss with a ``scale``. autograd keeps it to the end, also of a failed one, and so through backwards within it,
    as of reentrant checkpoints."""

    def __init__(self, scale: Tensor | None) -> None:
        self.scale, self._handles = scale, list(_handles)
        for handle in self._handles:
            handle._scaled = weakref.ref(self)

    def __call__(self) -> None:
        for handle in self._handles:
            if handle._scaled() is self:
                handle._scaled = _nothing


def _nothing() -> None:
    """No backward."""


def watch_scaled(losses: Any, scale: Tensor | None) -> None:
    """Have the backward of losses with a ``scale``, a tensor or tensors in lists, tell the handles so."""
    for loss in pytree.tree_leaves(losses) if _handles else ():
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(partial(_note_scaled, scale))


def _note_scaled(scale: Tensor | None, _: Tensor) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(_Scaled(scale))


def _refuse(optimizer: FusedOptimizer) -> None:
    """Raise for what needs all gradients, or what keeps them."""
    name = type(optimizer).__name__
    waits = optimizer._plan.host is not None  # for a decision
    for values in (vars(optimizer._options), *optimizer.param_groups):
        for option in _NEED_ALL:
            value = values.get(option)
            if value is not None and value is not False and not (waits and option in _WAITED_FOR):
                raise ValueError(
                    f"{name}: {option} is {value!r}, which needs all gradients, and each is released as it arrives; accepted: "
                    f"None, False, {'state_device=' + repr('cpu') + ', ' if option in _WAITED_FOR else ''}or remove() of the handle"
                )
    is_shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    for label, param in chain.from_iterable(map(labels, optimizer.param_groups)):
        reason = None
        if hasattr(param, "main_grad"):
            reason = (
                "has a main_grad, whose memory is not released; accepted: parameters without (ak.nn.accumulate_fp32)"
            )
        elif is_shared and param.requires_grad and not is_dtensor(param):
            reason = (
                f"is no DTensor in a process group of {dist.get_world_size()} ranks, whose gradients DistributedDataParallel sums after "
                "the update; accepted: parameters of fully_shard"
            )
        elif is_dtensor(param) and local(param).device.type != param.device_mesh.device_type and _RACES:
            reason = "is offloaded by fully_shard, whose hooks read gradients in flight before torch 2.13; accepted: no offloading"
        if reason is not None:
            raise ValueError(f"{name}: {label} {reason}")


def _second_gradient(optimizer: FusedOptimizer, param: Tensor) -> RuntimeError:
    names = {id(it): name for group in optimizer.param_groups for name, it in labels(group)}
    label = f"{names.get(id(param), 'a parameter')}, of shape {list(param.shape)},"
    return RuntimeError(
        f"{type(optimizer).__name__}: {label} has a second gradient before step(), and the first was released; accepted: one backward "
        "for each step(), the others in `with released.hold():`, and checkpoint(use_reentrant=False)"
    )

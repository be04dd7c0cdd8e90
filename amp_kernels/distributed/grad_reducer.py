"""Gradients averaged over ranks in the dtype of their accumulation, which DistributedDataParallel cannot do."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from .._checks.modules import check_module
from .._checks.types import type_name
from .._sharding.local import is_dtensor
from .._updates.state import state_layout, view_like

FIRST_BUCKET_BYTES = 2**20  # small, as in DistributedDataParallel, so that communication starts early


class Bucket:
    """Gradients in one flat tensor, which one collective averages. It has the interface of :class:`torch.distributed.GradBucket`
    for communication hooks: index, buffer, gradients, parameters, is_last."""

    def __init__(self, index: int, params: list[Tensor], dtype: torch.dtype):
        self._index, self._params = index, params
        offsets, size = state_layout([param.numel() for param in params])
        self._buffer = torch.zeros(size, dtype=dtype, device=params[0].device)
        self._views = [view_like(self._buffer, p, offset) for p, offset in zip(params, offsets, strict=True)]
        self.last = False
        self.missing = len(params)
        self.sent: torch.futures.Future[Tensor] | None = None

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer.copy_(buffer)

    def gradients(self) -> list[Tensor]:
        return self._views

    def parameters(self) -> list[Tensor]:
        return self._params


#: The hook type of :meth:`torch.nn.parallel.DistributedDataParallel.register_comm_hook`.
CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


class GradReducer:
    """Data parallelism without a wrapper: averages the gradients of ``model`` over the ranks while the backward runs.

    :class:`torch.nn.parallel.DistributedDataParallel` rejects gradients with another dtype than their parameters', such as the
    FP32 sums of :func:`amp_kernels.nn.accumulate_fp32` for 16-bit parameters. This class averages them without a cast. Each
    ``main_grad`` is a view into a bucket, so nothing is copied; other gradients become views in the first backward (as with
    DistributedDataParallel's ``gradient_as_bucket_view``). Afterwards ``.grad`` is equal on all ranks. A bucket is sent when
    its last gradient is ready.

    At the start, parameters and buffers of the group's first rank are copied to the others; later changes of buffers are not
    synchronised. A parameter that a backward did not reach counts as zeros on that rank, and its gradient is the average over
    the ranks. Every rank must run the backwards that communicate. If one ends in an exception, the next one raises a
    ``RuntimeError``; later ones work again.

    Args:
        model: the same on every rank; call ``accumulate_fp32`` before, if it is used. All parameters must be on one device.
        process_group: the ranks; ``None`` for all.
        bucket_mb: size of a bucket in MiB; the first one sent has at most 1.

    Raises:
        TypeError: a parameter is a DTensor, whose gradients are reduced by its wrapper.
        ValueError: no parameter requires a gradient, parameters are on several devices, or ``bucket_mb`` is not above 0.

    Examples:
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> model = ak.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> handle = ak.nn.accumulate_fp32(model)
        >>> reducer = ak.distributed.GradReducer(model)
        >>> x = torch.ones(1, 4, dtype=torch.bfloat16)
        >>> with reducer.no_sync():
        ...     model(x).sum().backward()
        >>> model(x).sum().backward()  # the ranks' averages of both
        >>> model.weight.grad[0]
        tensor([2., 2., 2., 2.])
        >>> reducer.remove()
        >>> handle.remove()
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self, model: torch.nn.Module, process_group: dist.ProcessGroup | None = None, *, bucket_mb: float = 25.0
    ):
        check_module("GradReducer", model)
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        _check(params, bucket_mb)
        self._group = process_group or dist.group.WORLD
        for tensor in chain(model.parameters(), model.buffers()):
            _copy_from_the_first(tensor.detach(), self._group)
        self._names = {id(param): name for name, param in params.items()}
        self._buckets = _buckets(list(params.values())[::-1], int(bucket_mb * 2**20))
        self._place = {id(p): (bucket, i) for bucket in self._buckets for i, p in enumerate(bucket.parameters())}
        for bucket in self._buckets:
            for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if getattr(param, "main_grad", None) is not None:
                    _keep(param, view)
                    param.main_grad = view
        self._state: Any = self._group
        self._hook: CommHook = allreduce_hook
        self._sync = True
        self._delivered: set[int] | None = (
            None  # parameters ready in the current communicating backward, if there is one
        )
        self._at_end: Callable[[], Any] = lambda: None  # a weak reference to that backward's final callback
        self._next = 0  # buckets are sent in one order on all ranks
        self._handles = [p.register_post_accumulate_grad_hook(self._deliver) for p in params.values()]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block accumulate local gradients; the next backward outside averages the sums."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Communicate with ``hook(state, bucket)``, as ``DistributedDataParallel.register_comm_hook`` does. The hooks of
        ``torch.distributed.algorithms.ddp_comm_hooks`` (FP16 and BF16 compression, PowerSGD) work unchanged.

        Args:
            state: passed to the hook; a process group for most of torch's hooks.
            hook: returns a future of the averaged flat tensor.

        Raises:
            TypeError: ``hook`` is not callable.
        """
        if not callable(hook):
            raise TypeError(
                f"register_comm_hook: hook has type {type_name(hook)}; accepted: a function (state, bucket)"
            )
        self._state, self._hook = state, hook

    def remove(self) -> None:
        """Stop averaging. Gradients stay unchanged."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _deliver(self, param: Tensor) -> None:
        """Called when a backward has accumulated into ``param.grad``."""
        if self._delivered is not None and self._at_end() is None:
            self._abandon()
            raise RuntimeError(
                "GradReducer: an earlier backward ended in an exception and may have sent gradients; accepted: the next "
                "backward, on all ranks"
            )
        if not self._sync:
            return
        if self._delivered is None:
            self._begin()
        elif id(param) in self._delivered:
            self._abandon()
            raise RuntimeError(
                f"GradReducer: the gradient of {self._names[id(param)]} changed after it may have been sent: the "
                "parameter is used in several reentrant checkpoints; accepted: torch.utils.checkpoint(use_reentrant=False)"
            )
        self._delivered.add(id(param))
        bucket, i = self._place[id(param)]
        grad, view = param.grad, bucket.gradients()[i]
        if grad.dtype != view.dtype:
            raise TypeError(
                f"GradReducer: the gradient of {self._names[id(param)]} is {grad.dtype}, and was {view.dtype} when the "
                "reducer was built; accepted: accumulate_fp32 before GradReducer, and removed after it"
            )
        _keep(param, view)
        bucket.missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send()

    def _begin(self) -> None:
        """Called at the first gradient of a backward."""
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters())
        self._delivered, self._next = set(), 0
        # The engine drops the callbacks of a backward that fails, and keeps them while reentrant backwards run.
        finish = functools.partial(self._finish)
        self._at_end = weakref.ref(finish)
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _abandon(self) -> None:
        """Forget a failed backward, after the collectives that write into its buckets have ended."""
        self._delivered = None
        for bucket in self._buckets:
            if bucket.sent is not None:
                bucket.sent.wait()
                bucket.sent = None

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        bucket.sent = self._hook(self._state, bucket)
        self._next += 1

    def _finish(self) -> None:
        """Called at the end of a backward."""
        if self._delivered is None:  # the backward failed
            return
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                _keep(param, view)
            self._send()
        for bucket in self._buckets:
            averaged = bucket.sent.wait()
            if averaged.data_ptr() != bucket.buffer().data_ptr():
                bucket.set_buffer(averaged)
            bucket.sent = None
        self._delivered = None


def _keep(param: Tensor, view: Tensor) -> None:
    """Make ``view`` the gradient of ``param``, with its current values, or zeros if there is none."""
    grad = param.grad
    if grad is None:
        view.zero_()
    elif grad.data_ptr() != view.data_ptr():
        view.copy_(grad)
    elif grad.stride() == view.stride():
        return
    param.grad = view


def _copy_from_the_first(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Broadcast from the first rank. Strides may differ between ranks, but backends send raw memory or reject it."""
    dense = tensor.contiguous()
    dist.broadcast(dense, group=group, group_src=0)
    if dense is not tensor:
        tensor.copy_(dense)


def _check(params: dict[str, Tensor], bucket_mb: float) -> None:
    if not params:
        raise ValueError("GradReducer: no parameter of model requires a gradient")
    if not bucket_mb > 0:
        raise ValueError(f"GradReducer: bucket_mb is {bucket_mb}; accepted: a number above 0")
    for name, param in params.items():
        if is_dtensor(param):
            raise TypeError(
                f"GradReducer: {name} is a DTensor; accepted: plain parameters (fully_shard reduces gradients itself, in "
                "FP32 with MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )
    devices = {param.device for param in params.values()}
    if len(devices) > 1:
        raise ValueError(f"GradReducer: parameters are on {', '.join(sorted(map(str, devices)))}; accepted: one device")


def _grad_dtype(param: Tensor) -> torch.dtype:
    return getattr(param, "grad_dtype", None) or param.dtype


def _buckets(params: list[Tensor], most: int) -> list[Bucket]:
    """Group parameters, in the expected order of their gradients, into buckets of one dtype and up to ``most`` bytes."""
    buckets: list[Bucket] = []
    waiting: dict[torch.dtype, list[Tensor]] = {}

    def close(dtype: torch.dtype) -> None:
        buckets.append(Bucket(len(buckets), waiting.pop(dtype), dtype))

    for param in params:
        dtype = _grad_dtype(param)
        limit = most if buckets else min(most, FIRST_BUCKET_BYTES)
        if (
            sum(p.numel() for p in waiting.get(dtype, ())) + param.numel()
        ) * dtype.itemsize > limit and dtype in waiting:
            close(dtype)
        waiting.setdefault(dtype, []).append(param)
    for dtype in [*waiting]:
        close(dtype)
    buckets[-1].last = True
    return buckets

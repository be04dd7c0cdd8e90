"""Gradients averaged over ranks in the dtype that they are accumulated in, which DistributedDataParallel cannot do."""

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

from .._sharding.local import is_dtensor
from .._updates.state import state_layout, view_like

FIRST_BUCKET_BYTES = 2**20  # small, as DistributedDataParallel's: communication begins sooner


class Bucket:
    """Gradients side by side in one flat tensor, which one collective averages. To a communication hook it is what
    :class:`torch.distributed.GradBucket` is: index, buffer, gradients, parameters, is_last."""

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


#: As of :meth:`torch.nn.parallel.DistributedDataParallel.register_comm_hook`.
CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


class GradReducer:
    """Data parallelism without a wrapper: averages the gradients of ``model`` over the ranks, while the backward still runs.

    For what :class:`torch.nn.parallel.DistributedDataParallel` refuses: gradients in another dtype than their parameters',
    the FP32 sums that :func:`amp_kernels.nn.accumulate_fp32` keeps of 16-bit parameters. They are averaged as they are, in
    buckets of which each ``main_grad`` is a view, so that nothing is copied; other gradients become such views with the
    first backward (``gradient_as_bucket_view`` of DistributedDataParallel). ``.grad`` is a parameter's gradient afterwards,
    equal on all ranks. A bucket is sent when the last of its gradients is there.

    Parameters and buffers of the group's first rank are copied to the others at the start; buffers that a forward changes
    are the model's own business after that. A parameter that a backward did not reach counts as zeros there, and has zeros
    or the other ranks' average as its gradient after it. Every rank must run the backwards that communicate. If one ends in
    an exception, the next one raises a ``RuntimeError``, and those after it count again.

    Args:
        model: the same on every rank, after ``accumulate_fp32`` if that is used; parameters on one device.
        process_group: the ranks; ``None`` for all.
        bucket_mb: size of a bucket in MiB; the first to be sent is at most 1.

    Raises:
        TypeError: a parameter is a DTensor, whose gradients have owners of their own.
        ValueError: no parameter requires a gradient, they lie on several devices, or ``bucket_mb`` is not above 0.

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
        self._delivered: set[int] | None = None  # in the backward that runs, if one does that communicates
        self._at_end: Callable[[], Any] = lambda: None  # a weak reference to what that backward calls when it ends
        self._next = 0  # buckets are sent in one order on all ranks
        self._handles = [p.register_post_accumulate_grad_hook(self._deliver) for p in params.values()]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block add to the gradients of this rank only; the next one outside averages the sums."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` communicate, as of ``DistributedDataParallel.register_comm_hook``: those of
        ``torch.distributed.algorithms.ddp_comm_hooks`` (FP16 and BF16 compression, PowerSGD) work unchanged.

        Args:
            state: handed to the hook; a process group for most of torch's.
            hook: returns a future of the averaged flat tensor.

        Raises:
            TypeError: ``hook`` is not callable.
        """
        if not callable(hook):
            raise TypeError(
                f"register_comm_hook: hook is a {type(hook).__name__}; accepted: a function (state, bucket)"
            )
        self._state, self._hook = state, hook

    def remove(self) -> None:
        """Stop averaging. Gradients stay where they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _deliver(self, param: Tensor) -> None:
        """After a backward has added to ``param.grad``."""
        if self._delivered is not None and self._at_end() is None:
            self._abandon()
            raise RuntimeError(
                "GradReducer: an earlier backward ended in an exception, after it may have sent gradients; accepted: the next "
                "backward, on all ranks"
            )
        if not self._sync:
            return
        if self._delivered is None:
            self._begin()
        elif id(param) in self._delivered:
            self._abandon()
            raise RuntimeError(
                f"GradReducer: the gradient of {self._names[id(param)]} comes again, after it may have been sent: the "
                "parameter is used in several reentrant checkpoints; accepted: torch.utils.checkpoint(use_reentrant=False)"
            )
        self._delivered.add(id(param))
        bucket, i = self._place[id(param)]
        grad, view = param.grad, bucket.gradients()[i]
        if grad.dtype != view.dtype:
            raise TypeError(
                f"GradReducer: the gradient of {self._names[id(param)]} is {grad.dtype}, and was {view.dtype} when this was "
                "made; accepted: accumulate_fp32 before it, and removed after it"
            )
        _keep(param, view)
        bucket.missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send()

    def _begin(self) -> None:
        """At the first gradient of a backward."""
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters())
        self._delivered, self._next = set(), 0
        # The engine drops what a backward was to call at its end if that fails, and holds it while reentrant ones run.
        finish = functools.partial(self._finish)
        self._at_end = weakref.ref(finish)
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _abandon(self) -> None:
        """Forget a backward that failed, once nothing that it has sent writes into a bucket any more."""
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
        """At the end of the backward."""
        if self._delivered is None:  # it has failed
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
    """Let the gradient of ``param`` be ``view``, with the values that it has; zeros if there is none."""
    grad = param.grad
    if grad is None:
        view.zero_()
    elif grad.data_ptr() != view.data_ptr():
        view.copy_(grad)
    elif grad.stride() == view.stride():
        return
    param.grad = view


def _copy_from_the_first(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Of any strides, and other ones on other ranks: backends send memory as it lies, or refuse it."""
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
        raise ValueError(f"GradReducer: parameters lie on {', '.join(sorted(map(str, devices)))}; accepted: one device")


def _grad_dtype(param: Tensor) -> torch.dtype:
    return getattr(param, "grad_dtype", None) or param.dtype


def _buckets(params: list[Tensor], most: int) -> list[Bucket]:
    """Of the parameters in the order in which gradients are expected: each of one dtype and up to ``most`` bytes."""
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

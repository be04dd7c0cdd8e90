"""Weights whose gradient the GEMM of the backward adds to an fp32 buffer, ``main_grad``, without another kernel.

A weight gradient is ``dz^T @ x``. If gradients are accumulated over micro-batches, autograd adds each one to ``.grad``
by a kernel of its own, in the dtype of the weight. ``gemm_accumulate_`` does that inside the GEMM, in fp32.

``.grad`` stays the truth: it *is* ``main_grad`` (another tensor over the same memory), or ``None``, or whatever a user
has put there. So every optimizer, scaler, clipping function and zero_grad, of this package or of torch, finds the
gradient where it always is, and DistributedDataParallel reduces it. The steps of one backward:

1. The node of the op looks at ``.grad``: ``None`` means a fresh start (beta = 0, ``main_grad`` is not read); the buffer
   itself, accumulate (beta = 1); anything else is copied into the buffer first. It runs the GEMM, lets ``.grad`` be the
   buffer, and hands autograd a zero expanded to the shape of the weight, which costs nothing: what autograd still has
   to add.
2. That zero reaches the weight's own hook, :meth:`MainGrad.deliver`, first of its tensor hooks. If it is still that zero,
   ``.grad`` is emptied and the buffer is handed on, so that autograd puts it into ``.grad`` itself, instead of adding,
   and runs whatever waits for it: later tensor hooks, post-accumulate hooks, DDP's. If another use of the weight
   contributed (a tied embedding, a second call), autograd adds that to ``.grad`` as usual.

Ordinary gradients, that autograd adds, come out where this cannot hold: while a backward is recorded (create_graph),
under torch.autograd.grad, for a weight that is no leaf (a transposed or parametrised one), for a weight with tensor hooks
of its own, which expect each increment, and in what torch.compile compiles.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .._raw import unit_sums
from .._raw.gemm import gemm_accumulate_op

#: ``add_to(main, fresh)`` adds a gradient to ``main``; ``fresh``: overwrites what is there.
AddTo = Callable[[Tensor, bool], None]

_registered: dict[int, MainGrad] = {}  # by id(weight); a dead weight's entry is removed by its weak reference
_offered: dict[int, weakref.ref] = {}  # by id: biases and norm weights that :func:`prepare` may register
_zeros: dict[tuple, Tensor] = {}  # per device and dtype


class MainGrad:
    """Ties a weight to its fp32 buffer, the attribute ``main_grad``. Does not keep the weight alive."""

    def __init__(self, weight: Tensor):
        # Bound now: while the interpreter exits, a weight may outlive this module's names.
        key, forget = id(weight), _registered.pop
        self.weight = weakref.ref(weight, lambda _: forget(key, None))
        self.hook = weight.register_hook(self.deliver)
        _zero(weight.main_grad)  # not first within the capture of a CUDA graph
        _registered[key] = self

    def remove(self) -> None:
        self.hook.remove()
        weight = self.weight()
        if weight is not None:
            _registered.pop(id(weight), None)
            del weight.main_grad

    def receive(self, weight: Tensor, add_to: AddTo) -> Tensor:
        """Adds to the gradient of ``weight``; what autograd still has to add, which is zero."""
        main, fresh = self.buffer(weight)
        add_to(main, fresh)
        return self.received(weight, main)

    @staticmethod
    def received(weight: Tensor, main: Tensor) -> Tensor:
        """Lets ``.grad`` be ``main``, which holds a gradient now; what autograd still has to add."""
        if weight.grad is None:
            weight.grad = main.detach()
        return _zero(main).expand(weight.shape)

    @staticmethod
    def buffer(weight: Tensor) -> tuple[Tensor, bool]:
        """``main_grad``, and whether it is to be written without being read; otherwise it holds ``.grad``."""
        main, grad = weight.main_grad, weight.grad
        if main is None or main.shape != weight.shape or main.device != weight.device:  # the module was moved
            main = weight.main_grad = buffer_for(weight)
        if grad is not None and not _same_memory(grad, main):
            main.copy_(grad)
            weight.grad = None
        return main, grad is None

    def deliver(self, grad: Tensor) -> Tensor | None:
        if grad.data_ptr() != _zero(grad).data_ptr():
            return None
        weight = self.weight()
        main = weight.main_grad.detach()
        weight.grad = None
        return main


def buffer_for(weight: Tensor) -> Tensor:
    """Uninitialised fp32 memory in the layout of ``weight``, without which autograd would copy instead of keeping it."""
    return torch.empty_like(weight, dtype=torch.float32, requires_grad=False, memory_format=torch.preserve_format)


def in_use() -> bool:
    """True if any weight has a ``main_grad``."""
    return bool(_registered)


def registered(weight: Tensor) -> MainGrad | None:
    entry = _registered.get(id(weight))
    return entry if entry is not None and entry.weight() is weight else None


def offer(parameter: Tensor) -> None:
    """Lets :func:`prepare` register a parameter whose gradient is a sum over rows; autograd accumulates it until then."""
    key, forget = id(parameter), _offered.pop
    _offered[key] = weakref.ref(parameter, lambda _: forget(key, None))


def prepare(*parameters: Tensor | None) -> None:
    """Gives a ``main_grad`` to those of the ``parameters`` that were offered. Called by a forward within ``batch_invariant()``."""
    for parameter in parameters if _offered else ():
        offered = None if parameter is None else _offered.get(id(parameter))
        if offered is not None and offered() is parameter and not parameter._backward_hooks:
            del _offered[id(parameter)]
            parameter.main_grad = buffer_for(parameter)
            MainGrad(parameter)


def withdraw(parameter: Tensor) -> None:
    """Undoes what registered or offered a parameter."""
    entry = registered(parameter)
    if entry is not None:
        entry.remove()
    _offered.pop(id(parameter), None)


def into(ctx: torch.autograd.function.FunctionCtx, position: int, add_to: AddTo) -> Tensor | None:
    """A gradient into the ``main_grad`` of the weight that is number ``position`` among the inputs of the node ``ctx`` that are
    tensors: one that is ``None`` does not count.

    Called within the node's backward. Returns what autograd still has to add; ``None`` if nothing was done, because the
    weight has no ``main_grad`` or this backward cannot use it.
    """
    found = _usable(ctx, position)
    return found and found[0].receive(found[1], add_to)


def accumulate(
    ctx: torch.autograd.function.FunctionCtx, position: int, dz: Tensor, x: Tensor, chained: bool = False
) -> Tensor | None:
    """:func:`into` of ``dz^T @ x``. ``chained``: the sum over the rows continues from what ``main_grad`` holds."""
    options = {"batch_invariant": True} if chained else {}

    def add_to(main: Tensor, fresh: bool) -> None:
        gemm_accumulate_op(main, dz.t(), x, **options, **({"beta": 0.0} if fresh else {}))

    return into(ctx, position, add_to)


class Total:
    """The fp32 sum to which a backward adds a gradient step by step: the ``main_grad`` of the parameter at ``position``, or memory of
    its own of this shape. ``fresh``: it holds nothing yet."""

    def __init__(
        self, ctx: torch.autograd.function.FunctionCtx, position: int, shape: torch.Size, device: torch.device
    ):
        self._found = _usable(ctx, position)
        if self._found is None:
            self.sums, self.fresh = torch.empty(shape, dtype=torch.float32, device=device), True
        else:
            self.sums, self.fresh = self._found[0].buffer(self._found[1])

    def add_rows(self, grad: Tensor, *norm: Tensor | None) -> None:
        """Adds the sum of the rows of ``grad``, or with ``x``, ``mean`` and ``rstd`` of a norm that of its weight."""
        unit_sums.op(self.sums.view(-1), grad, *norm, fresh=self.fresh)
        self.fresh = False

    def add_product(self, dz: Tensor, x: Tensor) -> None:
        """Adds ``dz^T @ x``."""
        gemm_accumulate_op(self.sums, dz.t(), x, beta=float(not self.fresh), batch_invariant=True)
        self.fresh = False

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """The part that autograd has to add."""
        if self.fresh:
            self.sums.zero_()
        if self._found is None:
            return self.sums.to(dtype)
        return self._found[0].received(self._found[1], self.sums)


def add(ctx: torch.autograd.function.FunctionCtx, position: int, gradient: Tensor, factor: Tensor) -> Tensor | None:
    """:func:`into` of ``factor * gradient``, in fp32."""

    def add_to(main: Tensor, fresh: bool) -> None:
        if fresh:
            torch.mul(gradient, factor, out=main)
        else:
            main.addcmul_(gradient, factor)

    return into(ctx, position, add_to)


def _usable(ctx: torch.autograd.function.FunctionCtx, position: int) -> tuple[MainGrad, Tensor] | None:
    if not _registered or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    node = ctx.next_functions[position][0]
    weight = getattr(node, "variable", None)  # AccumulateGrad has it
    entry = None if weight is None else registered(weight)
    if entry is None or len(weight._backward_hooks) > 1 or not _is_accumulated(node):
        return None
    return entry, weight


def refuse_data_parallel(*weights: Tensor) -> None:
    """DistributedDataParallel reduces gradients in the dtype of their parameters, and fails within C++ on fp32 ones of
    16-bit parameters. Called in the forward, which can still raise a clear error.

    Raises:
        RuntimeError: one of the 16-bit ``weights`` has a ``main_grad`` and DistributedDataParallel runs this forward.
    """
    if not _registered or torch.compiler.is_compiling():
        return
    if torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is None:
        return
    for weight in weights:
        if weight.dtype != torch.float32 and registered(weight) is not None:
            raise RuntimeError(
                f"a {weight.dtype} weight of shape {list(weight.shape)} has an fp32 main_grad, which "
                "DistributedDataParallel cannot reduce; accepted under it: fp32 parameters and torch.autocast; in its "
                "place: amp_kernels.distributed.GradReducer"
            )


def _is_accumulated(node: torch.autograd.graph.Node) -> bool:
    """True if this backward writes ``.grad``, rather than returning the gradient (torch.autograd.grad)."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # "A leaf node was passed to _will_engine_execute_node but we are ... autograd.grad()"
        return False


def _same_memory(grad: Tensor, main: Tensor) -> bool:
    return grad.dtype == main.dtype and grad.data_ptr() == main.data_ptr() and grad.stride() == main.stride()


def _zero(like: Tensor) -> Tensor:
    key = like.device, like.dtype
    zero = _zeros.get(key)
    if zero is None:
        zero = _zeros[key] = torch.zeros((), device=like.device, dtype=like.dtype)
    return zero

"""A whole training step as one CUDA graph. Without a GPU, the step runs eagerly, with the same preparation and checks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .._checks import lists
from .._checks.modules import check_module
from .._checks.types import type_name
from .._dispatch import generators, walks
from .._dispatch.capture import capture, rehearsal
from .._dispatch.devices import restorer
from ..optim._base import FusedOptimizer
from .grad_scaler import GradScaler


def graph_step(
    step_fn: Callable[..., Any],
    warmup: int = 3,
    *,
    model: torch.nn.Module,
    optimizer: FusedOptimizer,
    scaler: GradScaler | None = None,
) -> GraphedStep:
    """Capture a training step as one CUDA graph: forward, backward, clipping, update and loss scaling.

    ``step_fn(*inputs)`` zeroes the gradients, computes the loss, runs the backward, steps and updates the scaler. Call the returned
    object instead, with batches of one shape. The first call runs ``warmup`` steps, which create the optimizer's state and
    everything that kernels need, and undoes them bit for bit (parameters, buffers, gradients, state, scaler, random numbers). Then
    it captures the step. Every call, including the first, copies the batch to the graph's input buffers and replays the graph.
    Every call writes its results to the same tensors: copy those you keep.

    The last warm-up step is checked for operations that a graph cannot repeat. Without CUDA, the same preparation and checks are
    followed by eager execution with the same inputs and results, so a CPU test finds the errors that a GPU would raise.

    Learning rates become device tensors in the groups, which torch's schedulers update in place. A learning rate or weight decay
    that is set as a number is copied to the graph's buffer. Call ``scheduler.step()`` after the step, not inside it. If another
    number of a group (betas, eps), the optimizer's state or a parameter changes, also through ``load_state_dict``, the next call
    captures a new graph.

    Args:
        step_fn: the step. It must use the given model, optimizer and scaler. Its inputs must be tensors, also in lists and dicts.
        warmup: steps before the capture, at least 2. DistributedDataParallel needs 11.
        model: the model whose parameters and buffers the step changes.
        optimizer: an optimizer of this package.
        scaler: the gradient scaler of the step, if it uses one.

    Returns:
        A function of the inputs with a method ``release()``, which frees the graph. Call it before
        ``torch.distributed.destroy_process_group()``. It is also called when the interpreter exits.

    Raises:
        TypeError: the optimizer or the scaler is not of this package, ``model`` is no module or ``step_fn`` no function; when called,
            an input is not a tensor.
        ValueError: ``warmup`` is below 2; when called, an input has another shape, dtype or device than in the first call, or a
            parameter that requires a gradient has none in the step, so that no replay would update it, or gradients are released
            (:func:`amp_kernels.optim.release_gradients`).
        RuntimeError: when called, the step reads a value on the host (``.item()``, ``if tensor``, a mask as an index), or changes a
            number of the optimizer's groups, as a scheduler does; a replay would do neither. Nothing changes when an error is
            raised, but state created by a first step (zero moments, the scale on the device) may remain.

    Examples:
        >>> model = ak.nn.Linear(4, 2)
        >>> optimizer, scaler = ak.optim.AdamW(model.parameters(), lr=1e-2), ak.GradScaler("cpu")
        >>> def train(x):
        ...     optimizer.zero_grad()
        ...     loss = model(x).square().mean()
        ...     scaler.scale(loss).backward()
        ...     scaler.step(optimizer, max_norm=1.0)
        ...     scaler.update()
        ...     return loss
        >>> step = ak.graph_step(train, model=model, optimizer=optimizer, scaler=scaler)
        >>> losses = [step(torch.ones(3, 4)).item() for _ in range(3)]
        >>> losses[0] > losses[1] > losses[2]
        True
        >>> optimizer.state[model.weight]["step"]  # without the warm-up
        tensor(3.)
    """
    return GraphedStep(step_fn, warmup, model, optimizer, scaler)


class GraphedStep:
    """The callable returned by :func:`graph_step`."""

    def __init__(
        self,
        step_fn: Callable[..., Any],
        warmup: int,
        model: torch.nn.Module,
        optimizer: FusedOptimizer,
        scaler: GradScaler | None,
    ):
        if not isinstance(optimizer, FusedOptimizer):
            raise TypeError(
                f"graph_step: optimizer has type {type_name(optimizer)}; accepted: an optimizer of amp_kernels"
            )
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"graph_step: scaler has type {type_name(scaler)}; accepted: None, amp_kernels.GradScaler")
        check_module("graph_step", model)
        if not callable(step_fn):
            raise TypeError(f"graph_step: step_fn has type {type_name(step_fn)}; accepted: a function")
        lists.check_count("graph_step", "warmup", warmup, 2)
        self._step_fn, self._warmup = step_fn, warmup
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._rates: list[Tensor] = []
        self._decays: list[Tensor] = []
        self._written_decays: list[float] = []
        self._inputs: Any = None
        self._outputs: Any = None
        self._key: tuple[list[Any], list[Any]] | None = None  # the conditions that the step was prepared for
        self._graph: torch.cuda.CUDAGraph | None = None
        self._free = weakref.finalize(self, lambda: None)

    def __call__(self, *inputs: Any) -> Any:
        """Run the step on a batch. Returns the same tensors every time."""
        if self._optimizer._released is not None:
            raise ValueError(
                "graph_step: the optimizer releases its gradients (release_gradients); accepted: remove() of that handle first"
            )
        if self._optimizer.state_device is not None:
            raise ValueError(
                f"graph_step: state_device of the optimizer is {self._optimizer.state_device!r}, which a graph cannot reach; accepted: None"
            )
        self._take_inputs(inputs)
        with _on(self._device()):
            with self._rates_put_back_on_error() if self._key is None else contextlib.nullcontext():
                self._write_numbers()
                if not _same(self._key, self._conditions()):
                    self._drop()
                    self._prepare()
            self._run_eagerly() if self._graph is None else self._replay_graph(self._graph)
        return self._outputs

    def release(self) -> None:
        """Free the graph and its memory. The next call captures a new graph and may have inputs of other shapes."""
        self._drop()
        self._inputs = None

    def _drop(self) -> None:
        self._free()
        self._graph = self._key = self._outputs = None

    # ---- what a replay reads ----

    def _write_numbers(self) -> None:
        """Copy the groups' learning rates and weight decays to the graph's buffers."""
        groups, algorithm = self._optimizer.param_groups, self._optimizer._algorithm
        self._optimizer._plan.hyper.packed(groups)  # raises for a text or a NaN
        decays = [algorithm.of(group).option(group, "weight_decay") for group in groups]
        if len(groups) != len(self._rates):
            self._rates = [torch.zeros((), dtype=torch.float32, device=self._device()) for _ in groups]
            self._decays = [torch.zeros((), dtype=torch.float64, device=self._device()) for _ in groups]
            self._written_decays = []
        for group, rate in zip(groups, self._rates, strict=True):
            if group["lr"] is not rate:
                rate.fill_(group["lr"]) if not isinstance(group["lr"], Tensor) else rate.copy_(group["lr"])
                group["lr"] = rate
        if decays != self._written_decays:
            for own, decay in zip(self._decays, decays, strict=True):
                own.fill_(decay)
            self._written_decays = decays

    @contextlib.contextmanager
    def _rates_put_back_on_error(self) -> Iterator[None]:
        """Restore learning rates that were numbers if the call raises."""
        before = [(group, group["lr"]) for group in self._optimizer.param_groups]
        try:
            yield
        except BaseException:
            for group, rate in before:
                group["lr"] = rate
            raise

    def _device(self) -> torch.device:
        return self._optimizer.param_groups[0]["params"][0].device

    def _take_inputs(self, inputs: tuple) -> None:
        values, spec = pytree.tree_flatten(inputs)
        for i, value in enumerate(values):
            if not isinstance(value, Tensor):
                raise TypeError(f"graph_step: inputs[{i}] has type {type_name(value)}; accepted: tensors")
        if self._inputs is None:
            self._inputs = [torch.empty_like(value).copy_(value) for value in values], spec
            return
        own, known = self._inputs
        if spec != known or any(_what(a) != _what(b) for a, b in zip(own, values, strict=True)):
            found, wanted = (", ".join(map(lists.describe, tensors)) or "nothing" for tensors in (values, own))
            raise ValueError(f"graph_step: the inputs are {found}; accepted: those of the first call, {wanted}")
        for static, value in zip(own, values, strict=True):
            static.copy_(value, non_blocking=True)

    def _conditions(self) -> tuple[list[Any], list[Any]]:
        """The objects that a captured step depends on, and numbers and addresses."""
        return self._optimizer._plan.conditions(self._optimizer.param_groups, self._optimizer.state)

    # ---- preparation ----

    def _prepare(self) -> None:
        on_gpu = self._device().type == "cuda"
        before = Before(self._model, self._optimizer, self._scaler, self._rates)
        hook = self._optimizer.register_step_pre_hook(lambda *_: self._before_a_step(before))
        try:
            with _side_stream(on_gpu), rehearsal():
                for _ in range(self._warmup - 1):
                    self._run()
                numbers = self._numbers()
                with NoHostReads():
                    outputs = self._run()
                if numbers != self._numbers():
                    raise RuntimeError(
                        "graph_step: the step writes numbers of the optimizer's groups, which a replay would not do; accepted: "
                        "scheduler.step() after the step"
                    )
        finally:
            hook.remove()
            before.restore()
        if on_gpu:
            graph = torch.cuda.CUDAGraph()
            with capture(graph):
                self._outputs = self._run()
            self._free = weakref.finalize(self, graph.reset)
            self._graph = graph
        else:
            self._outputs = pytree.tree_map_only(Tensor, torch.empty_like, outputs)
        self._key = self._conditions()

    def _run(self) -> Any:
        values, spec = self._inputs
        with self._optimizer._plan.hyper.decays_from(self._decays):
            results = self._step_fn(*pytree.tree_unflatten(values, spec))
        return pytree.tree_map_only(Tensor, Tensor.detach, results)

    def _before_a_step(self, before: Before) -> None:
        groups = self._optimizer.param_groups
        names = {
            id(param): name
            for group in groups
            for name, param in zip(group.get("param_names", ()), group["params"], strict=False)
        }
        names.update((id(param), name) for name, param in self._model.named_parameters())
        params = [param for param in self._optimizer._params() if param.requires_grad and param.grad is None]
        if params:
            named = [names.get(id(param), f"one of shape {list(param.shape)}") for param in params]
            raise ValueError(
                f"graph_step: parameters have no gradient in the step: {lists.some(named)}; accepted: a gradient "
                "for each, or requires_grad=False"
            )
        before.keep_state()

    def _numbers(self) -> list[Any]:
        """The numbers of the groups, and the versions of the learning-rate tensors."""
        groups = [{**group, "params": None, "lr": group["lr"]._version} for group in self._optimizer.param_groups]
        return [
            groups,
            [group["lr"] is rate for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True)],
        ]

    # ---- a step ----

    def _run_eagerly(self) -> None:
        for own, value in zip(pytree.tree_leaves(self._outputs), pytree.tree_leaves(self._run()), strict=True):
            if isinstance(own, Tensor):
                own.copy_(value)

    def _replay_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        with self._optimizer._plan.replay():
            graph.replay()
        if self._scaler is not None:
            self._scaler._report_replay()


class Before:
    """A copy of everything that a step changes."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: FusedOptimizer,
        scaler: GradScaler | None,
        rates: Iterable[Tensor],
    ):
        self._optimizer, params = optimizer, optimizer._params()
        self._restore_state = self._restore_scaler = self._restore_units = lambda: None
        if optimizer._plan.units is not None:
            self._restore_units = optimizer._plan.units.snapshot()
        if scaler is not None and scaler.is_enabled():
            scaler.scale(torch.ones((), device=params[0].device))  # makes what it has on the device
            self._restore_scaler = scaler._snapshot()
        own = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *params, *rates)}
        self._grads = [(param, param.grad) for param in params]
        self._restore_tensors = restorer([*own.values(), *(grad for _, grad in self._grads if grad is not None)])
        self._has_state = False
        self._generators = generators.states()

    def keep_state(self) -> None:
        """Save the optimizer's state before the first update, creating it if there is none."""
        if not self._has_state:
            with rehearsal(False):
                plan, groups = self._optimizer._plan, self._optimizer.param_groups
                plan.launches(groups, self._optimizer.state, plan.hyper.packed(groups))
                self._optimizer._agreement().settle(None)  # a capture cannot
            self._optimizer._store.adopt_writes()
            self._restore_state = self._optimizer._store.snapshot()
            self._has_state = True

    @torch.no_grad()
    def restore(self) -> None:
        self._restore_tensors()
        for param, grad in self._grads:
            param.grad = grad
        self._restore_state()
        self._optimizer._store.mark_clean()
        self._restore_units()
        self._restore_scaler()
        generators.restore(self._generators)


class NoHostReads(TorchDispatchMode):
    """Raises if the host reads a device value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _INDEXING:
            reads = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        else:
            reads = not _READS.isdisjoint(func.tags)
        if reads:
            raise RuntimeError(_refusal(func))
        result = func(*args, **kwargs)
        from_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in args)
        if from_gpu and isinstance(result, Tensor) and not result.is_cuda and not kwargs.get("non_blocking"):
            raise RuntimeError(_refusal(func))
        return result


_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_}
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _refusal(func: Any) -> str:
    return (
        f"graph_step: the step waits for a value on the host ({func}: .item(), float(), if, print, a mask as an index, .cpu()), which "
        "a replay would not do; accepted: what stays on the device, as torch.where and masked_fill"
    )


def _what(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def _same(known: tuple[list[Any], list[Any]] | None, now: tuple[list[Any], list[Any]]) -> bool:
    return known is not None and walks.same_objects(known[0], now[0]) and known[1] == now[1]


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Make the step's GPU the current device, whose streams a graph captures."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def _side_stream(on_gpu: bool) -> Iterator[None]:
    """Run on a separate stream, as torch requires for warm-up steps before a capture. The current stream waits for it at the end,
    also after an error."""
    if not on_gpu:
        yield
        return
    stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(main)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        main.wait_stream(stream)

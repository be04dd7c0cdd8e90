"""What the fused optimizers have in common: state in blocks, the step protocol with a gradient scaler, checkpoints.

An optimizer of this package is ``class X(FusedOptimizer, torch.optim.X)``, or ``class X(FusedOptimizer)`` where torch
has none. Deriving from torch's class of the same name makes ``isinstance`` checks of training frameworks hold, and its
constructor supplies the validation, the group keys and the defaults; :class:`FusedOptimizer` comes first and replaces
everything that touches state.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._checks import lists
from .._dispatch import policy
from .._dispatch.capture import is_capturing
from .._dispatch.compiled import Traced, one_op
from .._dispatch.devices import at, largest_flag
from .._raw.check_and_norm import op as check_and_norm
from .._sharding.agreement import shard_number
from .._sharding.local import is_dtensor, local, placed_as
from .._updates.arguments import UpdateArguments
from .._updates.state import GRADS, PARAMS
from ..ops._shadows import ShadowList
from ._cached_step import CachedStep, Launch, addressable
from ._hooks import hooked_if_watched
from ._hyper_parameters import HyperParameters
from ._measure import StepRequest
from ._packed_numbers import PackedNumbers
from ._state import DeviceBatch, Place, WrittenParams, signature

logger = logging.getLogger("amp_kernels")

#: One per device.
Update = tuple[Launch, UpdateArguments]


class FusedOptimizer(PackedNumbers):
    """Base of the optimizers here; see the module's docstring. Subclasses name their op."""

    _request: StepRequest | None = None
    _in_closure = False
    profile_hook_step = staticmethod(hooked_if_watched)  # torch's constructor wraps `step` in it

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler hands over grad_scale and found_inf, without a sync, or unscales and skips itself.
        Not in a closure, whose gradients carry no scale, as no scaler takes one: Lightning, which looks here, may clip them.
        """
        return not (self.unscale_grads or self._in_closure)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """torch's constructors set it; what holds follows from the options."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, and refuses what the kernels cannot update.

        Raises:
            TypeError: a parameter is not float16, bfloat16 or float32, or is a tensor subclass other than DTensor.
            ValueError: a hyper-parameter is out of range, NaN or unsupported, a key misspells an option, a parameter has gaps in
                memory or is a DTensor whose pieces have to be summed (``Partial``), or torch's own reasons (a non-leaf
                tensor, ...).
        """
        if isinstance(param_group, dict):
            self._refuse_misspelt(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._complete_group(group)
            self._common("seed", self.param_groups)
            if len(set(map(id, group["params"]))) != len(group["params"]):
                raise ValueError(f"{self._name}: a parameter appears twice in a group; one pass cannot update it twice")
            names = group.get("param_names")  # where it was built from named_parameters()
            for i, param in enumerate(group["params"]):
                self._check_param(f"{self._name}: {names[i] if names else f'params[{i}]'}", param)
        except Exception:
            self.param_groups.pop()
            raise
        group["fused"] = True
        self._traced = Traced(self, self.param_groups)

    def _check_param(self, label: str, param: Tensor) -> None:
        """Raise unless the kernels can update it."""
        if param.dtype not in PARAMS:
            raise TypeError(f"{label} is {param.dtype}; accepted: {lists.names(PARAMS)}")
        if param.layout is not torch.strided:
            raise TypeError(f"{label} has layout {param.layout}; accepted: torch.strided (dense)")
        if is_dtensor(param):
            if any(placement.is_partial() for placement in param.placements):
                raise ValueError(f"{label} has the placements {param.placements}; accepted: Shard and Replicate")
            if self.shadow_dtype is not None:
                raise ValueError(
                    f"{label} is a DTensor and shadow_dtype is {self.shadow_dtype}; accepted: None (whoever gathers the "
                    "pieces casts them: MixedPrecisionPolicy(param_dtype=...) of fully_shard)"
                )
        elif is_traceable_wrapper_subclass(param):
            raise TypeError(
                f"{label} is a {type(param).__name__}; accepted: plain tensors and DTensors "
                f"(torch.optim.{self._name}(fused=True) takes it, also under this package's GradScaler)"
            )
        if param.requires_grad and not is_lazy(param) and not lists.is_dense(local(param)):
            raise ValueError(
                f"{label} is {lists.describe(local(param))}, which leaves gaps in memory or overlaps itself; "
                "accepted: any order of dimensions that covers its memory once"
            )

    # ---- state ----

    def _collect(self) -> list[Launch]:
        """Every gradient, checked, and every parameter that has one with its state, by device."""
        self._outgrow()
        choice = torch._C._len_torch_dispatch_stack() == 0 and policy.requested_backend()
        if self._cached_step is not None:
            launches = self._cached_step.lookup(self.param_groups, self.state, choice)
            if launches is not None:
                return launches
            self._cached_step = None
        return self._collect_anew(choice)

    def _collect_anew(self, choice: Any) -> list[Launch]:
        """Check every gradient, then make sure every parameter that has one also has state. Caches what was there in
        the last step already, so that something new in each step does not cost more than it must."""
        self._agreement()
        active: list[tuple[int, Tensor, Place | None]] = []
        grads: list[Tensor] = []
        missing: list[tuple[dict, Tensor, dict]] = []
        pieces: list[int] = []
        own = True  # whether the gradients are those of the parameters, as they are
        places, state = self._places, self.state
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                piece = param
                place, shown = places.get(id(param)), state.get(param)
                if is_dtensor(param):
                    piece, grad = local(param), self._local_grad(param, grad)
                if place is None or place.state is not shown or place.signature != signature(param):
                    # New, or its state was replaced, or it was moved or converted: what is shown is taken over.
                    missing.append((group, param, self._current(param)))
                elif place.address != piece.data_ptr():
                    place.adopt_write()
                usual = type(grad) is Tensor and grad.dtype in GRADS and grad.layout is torch.strided
                if not usual or grad.stride() != piece.stride():
                    grad = self._checked_grad(piece, grad)
                own = own and grad is (param.grad if piece is param else local(param.grad))
                grads.append(grad)
                active.append((index, param, place))
                pieces.append(id(piece))
        if missing:
            if any(is_capturing(param) for _, param, _ in missing):
                raise RuntimeError(
                    f"{self._name}: state would be created during CUDA graph capture, and each replay would reset it; "
                    "take one step with all gradients present before the capture"
                )
            self._commit(*self._pack(missing), self.state)
        sizes = [len(group["params"]) for group in self.param_groups]  # they decide the parameters' numbers
        key = sizes, [(index, place) for index, _, place in active], pieces
        new = bool(missing) or key != self._batches[0]
        if new:
            key = sizes, [(index, places[id(param)]) for index, param, _ in active], pieces
            self._batches = (key, self._make_batches(key[1]))
        batches = self._batches[1]
        grad_of = {id(param): grad for (_, param, _), grad in zip(active, grads, strict=True)}
        found = [[grad_of[id(param)] for param in batch.params] for batch in batches]
        if batches and own and not new and choice is not False and all(map(addressable, batches, found)):
            self._cached_step = CachedStep(
                self.param_groups, self.state, batches, found, choice, self._takes_tables(batches)
            )
        return [Launch(batch, grads, None) for batch, grads in zip(batches, found, strict=True)]

    def _takes_tables(self, batches: list[DeviceBatch]) -> bool:
        """Whether C++ is what the ops run on: it takes addresses instead of tensors."""
        chosen = {policy.select(op, batch.nothing) for op in (self._op.op, check_and_norm) for batch in batches}
        return chosen <= {"cpu", "cuda", "emulate"}

    def _local_grad(self, param: Tensor, grad: Tensor) -> Tensor:
        """This rank's piece of the gradient of a DTensor, summed over ranks if that was left to do."""
        if not is_dtensor(grad):
            raise TypeError(f"{self._name}: the gradient of a DTensor is a {type(grad).__name__}; accepted: a DTensor")
        return local(placed_as(grad, param))

    def _checked_grad(self, param: Tensor, grad: Tensor) -> Tensor:
        """A gradient that is not plainly usable: refuse it, or bring it into its parameter's memory order."""
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{self._name} does not support sparse gradients (layout {grad.layout}); "
                "use torch.optim.SparseAdam or torch.optim.SGD for these parameters"
            )
        if grad.dtype not in GRADS:
            raise TypeError(
                f"{self._name}: the gradient of a {param.dtype} parameter is {grad.dtype}; "
                f"accepted: {lists.names(GRADS)}"
            )
        if is_traceable_wrapper_subclass(grad):
            raise TypeError(f"{self._name}: a gradient is a {type(grad).__name__}; accepted: plain tensors")
        if self.zero_grads and torch._debug_has_internal_overlap(grad) == 1:
            raise ValueError(
                f"{self._name}: a gradient is {lists.describe(grad)}, which overlaps itself; zero_grads=True cannot "
                "write it"
            )
        if lists.same_order(param, grad):
            return grad
        if not getattr(self, "_warned_strides", False):
            self._warned_strides = True
            logger.warning(
                "%s copies gradients whose strides differ from their parameter's, first %s for %s",
                self._name,
                lists.describe(grad),
                lists.describe(param),
            )
        return torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)

    def _make_batches(self, active: list[tuple[int, Place]]) -> list[DeviceBatch]:
        params = self._params()
        number = {id(param): i for i, param in enumerate(params)}  # as in the state_dict
        counts = self._ranks.counts

        def row(position: int, place: Place, group: int) -> tuple[int, ...]:
            # Its random bits depend on the number: pieces of one parameter must not share them, and copies must.
            index = number[id(place.param)] + len(params) * shard_number(place.param, self.shard_group)
            return position, place.offset, place.slot, group, index % 2**32

        entries: dict[torch.device, list[tuple[int, Place]]] = defaultdict(list)
        for group, place in sorted(active, key=lambda entry: not counts[number[id(entry[1].param)]]):
            entries[place.piece.device].append((group, place))
        batches = []
        for device, members in entries.items():
            places = [place for _, place in members]
            groups = {place.block: group for group, place in members}
            positions = {block: i for i, block in enumerate(groups)}
            rows = [row(positions[place.block], place, group) for group, place in members]
            batches.append(
                DeviceBatch(
                    device,
                    params=[place.param for place in places],
                    pieces=[place.piece for place in places],
                    counted=sum(counts[number[id(place.param)]] for place in places),
                    sharded=[place.param for place in places if is_dtensor(place.param)],
                    numbers=[number[id(place.param)] for place in places],
                    blocks=list(groups),
                    groups=list(groups.values()),
                    # On the CPU whatever torch.set_default_device says: the host reads it at each launch.
                    layout=torch.tensor(rows, dtype=torch.int64, device="cpu"),
                    nothing=torch.empty(0, dtype=torch.float32, device=device),
                    shadows=ShadowList(
                        [(p.param, p.block.shadow_views[p.slot]) for p in places if p.block.shadow_views]
                    ),
                    written=WrittenParams(places),
                )
            )
        return batches

    # ---- the step ----

    @one_op()
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, in one pass per device and without a host sync.

        Gradients are read, not written: after a step under a :class:`amp_kernels.GradScaler` they still carry the loss
        scale. ``unscale_grads=True`` and ``zero_grads=True``, which sets them to 0 at the end, also do so when the step
        is skipped. With ``max_grad_norm`` they count as clipped. A step alone is never skipped, unless
        ``skip_nonfinite=True``.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's result, or ``None``.

        Raises:
            RuntimeError: a gradient is sparse.
            TypeError: a gradient is complex or an integer.
            ValueError: a hyper-parameter is NaN. Nothing has been changed when any of these is raised.
        """
        loss = None
        if closure is not None:
            self._in_closure = True
            try:
                with torch.enable_grad():
                    loss = closure()
            finally:
                self._in_closure = False
        request = self._request or self.default_request()
        hyper = self._current_hyper_parameters()
        options = self._packed_options(hyper)
        launches = self._collect()
        max_norm = self.max_grad_norm if request.max_norm is None else request.max_norm
        self._measure(request, launches, max_norm)
        updates = []
        for launch in launches:
            batch = launch.batch
            batch.shadows.renew()
            batch.written.adopt()
            arguments = UpdateArguments(
                batch.pieces,
                launch.grads,
                *self._state_of(batch, hyper),
                batch.layout,
                *self._numbers_on(batch.device),
                at(request.grad_scale, batch.device),
                largest_flag([request.found_inf, *request.found_infs.values()], batch.device),
                None if max_norm is None else at(request.sum_sq, batch.device),
                options,
                hyper.decays,
                hyper.flags,
                0.0 if max_norm is None else float(max_norm),
                self.seed,
            )
            updates.append((launch, arguments))
        self._update(updates)
        for batch, _, table in launches:
            batch.shadows.stamp()
            batch.written.stamp()
            if self.zero_grads:
                grads = table.grads() if table is not None else [local(param.grad) for param in batch.params]
                torch._foreach_zero_(grads)
        return loss

    def _update(self, updates: list[Update]) -> None:
        """The second pass of a step, device after device."""
        for launch, arguments in updates:
            self._launch(launch, arguments)

    def _launch(self, launch: Launch, arguments: UpdateArguments) -> None:
        """Call the op on one device, and tell autograd what it has written."""
        batch, _, table = launch
        self._op.step(arguments, None if table is None else table.tensor)
        if table is not None:
            table.bump_versions()
        else:
            torch.autograd.graph.increment_version(batch.sharded)

    def default_request(self) -> StepRequest:
        """Without a scaler of this package: what torch's scaler left in attributes, and the optimizer's own options."""
        found_inf = getattr(self, "found_inf", None)
        if not isinstance(found_inf, Tensor):
            found_inf = None  # torch's scaler leaves the int 0 if there are no gradients
        return StepRequest(getattr(self, "grad_scale", None), found_inf, self.skip_nonfinite)

    def _state_of(self, batch: DeviceBatch, hyper: HyperParameters) -> tuple[list[Tensor], ...]:
        """The op's arguments from the moments to ``emas``: a buffer per block, empty where the group does not use
        it."""
        if batch.hyper is not hyper:
            pairs = list(zip(batch.blocks, batch.groups, strict=True))
            batch.state = (
                [
                    block.moments[name] if name in hyper.used[group] else batch.nothing
                    for name in self._op.declared.moments
                    for block, group in pairs
                ],
                [block.steps for block in batch.blocks],
                [block.master for block in batch.blocks],
                [block.shadow for block in batch.blocks],
                [block.ema if hyper.averaged[group] else batch.nothing for block, group in pairs],
            )
            batch.hyper = hyper  # last: an interrupt before it leaves nothing half made
        return batch.state

"""Muon over float32, float16 and bfloat16 matrices: two fused passes around matrix products over stacks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT

from .._checks import lists
from .._sharding.agreement import Agreement
from .._sharding.local import is_dtensor, local
from .._sharding.pieces import holders_of, sharded_dims
from .._updates.adamw import adamw_
from .._updates.muon import muon_
from .._updates.op import UpdateCall
from .._updates.state import NESTEROV
from ..ops.newton_schulz import KELLER_JORDAN, Coefficients, triples_of
from ._algorithm import SWITCHES, Algorithm, Update
from ._base import FusedOptimizer
from ._exchange import Exchange, Sharded
from ._gradients import home_device
from ._matrices import ITERATE, Chunk, Matrices, Member, chunks_of
from ._options import MixedPrecision, takes_options
from .adamw import AdamAlgorithm

if TYPE_CHECKING:
    from typing_extensions import Unpack

AdjustLR = Literal["original", "match_rms_adamw", "spectral_unclamped"]

#: By ``adjust_lr_fn``: the ratio of a step's length to the learning rate.
RATIOS = {
    None: lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
#: Defaults of groups with ``algorithm="adamw"``, as torch.optim.AdamW's.
ADAMW_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "decoupled_weight_decay": True}


class AdamWGroups(AdamAlgorithm):
    """The groups of Muon that AdamW updates."""

    def check_group(self, name: str, group: dict[str, Any]) -> None:
        missing = [key for key in ADAMW_DEFAULTS if key not in group]
        if missing:
            raise ValueError(f"{name}: a group with algorithm='adamw' lacks {', '.join(missing)}")


class MuonAlgorithm(Algorithm):
    """Two passes of the op around the matrix products, and AdamW for the groups that ask for it."""

    exchanges = True

    def __init__(self) -> None:
        absent = {"algorithm": "muon", "cautious": False, "heads": None, "flatten": False}
        super().__init__(muon_, shows_step=False, required=("momentum_buffer",), absent=absent, switches=SWITCHES)
        self._adamw = AdamWGroups(adamw_, required=("step",), switches=SWITCHES)

    @property
    def members(self) -> tuple[Algorithm, ...]:
        return self, self._adamw

    def of(self, group: dict[str, Any]) -> Algorithm:
        return self._adamw if group["algorithm"] == "adamw" else self

    def check_group(self, name: str, group: dict[str, Any]) -> None:
        accepted = {"algorithm": ("muon", "adamw"), "adjust_lr_fn": tuple(RATIOS)}
        for key, values in accepted.items():
            if group[key] not in values:
                raise ValueError(f"{name}: {key} is {group[key]!r}; accepted: {', '.join(map(repr, values))}")
        triples_of(group["ns_coefficients"], group["ns_steps"])
        heads = group["heads"]
        if heads is not None and (not isinstance(heads, int) or heads < 1):
            raise ValueError(f"{name}: heads is {heads!r}; accepted: None, a positive integer")

    def check_param(self, label: str, param: Tensor, group: dict[str, Any]) -> None:
        if is_lazy(param):
            return
        shape, heads = list(param.shape), group["heads"]
        if not 2 <= param.dim() <= 3 and not (group["flatten"] and param.dim() > 3):
            flatten = " flatten=True takes all dimensions but the first for columns;" if param.dim() > 3 else ""
            raise ValueError(
                f"{label} has shape {shape}; Muon updates matrices, and stacks of matrices [n, rows, columns];{flatten} "
                "put other parameters in a group with algorithm='adamw', or in another optimizer"
            )
        rows = param.shape[0 if group["flatten"] else -2]
        if heads is not None and rows % heads:
            raise ValueError(f"{label} has shape {shape}, and heads is {heads}; accepted: a divisor of its {rows} rows")
        if _is_cut(param, group["flatten"]):
            holders_of(param)
            if not local(param).is_contiguous():
                raise ValueError(
                    f"{label} is a DTensor with pieces {lists.describe(local(param))}; accepted: contiguous"
                )

    def moments(self, group: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, ...]:
        return self.declared.moments

    def option(self, group: dict[str, Any], name: str) -> float:
        return 1.0 if name == "ratio" else super().option(group, name)  # the ratio is each parameter's own

    def flags(self, group: dict[str, Any]) -> int:
        return super().flags(group) | (NESTEROV if group["nesterov"] else 0)

    def constants(self, group: dict[str, Any]) -> tuple:
        coefficients = tuple(triples_of(group["ns_coefficients"], group["ns_steps"]))
        return coefficients, *(group[key] for key in ("eps", "adjust_lr_fn", "heads", "flatten"))

    def prepared(self, updates: list[Update], agreement: Agreement, groups: list[dict[str, Any]]) -> list[UpdateCall]:
        calls: list[UpdateCall] = []
        trained = [param.requires_grad for group in groups for param in group["params"]] if agreement else None
        key = trained, [self.constants(group) for group in groups if self.of(group) is self]
        for launch, arguments in updates:
            batch, taken = launch.batch, launch.table.taken() if launch.table is not None else b""
            if batch.prepared is None or batch.prepared[0] != key:
                positions = {number: position for position, number in enumerate(batch.numbers)}
                batch.prepared = key, self._members(groups, positions, batch.device), (None, [])
            _, (own, exchanges), (known, chunks) = batch.prepared
            if taken != known:  # other units take the step: the same members, other stacks
                own = [member for member in own if not taken or taken[member.position]]
                chunks = [*chunks_of(batch, own), *(Chunk(batch, [exchange]) for exchange in exchanges)]
                batch.prepared = *batch.prepared[:2], (taken, chunks)
            for chunk in chunks:
                calls += chunk.prepared(self.op, launch, arguments)
        if agreement and not updates:  # a rank without gradients takes part
            device = home_device(agreement, [param for group in groups for param in group["params"]])
            for exchange in self._members(groups, {}, device)[1]:
                exchange.orthogonalize(torch.empty(exchange.numel, dtype=ITERATE, device=device), ())
        return calls

    def _members(
        self, groups: list[dict[str, Any]], positions: dict[int, int], device: torch.device
    ) -> tuple[list[Member], list[Exchange]]:
        """Parameters whose matrices are on this rank, and the others: an exchange for each group of ranks, in the same order on
        all ranks. ``positions``: those that have a gradient, by number."""
        own: list[Member] = []
        shared: dict[dist.ProcessGroup, list[Sharded]] = {}
        constants = [self.constants(group) if self.of(group) is self else None for group in groups]
        numbered = enumerate((index, param) for index, group in enumerate(groups) for param in group["params"])
        for number, (index, param) in numbered:
            idle = number not in positions
            if constants[index] is None or (idle and not (is_dtensor(param) and param.requires_grad)):
                continue
            *settings, adjust_lr_fn, heads, flatten = constants[index]
            cut, piece = _is_cut(param, flatten), local(param)
            described = torch.empty(param.shape, device="meta") if cut else piece
            if piece.device != device or (idle and not cut) or not described.numel():
                continue
            matrices = Matrices.of(described, heads, flatten)
            ratio = RATIOS[adjust_lr_fn](matrices.rows, matrices.columns)
            member = Member(positions.get(number, -1), matrices, tuple(settings), (index, ratio))
            if cut:
                holders = holders_of(param)
                sharded = Sharded(member, number, tuple(param.shape), holders, idle)
                shared.setdefault(holders.group, []).append(sharded)
            else:
                own.append(member)
        return own, [Exchange(parameters) for parameters in shared.values()]


def _is_cut(param: Tensor, flatten: bool) -> bool:
    """True if the matrices of a parameter are spread over several ranks."""
    whole = set(range(param.dim() - 2)) if not flatten else set()
    return is_dtensor(param) and bool(sharded_dims(param) - whole)


class Muon(FusedOptimizer, torch.optim.Muon):
    """:class:`torch.optim.Muon` over stacks of matrices, with AdamW for other parameters in the same step.

    A step is one pass over gradients and momentum, which writes 16-bit iterates; matrix products over all matrices of one
    shape together (:func:`amp_kernels.newton_schulz`); and, once these can no longer fail, one pass that moves weights, masters
    and 16-bit copies and one that moves the momentum::

        momentum_buffer = lerp(momentum_buffer, grad, 1 - momentum)
        u = lerp(grad, momentum_buffer, momentum) if nesterov else momentum_buffer
        param = param * (1 - lr * weight_decay) - lr * ratio * newton_schulz(u)

    Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is scalable for LLM
    training", 2025. The step's length does not depend on the size of the gradients. Checkpoints are interchangeable with
    torch's in both directions. A step needs two bytes an element of its matrices, and memory for the iterates, the momentum and
    the products of at most 2^26 elements or of the largest parameter; it keeps none of it. In float32 the strides of a parameter
    do not change its values.

    Args:
        params: as in :class:`AdamW`; matrices ``[rows, columns]`` or stacks of them, ``[n, rows, columns]``. Embeddings,
            the last layer, biases and norms belong in a group with ``algorithm="adamw"``, which takes AdamW's ``betas``,
            ``eps`` and ``amsgrad`` in addition to ``lr`` and ``weight_decay``.
        lr, maximize, decouple_lr, foreach, fused, capturable, differentiable: as in :class:`AdamW`.
        weight_decay: decoupled decay, multiplied by ``lr``.
        momentum: decay rate of the momentum.
        nesterov: orthogonalize the momentum as it will be if the gradient stays.
        ns_coefficients: of the iteration, as ``coefficients`` of :func:`amp_kernels.newton_schulz`.
        eps: the least norm that a matrix is divided by.
        ns_steps: number of iterations, 0 to 99.
        adjust_lr_fn: the ratio: ``"original"`` or ``None`` for ``sqrt(max(1, rows / columns))``, ``"match_rms_adamw"`` for
            ``0.2 * sqrt(max(rows, columns))``, with which AdamW's learning rates fit, ``"spectral_unclamped"`` for
            ``sqrt(rows / columns)``.
        cautious: do not decay weights that the step moves away from 0 (Chen et al., "Cautious weight decay", 2025). In groups
            with ``algorithm="adamw"``, where it is off unless they ask for it, as in :class:`AdamW`.
        heads: cut each matrix by rows into so many, as a fused projection of queries, keys and values, which are
            orthogonalized one by one.
        flatten: take all dimensions but the first for columns, for weights of convolutions.
        options: those of all optimizers here, :class:`MixedPrecision`. Clipping scales gradients before the momentum, so
            that it changes only the weight of one step in the momentum.

    ``algorithm``, ``heads``, ``flatten`` and all numbers may differ between groups.

    Raises:
        ValueError: a number is out of range or NaN, an option is not among those accepted, or a parameter is no matrix.
        TypeError: a parameter that is not frozen is not of an accepted dtype, or sparse, or a tensor subclass.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> hidden, *others = model.parameters()
        >>> groups = [{"params": [hidden], "lr": 0.02}, {"params": others, "algorithm": "adamw", "lr": 3e-4}]
        >>> optimizer = ak.optim.Muon(groups, max_grad_norm=1.0)
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> optimizer.step()
        >>> list(optimizer.state[hidden])
        ['momentum_buffer']
    """

    _algorithm = MuonAlgorithm()

    @takes_options
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = KELLER_JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLR | None = None,
        *,
        maximize: bool = False,
        cautious: bool = False,
        heads: int | None = None,
        flatten: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decouple_lr: bool = False,
        **options: Unpack[MixedPrecision],
    ) -> None:
        self._set_options(options, foreach, fused, differentiable, decouple_lr=decouple_lr)
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": bool(nesterov)}
        products = {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        own = {"algorithm": "muon", "cautious": bool(cautious), "heads": heads, "flatten": bool(flatten)}
        # Not torch.optim.Muon's constructor, which refuses all but matrices.
        hints = {"maximize": maximize, "capturable": capturable, "foreach": None, "fused": True}
        Optimizer.__init__(self, params, {**numbers, **products, **own, **hints})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of all optimizers here, with AdamW's defaults for a group with ``algorithm="adamw"``.

        Raises:
            ValueError: also if a group without ``algorithm`` has keys of AdamW's groups in other implementations.
        """
        foreign = [key for key in ("use_muon", "betas") if key in param_group] if isinstance(param_group, dict) else []
        if foreign and "algorithm" not in param_group:
            raise ValueError(
                f"Muon: param_groups[{len(self.param_groups)}] has {foreign[0]} = {param_group[foreign[0]]!r} and no algorithm; "
                "accepted: algorithm='muon' or 'adamw' with it"
            )
        if isinstance(param_group, dict) and param_group.get("algorithm") == "adamw":
            for key, value in {**ADAMW_DEFAULTS, "cautious": False}.items():
                param_group.setdefault(key, value)
        super().add_param_group(param_group)

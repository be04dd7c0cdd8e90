"""LAMB over float32, float16 and bfloat16 parameters, in two fused passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._checks.types import type_name
from .._sharding.agreement import Agreement
from .._updates.lamb import lamb_
from .._updates.op import UpdateCall
from .._updates.state import ADAPT_ALL, NO_BIAS_CORRECTION
from ._algorithm import Algorithm, Update
from ._base import StandaloneOptimizer
from ._gradients import home_device
from ._options import MixedPrecision, takes_options
from ._trial import parts_of, trial

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LAMBAlgorithm(Algorithm):
    """An update whose length depends on the norms of whole tensors."""

    exchanges = True

    def check_group(self, name: str, group: dict[str, Any]) -> None:
        if not group.get("grad_averaging", True):  # an option of Apex: the first moment then sums gradients
            raise ValueError(f"{name}: grad_averaging is False; accepted: True")

    def check_param(self, label: str, param: Tensor, group: dict[str, Any]) -> None:
        if hasattr(param, "_param_infos"):
            raise TypeError(
                f"{label} has type {type_name(param)}, which holds several tensors; accepted: "
                "FullyShardedDataParallel(use_orig_params=True), or fully_shard (the ratio is one of norms of a tensor)"
            )

    def flags(self, group: dict[str, Any]) -> int:
        return (0 if group["bias_correction"] else NO_BIAS_CORRECTION) | (ADAPT_ALL if group["use_nvlamb"] else 0)

    def prepared(self, updates: list[Update], agreement: Agreement, groups: list[dict[str, Any]]) -> list[UpdateCall]:
        """In two halves where ranks hold pieces of a tensor, with one sum over the ranks in between. Copies of a piece count as
        often as there are, which is as often for each piece of a tensor and cancels in its ratio.

        The sum over the ranks may fail, so the sums of this one are taken from copies of the moments first.
        """
        if not agreement.tensor_groups:
            return super().prepared(updates, agreement, groups)
        params = [param for group in groups for param in group["params"]]
        device = updates[0].launch.batch.device if updates else home_device(agreement, params)
        sums = torch.zeros(len(params), 2, dtype=torch.float64, device=device)
        for update in updates:
            batch, squares = update.launch.batch, []
            for part in parts_of(batch):
                squares.append(torch.zeros(len(batch.pieces[part]), 2, dtype=torch.float64, device=batch.device))
                call = trial(self.op, update, part)
                self.op.step(call.arguments._replace(squares=squares[-1], second=False), call.table)
            sums.index_copy_(0, batch.rows.to(device), torch.cat(squares).to(device))
        sums = agreement.total(sums)
        calls = []
        for update in updates:
            batch, arguments, table = update.launch.batch, update.arguments, update.table
            counters = [buffer.clone() for buffer in arguments.steps]  # only the second half may count
            of_batch = sums.to(batch.device)[batch.rows]
            first = arguments._replace(steps=counters, squares=torch.zeros_like(of_batch), second=False)
            second = arguments._replace(squares=of_batch)
            calls += [UpdateCall(self.op, half, table) for half in (first, second)]
        return calls


class LAMB(StandaloneOptimizer):
    """LAMB in two passes over memory: unscaling, clipping, moments and the norms of weights and directions in the first
    one, weights, masters and 16-bit copies in the second.

    You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020: Adam's direction
    (with decoupled decay), in steps whose length is a fraction ``lr`` of the norm of the weights they move, tensor by
    tensor. For large batches. torch has no LAMB; names and defaults follow Apex' ``FusedLAMB``, except that
    clipping is off unless ``max_grad_norm`` is given (there 1.0). Arithmetic is float32 whatever is stored, norms are
    summed in float64::

        u = m / (1 - beta1**step) / (sqrt(v / (1 - beta2**step)) + eps) + weight_decay * param
        param -= lr * norm(param) / norm(u) * u

    Args:
        params: as in :class:`AdamW`. A parameter is a tensor of its own: the ratio of norms is taken over each one.
        lr, maximize, foreach, fused, capturable, differentiable: as in :class:`AdamW`.
        bias_correction: divide the moments by what their start at zero leaves out.
        betas: decay rates of the moments, two numbers in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, part of the direction.
        use_nvlamb: scale the steps of groups without weight decay by the ratio of norms, too, as the paper does. By
            default such groups (biases, norms) take Adam's steps.
        options: those of all optimizers here, :class:`MixedPrecision`.

    Raises:
        ValueError: a number is out of range or NaN, or an option is not among those accepted.
        TypeError: a parameter that is not frozen is not of an accepted dtype, or sparse, or a tensor subclass.
        RuntimeError: ``differentiable=True``, or ``fused=True`` together with ``foreach``.

    Examples:
        >>> weight = torch.nn.Parameter(torch.full((4,), 2.0))  # its norm is 4
        >>> optimizer = ak.optim.LAMB([weight], lr=0.1, weight_decay=0.0, use_nvlamb=True)
        >>> weight.grad = torch.full((4,), 1e-3)
        >>> optimizer.step()  # by a tenth of that norm, whatever the gradient's
        >>> weight.data
        tensor([1.8000, 1.8000, 1.8000, 1.8000])
    """

    _algorithm = LAMBAlgorithm(lamb_, absent={"bias_correction": True, "use_nvlamb": False})

    @takes_options
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        use_nvlamb: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[MixedPrecision],
    ) -> None:
        self._set_options(options, foreach, fused, differentiable)
        numbers = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        switches = {"bias_correction": bool(bias_correction), "use_nvlamb": bool(use_nvlamb), "maximize": maximize}
        super().__init__(params, **numbers, **switches, capturable=capturable)

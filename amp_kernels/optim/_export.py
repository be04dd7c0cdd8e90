"""The float32 model behind 16-bit parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks.modules import check_module
from .._checks.types import type_name
from ._base import FusedOptimizer


def fp32_state_dict(model: torch.nn.Module, optimizer: FusedOptimizer, *, ema: bool = False) -> dict[str, Any]:
    """The model's state_dict with float32 weights: the optimizer's masters, or with ``ema`` its averages.

    For evaluation, export and fine-tuning in another precision: ``model.float().load_state_dict(...)`` takes the result,
    and so does any float32 instance of the model. Every tensor is a copy on the device of its parameter or buffer, masters and
    averages that are in host memory on the CPU, so later steps do not change it; parameters that are tied stay one tensor.

    Args:
        model: its parameters may be in ``optimizer`` or not. One that has no master there (a frozen one, a float32 one,
            one that never had a gradient, or any with ``master_weights="none"``) is taken as it is, as float32;
            parameters that are not floating point, buffers and extra state keep their dtype.
        optimizer: one of this package.
        ema: take the averages of ``ema_decay``. A parameter that has none (it is not in the optimizer, its group keeps
            none, or it never had a gradient) is exported as without ``ema``.

    Returns:
        What ``model.state_dict()`` returns, metadata included.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` not one of this package: masters elsewhere could not be found.
        ValueError: no parameter of the model is in the optimizer; or ``ema`` is set and no group has an ``ema_decay``.

    Examples:
        >>> model, x = torch.nn.Linear(4, 2).to(torch.bfloat16), torch.ones(1, 4, dtype=torch.bfloat16)
        >>> optimizer = ak.optim.AdamW(model.parameters(), ema_decay=0.999)
        >>> model(x).sum().backward()
        >>> optimizer.step()
        >>> averages = ak.fp32_state_dict(model, optimizer, ema=True)
        >>> torch.nn.Linear(4, 2).load_state_dict(averages)
        <All keys matched successfully>
    """
    check_module("fp32_state_dict", model)
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"fp32_state_dict: optimizer has type {type_name(optimizer)}; accepted: one of amp_kernels.optim (with any other "
            "the float32 weights are the model's own state_dict, or wherever that optimizer keeps them)"
        )
    owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
    params = list(model.parameters())
    if params and not any(id(param) in owned for param in params):
        raise ValueError(
            f"fp32_state_dict: none of the {len(params)} parameters of the model is in the optimizer; accepted: the model "
            "whose parameters the optimizer was made with (a copied or converted model has parameters of its own)"
        )
    if ema and not any(group.get("ema_decay") is not None for group in optimizer.param_groups):
        raise ValueError(
            "fp32_state_dict: ema=True, but the optimizer keeps no averages; accepted: an optimizer made with ema_decay=..."
        )
    optimizer._store.adopt_writes()
    names = ("ema", "master") if ema else ("master",)
    result = model.state_dict(keep_vars=True)  # parameters themselves, so that they can be looked up
    copies: dict[int, Tensor] = {}
    with torch.no_grad():
        for key, value in result.items():
            if not isinstance(value, Tensor):
                continue
            if id(value) not in copies:
                copies[id(value)] = _weight(optimizer, value, names) if id(value) in owned else _plain(value)
            result[key] = copies[id(value)]
    return result


def _weight(optimizer: FusedOptimizer, param: Tensor, names: tuple[str, ...]) -> Tensor:
    """A copy of the first of the states ``names`` that the parameter has, else of the parameter."""
    values = optimizer._store.current(param, optimizer.state, moments=False)
    found = next((values[name] for name in names if values.get(name) is not None), None)
    return _plain(param) if found is None else found.detach().to(torch.float32, copy=True)


def _plain(value: Tensor) -> Tensor:
    is_weight = isinstance(value, torch.nn.Parameter) and value.is_floating_point()
    return value.detach().to(torch.float32 if is_weight else value.dtype, copy=True)

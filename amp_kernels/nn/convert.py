"""``convert``: puts this package's modules into a model that exists."""

from __future__ import annotations

import logging
from typing import TypeVar

import torch

from .cross_entropy import CrossEntropyLoss
from .linear import Linear
from .norm import LayerNorm, RMSNorm

logger = logging.getLogger("amp_kernels")

Model = TypeVar("Model", bound=torch.nn.Module)

#: Which class takes the place of which. A replacement has the same attributes and parameters, and adds class-level
#: defaults only.
REPLACEMENTS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.CrossEntropyLoss: CrossEntropyLoss,
    torch.nn.Linear: Linear,
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.RMSNorm: RMSNorm,
}


def convert(model: Model) -> Model:
    """Replace the Linear, LayerNorm, RMSNorm and CrossEntropyLoss modules of ``model``, itself included, by those of
    :mod:`amp_kernels.nn`, in place.

    Each module stays the object that it is and only changes its class. So names, parameters (also tied ones), hooks,
    training flag, state_dict, optimizers and every reference held elsewhere remain valid.

    Left alone, each with a DEBUG line of the logger ``amp_kernels``: subclasses (they may override forward; norms that
    add one to their weight are such), modules whose forward was replaced on the instance, and modules whose weight is
    not a plain parameter (parametrised, pruned, quantised, sharded). Calling it again changes nothing.

    Args:
        model: any module.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"convert: model is a {type(model).__name__}; accepted: a torch.nn.Module")
    for name, module in model.named_modules():
        replacement = REPLACEMENTS.get(type(module))
        reason = _why_not(module) if replacement else _unknown_subclass(module)
        if reason:
            logger.debug("convert: %s (%s) is left alone: %s", name or "the model", type(module).__name__, reason)
        elif replacement:
            module.__class__ = replacement
            logger.debug(
                "convert: %s is now %s.%s", name or "the model", replacement.__module__, replacement.__qualname__
            )
    return model


def _unknown_subclass(module: torch.nn.Module) -> str | None:
    if isinstance(module, tuple(REPLACEMENTS.values())):
        return None
    base = next((known for known in REPLACEMENTS if isinstance(module, known)), None)
    return base and f"it is a subclass of {base.__name__} and may override forward"


def _why_not(module: torch.nn.Module) -> str | None:
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if isinstance(module, torch.nn.CrossEntropyLoss):  # has no parameters
        return None
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name, module)
        if parameter is module and not hasattr(module, name):  # an RMSNorm has no bias
            continue
        if parameter is module:
            return f"its {name} is not a parameter of its own (parametrised or pruned)"
        if parameter is not None and type(parameter) is not torch.nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}"
        if parameter is not None and not parameter.is_floating_point():
            return f"its {name} has dtype {parameter.dtype}"
    return None

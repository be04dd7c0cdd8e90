"""``convert`` puts this package's modules into a model that exists, ``revert`` takes them out again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import torch

from . import conv1d
from ._check import check_module
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


def convert(model: Model, *, skip: Iterable[str | type] = (), report: bool = False) -> Model:
    """Replace the Linear, LayerNorm, RMSNorm and CrossEntropyLoss modules of ``model``, itself included, by those of
    :mod:`amp_kernels.nn`, in place; and the ``Conv1D`` of Hugging Face's GPT-2.

    Each module stays the object that it is and only changes its class. So names, parameters (also tied ones), hooks,
    training flag, state_dict, optimizers and every reference held elsewhere remain valid. What looks for
    torch's exact classes, such as ``torch.ao.quantization.quantize_dynamic``, finds them again after :func:`revert`.

    Left alone: subclasses (they may override forward; norms that add one to their weight are such), modules whose
    forward was replaced on the instance, and modules whose weight is not a plain parameter (parametrised, pruned,
    quantised, sharded). The logger ``amp_kernels`` tells in one INFO line what was replaced and what was left, by class,
    and in DEBUG lines by module. Calling it again changes nothing.

    Args:
        model: any module.
        skip: what to leave as it is: names of modules (with all that is inside them) or classes.
        report: also print a line for each module that was replaced, or left alone although it has parameters of its own,
            with the reason.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module, or an entry of ``skip`` is neither a name nor a class.
        ValueError: ``model`` has no module of a name in ``skip``. Nothing has been changed when either is raised.

    Examples:
        >>> layers = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        >>> model = ak.convert(torch.nn.Sequential(*layers), skip=["2"])
        >>> [type(module) for module in model]
        [<class 'amp_kernels.nn.linear.Linear'>, <class 'amp_kernels.nn.norm.LayerNorm'>, <class 'torch.nn.modules.linear.Linear'>]
    """
    check_module("convert", model)
    modules = list(model.named_modules())
    names, classes = _skipped(dict(modules), skip)
    replaced, left = Counter(), Counter()
    for name, module in modules:
        kind = type(module)
        replacement = conv1d.derived(kind) if conv1d.is_conv1d(kind) else REPLACEMENTS.get(kind)
        if isinstance(module, classes) or any(name == n or name.startswith(f"{n}.") for n in names):
            reason = "skip names it"
        else:
            reason = _why_not(module) if replacement else _unknown(module)
        if reason is None and replacement is not None:
            module.__class__ = replacement
            replaced[kind.__name__] += 1
            text = f"{name or 'the model'} is now {replacement.__module__}.{replacement.__qualname__}"
        elif reason is not None:
            left[kind.__name__] += 1
            text = f"{name or 'the model'} ({kind.__name__}) is left alone: {reason}"
        else:
            continue
        logger.debug("convert: %s", text)
        if report:
            print(text)
    if replaced or left:
        logger.info("convert: replaced %s; left alone %s", _counted(replaced), _counted(left))
    return model


def revert(model: Model) -> Model:
    """Undo :func:`convert`: give the modules of this package in ``model`` the classes of torch (or transformers) that they
    stand for, in place.

    Left alone, each with a DEBUG line of the logger ``amp_kernels``: modules that do what torch's cannot, a Linear with an
    activation or a CrossEntropyLoss with z_loss, and subclasses. A CrossEntropyLoss that writes gradients in place of the
    logits keeps its own memory afterwards.

    Args:
        model: any module.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.

    Examples:
        >>> model = ak.convert(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4)))
        >>> [type(module).__module__ for module in ak.revert(model)]
        ['torch.nn.modules.linear', 'torch.nn.modules.normalization']
    """
    originals = {ours: theirs for theirs, ours in REPLACEMENTS.items()}
    check_module("revert", model)
    for name, module in model.named_modules():
        kind = type(module)
        original = kind.__base__ if conv1d.is_conv1d(kind.__base__) else originals.get(kind)
        if original is None:
            continue
        more = next((name for name in ("activation", "z_loss") if getattr(module, name, None)), None)
        if more:
            logger.debug("revert: %s (%s) is left alone: it has %s", name or "the model", kind.__name__, more)
        else:
            module.__class__ = original
    return model


def _skipped(modules: dict[str, torch.nn.Module], skip: Iterable[str | type]) -> tuple[list[str], tuple[type, ...]]:
    skip = [skip] if isinstance(skip, (str, type)) else list(skip)
    for entry in skip:
        if not isinstance(entry, (str, type)):
            raise TypeError(
                f"convert: skip holds {entry!r}, a {type(entry).__name__}; accepted: names of modules, classes"
            )
        if isinstance(entry, str) and entry not in modules:
            raise ValueError(
                f"convert: skip holds {entry!r}; accepted: names of modules, as model.named_modules() has them"
            )
    return [e for e in skip if isinstance(e, str)], tuple(e for e in skip if isinstance(e, type))


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "nothing"


def _unknown(module: torch.nn.Module) -> str | None:
    """Why a module that nothing stands for is left alone; ``None`` if there is nothing to say."""
    if type(module) in REPLACEMENTS.values() or conv1d.is_conv1d(type(module).__base__):
        return None
    base = next((known for known in REPLACEMENTS if isinstance(module, known)), None)
    if base:
        return f"it is a subclass of {base.__name__} and may override forward"
    return "nothing here takes its place" if module._parameters else None


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

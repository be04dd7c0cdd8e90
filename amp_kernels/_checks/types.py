"""Types: their names in messages, iterables of tensors, and device types."""

from collections.abc import Mapping

import torch


def type_name(value: object) -> str:
    """``list``, ``numpy.ndarray``, ``torch.optim.adamw.AdamW``: the name alone does not tell classes of two packages apart."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_iterable(label: str, tensors: object, accepted: str) -> None:
    """Raise a TypeError if ``tensors`` cannot be an iterable of tensors: a module and a state_dict iterate over something else."""
    if isinstance(tensors, torch.nn.Module) and not isinstance(tensors, torch.nn.ParameterList):
        found = "is a module"
    elif isinstance(tensors, dict):
        found = "is a state_dict"
    elif isinstance(tensors, str) or not hasattr(tensors, "__iter__"):
        found = f"has type {type_name(tensors)}"
    else:
        return
    raise TypeError(f"{label} {found}; accepted: {accepted}")


def check_tensors_of(label: str, tensors: list) -> None:
    """Raise a TypeError that names the first entry that is no tensor."""
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{label}[{i}] has type {type_name(tensor)}; accepted: a tensor")


def check_scaler(function: str, scaler: object) -> None:
    """Raise a TypeError unless ``scaler`` is ``None`` or a gradient scaler."""
    if not (scaler is None or isinstance(scaler, torch.amp.GradScaler)):
        raise TypeError(f"{function}: scaler has type {type_name(scaler)}; accepted: None, a gradient scaler")


def check_function(function: str, argument: str, value: object) -> None:
    """Raise a TypeError unless ``value`` is ``None`` or can be called."""
    if not (value is None or callable(value)):
        raise TypeError(f"{function}: {argument} has type {type_name(value)}; accepted: None, a function")


def check_mapping(function: str, argument: str, value: object, accepted: str) -> None:
    """Raise a TypeError unless ``value`` is a dict or another mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{function}: {argument} has type {type_name(value)}; accepted: {accepted}")


def check_device_type(op: str, device: object) -> None:
    message = f"{op}: device is {device!r}; accepted: a device type such as 'cuda' or 'cpu'"
    if not isinstance(device, str):
        raise TypeError(message)
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(message) from None

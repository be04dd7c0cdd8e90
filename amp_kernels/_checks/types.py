"""Types: their names in messages, and device types."""

import torch


def type_name(value: object) -> str:
    """``list``, ``numpy.ndarray``, ``torch.optim.adamw.AdamW``: the name alone does not tell classes of two packages apart."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_device_type(op: str, device: object) -> None:
    message = f"{op}: device is {device!r}; accepted: a device type such as 'cuda' or 'cpu'"
    if not isinstance(device, str):
        raise TypeError(message)
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(message) from None

"""The check that functions over whole models begin with."""

import torch


def check_module(function: str, model: object) -> None:
    """Raise a TypeError unless ``model`` is a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{function}: model is a {type(model).__name__}; accepted: a torch.nn.Module")

"""The check that functions over whole models begin with."""

import torch

from .types import type_name


def check_module(function: str, model: object) -> None:
    """Raise a TypeError unless ``model`` is a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{function}: model has type {type_name(model)}; accepted: a torch.nn.Module")

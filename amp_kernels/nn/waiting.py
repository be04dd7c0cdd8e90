"""Norms computed before the model asks for them: together with the addition in front of them (:mod:`.residual`).

The result waits as an attribute of the sum, an ordinary tensor, until the norm's forward gets that tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._dispatch import autocast

NAME = "_amp_kernels_norm"  # attribute of a tensor whose norm waits, and of a norm for which one did


@dataclass
class Successor:
    """The norm that gets a certain sum, unless the model runs in another order than expected: then a result is not fetched, and
    no other is made."""

    norm: torch.nn.Module
    inside: bool  # it belongs to the module that adds
    fetched: bool = field(default=True, compare=False)  # the last result

    def is_ready(self) -> bool:
        if torch.is_inference_mode_enabled():  # writes in place are not counted there
            return False
        # In torch.utils.checkpoint a module runs again, with the same operations, and without its neighbours.
        return self.fetched if _saving_hooks() is None else self.inside

    def give(self, total: Tensor, y: Tensor) -> None:
        """Keep ``y``, the norm of ``total``, until it is fetched."""
        parameters = tuple(self.norm._parameters.values())
        setattr(total, NAME, _Waiting(self, parameters, y, _setting(total)))
        vars(self.norm)[NAME] = True
        if _saving_hooks() is None:
            self.fetched = False


@dataclass(frozen=True)
class _Waiting:
    """The norm of a tensor, and the setting that it was computed in."""

    successor: Successor
    parameters: tuple  # torch.func.functional_call may put others into the norm
    y: Tensor
    setting: tuple

    def is_for(self, norm: torch.nn.Module, x: Tensor) -> bool:
        return (
            self.successor.norm is norm
            and [*map(id, self.parameters)] == [*map(id, norm._parameters.values())]
            and self.setting == _setting(x)
        )


def fetched(norm: torch.nn.Module, x: Tensor) -> Tensor | None:
    """``norm(x)``, if it was computed in the same setting."""
    if NAME not in vars(norm) or torch.compiler.is_compiling() or type(x) is not Tensor:
        return None
    waiting = vars(x).get(NAME)
    if waiting is None or not waiting.is_for(norm, x):
        return None
    delattr(x, NAME)
    waiting.successor.fetched = True
    return waiting.y


def _setting(x: Tensor) -> tuple:
    return (
        x._version,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast.dtype_on(x.device.type),
        _saving_hooks(),
    )


def _saving_hooks() -> tuple | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)

"""Model-specific RMSNorms (LlamaRMSNorm, T5LayerNorm, ... of Hugging Face) over ``amp_kernels.rms_norm``."""

from __future__ import annotations

import torch

from .. import _functional as F
from .._dispatch import autocast
from ..ops.norm import rms_norm
from ._derived import own_forward, shows
from ._probe import same, standing_in, values
from .waiting import fetched


def looks_like_rms_norm(module: torch.nn.Module) -> bool:
    """True if ``module`` has the name, the single weight and the epsilon of such a class."""
    weight = module._parameters.get("weight")
    return (
        type(module).__name__.endswith("Norm")
        and epsilon_of(module) is not None
        and list(module._parameters) == ["weight"]
        and weight is not None
        and weight.ndim == 1
        and weight.numel() > 0
        and not (module._buffers or module._modules)
    )


def is_rms_norm(module: torch.nn.Module) -> bool:
    """True if ``module`` computes RMSNorm with one weight per column. It runs once to find out, because similar classes differ:
    Gemma's adds one to its weight, Cohere's subtracts the mean, Mamba's has a gate."""
    if not looks_like_rms_norm(module):
        return False
    columns, epsilon, kind = module.weight.numel(), epsilon_of(module), type(module)
    weight = values(columns, dtype=torch.float32, seed=0.7)
    # One row is small enough for the epsilon to matter.
    x = values(2, columns, dtype=torch.float32)
    x[0] *= max(epsilon, 1e-12) ** 0.5
    probe = standing_in(module, _parameters={"weight": torch.nn.Parameter(weight, requires_grad=False)})
    return same(lambda t: kind.forward(probe, t), lambda t: F.rms_norm(t, (columns,), weight, epsilon), x, 1e-5)


def epsilon_of(module: torch.nn.Module) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def mixed(module: torch.nn.Module, x: torch.Tensor) -> bool:
    """True if the dtype of the result is the model's to choose: for mixed inputs it differs between models."""
    return x.dtype != module.weight.dtype and autocast.dtype_on(x.device.type) is None


@shows("amp_kernels.rms_norm")
def forward(self, x: torch.Tensor) -> torch.Tensor:
    if (y := fetched(self, x)) is not None:
        return y
    if mixed(self, x):
        return own_forward(self, x)
    return rms_norm(x, self.weight.shape, self.weight, epsilon_of(self))


def of_sum(
    module: torch.nn.Module, branch: torch.Tensor, stream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``(norm(stream + branch), stream + branch)`` in one pass, or ``None``."""
    if mixed(module, stream):
        return None
    return rms_norm(branch, module.weight.shape, module.weight, epsilon_of(module), residual=stream)

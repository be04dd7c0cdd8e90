"""The activations of a GEMM's epilogue, by their names in the schemas, in torch's definitions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import _functional as F


def halves(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and value columns of a gated activation: the first and the second half."""
    width = z.shape[-1] // 2
    return z[..., :width], z[..., width:]


def _swiglu(z: torch.Tensor) -> torch.Tensor:
    gate, up = halves(z)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "swiglu": _swiglu,
}

_FLAT = 1e4  # from here on the tail of a smooth activation is 0


def activated(z: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(z)`` as the kernels compute it: 0 at -inf, where torch's formulas of smooth activations give NaN."""
    if activation in GATED:
        gate, up = halves(z)
        return activated(gate, "silu") * up
    return ACTIVATIONS[activation](z if activation in ("none", "relu") else z.clamp(min=-_FLAT))


def sloping(z: torch.Tensor) -> torch.Tensor:
    """``z`` for torch's derivatives of smooth activations, which are NaN at infinity: 0 and 1 in the kernels."""
    return z.clamp(-_FLAT, _FLAT)


#: Gated activations: the result has half the columns of ``z``, ``silu(z[..., :F]) * z[..., F:]``.
GATED = ("swiglu",)


def activated_width(activation: str, columns: int) -> int:
    """Columns of ``activation(z)`` for a ``z`` of ``columns``."""
    return columns // 2 if activation in GATED else columns


def check_activation(op: str, activation: str | None) -> str:
    """The schema's name of ``activation``; ``None`` means ``"none"``."""
    name = "none" if activation is None else activation
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{op}: activation is {activation!r}; accepted: None, {', '.join(map(repr, ACTIVATIONS))}")
    return name


def check_gated_width(op: str, name: str, tensor: torch.Tensor, dim: int, activation: str) -> None:
    if activation in GATED and tensor.shape[dim] % 2:
        raise ValueError(
            f"{op}: {name} has shape {list(tensor.shape)}; accepted with activation={activation!r}: gates and values "
            f"in equal numbers, so an even size {tensor.shape[dim] + 1} or {tensor.shape[dim] - 1}"
        )

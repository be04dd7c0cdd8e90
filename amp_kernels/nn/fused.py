"""nn.Sequential and feed-forward blocks that run a linear layer and its activation as one fused op.

Each call decides what to fuse from the current modules: a module that has a hook or was parametrised, pruned or replaced is
called as usual. Only the container changes its class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .. import _functional as F
from .._dispatch import autocast
from ..ops._tensors import is_strided
from ..ops.linear import linear
from ..ops.mlp import mlp
from . import activation, conv1d
from ._derived import base_of, own_forward, shows
from ._probe import same, standing_in, values
from ._wrapped import is_untouched
from .linear import Linear


def operands(module: torch.nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """``(weight, bias)`` of an untouched linear layer without an activation, else ``None``."""
    if not is_untouched(module):
        return None
    kind = type(module)
    if kind is Linear and module.activation is None:
        return module.weight, module.bias
    if kind.forward is conv1d.forward and base_of(kind) is not None:
        return module.weight.t(), module.bias
    return None


def _activation(module: torch.nn.Module) -> str | None:
    name = activation.name_of(module)
    return name if name is not None and is_untouched(module) else None


def _idle(module: torch.nn.Module) -> bool:
    """True for a dropout without effect."""
    kind = type(module)
    return kind is torch.nn.Dropout and (module.p == 0 or not module.training) and is_untouched(module)


#: In the namespace of a container: its calls of :func:`amp_kernels.mlp` save no activation.
RECOMPUTE = "_amp_kernels_recompute"


def run(modules: Sequence[torch.nn.Module], x: Tensor, recompute: bool = False) -> Tensor:
    """Apply ``modules`` to ``x`` in order."""
    modules = [module for module in modules if not _idle(module)]
    i = 0
    while i < len(modules):
        first = operands(modules[i]) if i + 1 < len(modules) and isinstance(x, Tensor) and is_strided(x) else None
        name = None if first is None else _activation(modules[i + 1])
        if name is None:
            x = modules[i](x)
            i += 1
            continue
        second = operands(modules[i + 2]) if i + 2 < len(modules) else None
        if second is None:
            x, i = linear(x, *first, activation=name), i + 2
        else:
            x, i = mlp(x, *first, *second, activation=name, recompute=recompute), i + 3
    return x


@shows("amp_kernels.mlp or amp_kernels.linear")
def sequential(self, input: Tensor) -> Tensor:
    return run(list(self._modules.values()), input, RECOMPUTE in vars(self))


#: Feed-forward blocks of transformers: their modules' names in the order of execution.
CHAINS = {
    frozenset(names): names
    for names in (
        ("c_fc", "act", "c_proj", "dropout"),  # GPT-2
        ("dense", "intermediate_act_fn"),  # BERT
        ("fc1", "activation_fn", "fc2"),  # ViT, CLIP
        ("wi", "act", "dropout", "wo"),  # T5
    )
}

#: Gated blocks: the gated layer, the gate and its activation, and the modules after the product.
GATED_CHAINS = {
    frozenset({up, *gate, *rest}): (up, gate, rest)
    for up, gate, rest in (
        ("up_proj", ("gate_proj", "act_fn"), ("down_proj",)),  # Llama
        ("wi_1", ("wi_0", "act"), ("dropout", "wo")),  # T5 v1.1
    )
}


def _mixed(modules: dict[str, torch.nn.Module], x: Tensor) -> bool:
    """True if weights and input have different dtypes outside autocast, as in T5: the model's forward casts then."""
    if autocast.dtype_on(x.device.type) is not None:
        return False
    weights = (getattr(module, "weight", None) for module in modules.values())
    return any(weight.dtype != x.dtype for weight in weights if weight is not None)


@shows("amp_kernels.mlp or amp_kernels.linear")
def feed_forward(self, x: Tensor) -> Tensor:
    modules = self._modules
    names = CHAINS.get(frozenset(modules))
    if names is None or None in modules.values() or _mixed(modules, x):
        return own_forward(self, x)
    return run([modules[name] for name in names], x, RECOMPUTE in vars(self))


@shows("amp_kernels.mlp or amp_kernels.linear")
def gated_feed_forward(self, x: Tensor) -> Tensor:
    modules = self._modules
    names = GATED_CHAINS.get(frozenset(modules))
    if names is None or None in modules.values() or _mixed(modules, x):
        return own_forward(self, x)
    up, gate, rest = names
    hidden = run([modules[name] for name in gate], x) * modules[up](x)
    return run([modules[name] for name in rest], hidden)


def fusible(module: torch.nn.Module, skipped: Callable[[torch.nn.Module], bool]) -> tuple[Callable, list] | None:
    """The fused forward for the container ``module`` and the activations that it fuses with the preceding layer; ``None`` if
    there is nothing to fuse."""
    if None in module._modules.values():  # only its own forward knows how to run without that layer
        return None
    kind = type(module)
    if kind.forward is torch.nn.Sequential.forward:
        forward, names = sequential, list(module._modules)
        pairs = list(pairwise(names))
    else:
        key = frozenset(module._modules)
        if key in CHAINS:
            forward, names = feed_forward, CHAINS[key]
        elif key in GATED_CHAINS:
            forward, names = gated_feed_forward, GATED_CHAINS[key][1]
        else:
            return None
        pairs = [names[:2]]
        if module._parameters or module._buffers:
            return None
    found = []
    for layer, after in pairs:
        after = module._modules[after]
        if (
            operands(module._modules[layer])
            and activation.recognised(after)
            and is_untouched(after)
            and not skipped(after)
        ):
            found.append(after)
    if not found or "forward" in vars(module):
        return None
    return (forward, found) if forward is sequential or _computes(module, forward) else None


class _Affine(torch.nn.Module):
    """A stand-in for a linear layer."""

    def __init__(self, columns: int, rows: int, seed: float):
        super().__init__()
        self.weight, self.bias = values(rows, columns, seed=seed), values(rows, seed=seed + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Triple(torch.nn.Module):
    """A stand-in for a dropout that makes its position visible."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def _computes(module: torch.nn.Module, forward: Callable) -> bool:
    """True if the class of ``module`` computes the same as ``forward``, tested with small layers."""
    parts = {}
    for name, child in module._modules.items():
        if operands(child):
            last = name in ("c_proj", "fc2", "wo", "down_proj")
            parts[name] = _Affine(6, 5, 0.3) if last else _Affine(4, 6, 0.4 + 0.1 * len(parts))
        elif type(child) is torch.nn.Dropout:
            parts[name] = _Triple()
        elif activation.recognised(child):
            parts[name] = child
        else:
            return False
    probe, kind = standing_in(module, _modules=parts), type(module)
    return same(lambda x: kind.forward(probe, x), lambda x: forward(probe, x), values(2, 3, 4), 1e-9)

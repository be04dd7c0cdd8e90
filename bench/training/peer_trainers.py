"""GPT-2's training step with the parts of other libraries: their optimizers, their norms and their head with loss."""

import torch
from torch import nn

from ..ops import muon_step, peer_optimizers, peers
from ..ops.layouts import EIGHT_BIT, LAYOUTS
from .gpt import GPT2
from .trainers import BETAS, WEIGHT_DECAY, Optimizers, split_for_muon

WITH_KERNELS = ("liger", "apex")  # whose norms, and head with loss where they have it, replace torch's


def providers(device: torch.device) -> dict[str, dict]:
    """By name: what differs from torch's step, of each library that runs here."""
    found = {}
    for layout in (LAYOUTS[0], EIGHT_BIT):
        found |= {name: {"optimizers": _adamw(name)} for name in peer_optimizers.adamw(layout, device)}
    for name in WITH_KERNELS:
        if peers.skipped(name, device) is None:
            found[name] = {**found.get(name, {}), "kernels": lambda model, name=name: adopt(model, name)}
    if peers.skipped("dion", device) is None:
        found["dion Muon"] = {"optimizers": _dion}
    return {name: {"provider": "torch", **options} for name, options in found.items()}


def adopt(model: GPT2, name: str) -> None:
    """Gives the model the norms of a library, and its head with loss."""
    device = next(model.parameters()).device
    if norm := peers.functions("layer_norm", device).get(name):
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.forward = lambda x, module=module: norm(x, module.weight, module.bias)
    model.head_loss = peers.functions("linear_cross_entropy", device).get(name)


def _adamw(name: str) -> Optimizers:
    def make(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
        options = {"lr": lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
        return [peer_optimizers.OPTIMIZERS[name].make(list(model.parameters()), LAYOUTS[0], **options)]

    return make


def _dion(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    return muon_step.dions(muon_step.Groups(*split_for_muon(model)), lr)
